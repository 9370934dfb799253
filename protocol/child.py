"""What every child process of the supervisor shares: it says how it fares, and it never outlives its parent.

A child inherits two pipe ends. On *status* it writes JSON lines (``Report``), whose last one is the reason when it
fails. *lifeline* is never written to: it comes to its end when the supervisor is gone, whatever killed it, and a
thread that waits for that ends the process, in the middle of a step if need be. (The kernel's parent-death signal
would not do alone: it fires when the *thread* that started the child ends, and LLM may be built in any thread.)
"""

import argparse
import logging
import os
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Literal, NoReturn

import msgspec

from quire.protocol.errors import ConfigError, QuireError

EX_CONFIG = 78
LOG_LEVEL_VARIABLE = "QUIRE_LOG_LEVEL"


class Report(msgspec.Struct, omit_defaults=True):
    """One line of a child's status pipe. ``text``: for a person, one line."""

    event: Literal["started", "plan", "ready", "failed"]
    text: str = ""
    exit_status: int = 0
    detail: dict[str, float] = {}


class Child:
    """A process' own end of both pipes."""

    def __init__(self, status_fd: int) -> None:
        self._status_fd = status_fd

    def report(self, report: Report) -> None:
        try:
            os.write(self._status_fd, msgspec.json.encode(report) + b"\n")
        except OSError:
            sys.exit(1)  # nobody supervises us any more

    def fail(self, error: BaseException) -> NoReturn:
        """Report the reason in one line and end the process: status 78 for bad settings or checkpoints, else 1.

        An error that nobody foresaw also leaves its traceback on stderr.
        """
        if not isinstance(error, QuireError):
            traceback.print_exception(error)
        text = str(error) if isinstance(error, QuireError) else f"{type(error).__name__}: {error}"
        status = EX_CONFIG if isinstance(error, ConfigError) else 1
        self.report(Report("failed", " ".join(text.split()), status))
        sys.exit(status)


def child_parser(description: str | None) -> argparse.ArgumentParser:
    """The arguments that the supervisor gives every child."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--directory", type=Path, required=True, help="socket directory; holds the file config")
    parser.add_argument("--status-fd", type=int, required=True)
    parser.add_argument("--lifeline-fd", type=int, required=True)
    return parser


def enter_child(status_fd: int, lifeline_fd: int, directory: Path) -> Child:
    """To be called first: tie this process to its parent, and leave signals from the terminal to the supervisor.

    ``directory``: the sockets'; removed by whoever outlives a supervisor that could not do so itself.
    """
    logging.basicConfig(level=_log_level(), format="quire %(asctime)s %(levelname)s %(name)s: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for fd in (status_fd, lifeline_fd):
        os.set_inheritable(fd, False)
    threading.Thread(target=_end_with_parent, args=(lifeline_fd, directory), name="lifeline", daemon=True).start()
    return Child(status_fd)


def _log_level() -> int:
    """What ``QUIRE_LOG_LEVEL`` asks for; a word that is no level is said, and then left alone."""
    word = os.environ.get(LOG_LEVEL_VARIABLE, "").upper()
    level = logging.getLevelNamesMapping().get(word, logging.WARNING)
    if word and word not in logging.getLevelNamesMapping():
        print(f"{LOG_LEVEL_VARIABLE} must be DEBUG, INFO, WARNING or ERROR, not {word!r}", file=sys.stderr)
    return level


def _end_with_parent(lifeline_fd: int, directory: Path) -> None:
    os.read(lifeline_fd, 1)
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(1)


def on_sigterm(stop: Callable[[], None]) -> None:
    """Call ``stop`` when this process is asked to end."""

    def handler(signum: int, frame: FrameType | None) -> None:
        stop()

    signal.signal(signal.SIGTERM, handler)
