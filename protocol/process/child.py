"""What every child process of the supervisor shares: it says how it fares, hears what to do, and never outlives it.

A child inherits two pipe ends. On *status* it writes JSON lines (``Report``): that it lives, twice a second, and as the
last one why it fails. On *lifeline* come JSON lines (``Command``); it comes to its end when the supervisor is gone,
whatever killed it, and the thread that reads it then ends the process, in the middle of a step if need be.

The kernel's parent-death signal helps where that thread cannot run. It fires when the *thread* that started the child
ends: the supervisor starts all of them in one that lives as long as it does.
"""

import argparse
import contextlib
import ctypes
import faulthandler
import os
import select
import shutil
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NoReturn

import msgspec

from quire.protocol.errors import ConfigError, QuireError
from quire.protocol.process.log import start_logging
from quire.protocol.process.log_stream import survive_without_stderr

EX_CONFIG = 78
HEARTBEAT_S = 0.5
"""How often a child says that it lives."""
HANG_TIMEOUT_S = 15.0
"""How long its main loop may take for one round before it counts as hung. A round of milliseconds is the rule."""
PR_SET_PDEATHSIG = 1


class Report(msgspec.Struct, omit_defaults=True):
    """One line of a child's status pipe.

    Attributes:
        event: started; alive; joined (a worker moves to the group of ``worker_epoch``); ready (the scheduler: that
            group can run steps; a front end: it accepts connections); progress (that group committed a first token);
            suspect_confirmed (a request that made that group die has ended); group_failed (the scheduler gives that
            group up for the reason ``text``); failed (the child exits for the reason ``text``).
        text: one line for people.
    """

    event: Literal["started", "alive", "joined", "ready", "progress", "suspect_confirmed", "group_failed", "failed"]
    text: str = ""
    exit_status: int = 0
    detail: dict[str, float] = {}
    worker_epoch: int = 0


class Command(msgspec.Struct, omit_defaults=True):
    """One line of what the supervisor tells a child.

    Attributes:
        kind: join (a worker: join the group of ``worker_epoch`` as ``rank``); worker_epoch (the scheduler: the group
            before ``worker_epoch`` ended for the reason ``text``, expect the new one); front_end_exited (the
            scheduler: process ``pid`` ended); scheduler (a front end: connect to scheduler ``incarnation``); drain (a
            front end: accept no more requests, exit when none runs); engine_failed (a front end: end every answer
            with an error, then exit); stop (exit now).
    """

    kind: Literal["join", "worker_epoch", "front_end_exited", "scheduler", "drain", "engine_failed", "stop"]
    worker_epoch: int = 0
    rank: int = 0
    incarnation: int = 0
    pid: int = 0
    text: str = ""


class Child:
    """A process' own end of both pipes.

    ``fileno`` is readable while commands wait to be taken.
    """

    def __init__(self, status_fd: int, lifeline_fd: int = -1, directory: Path | None = None) -> None:
        """``directory``: the sockets'; removed by a child that outlives a supervisor that could not do so itself.

        Without a ``lifeline_fd`` there are no commands and no signs of life: for tests.
        """
        self._status_fd = status_fd
        self._lifeline_fd = lifeline_fd
        self._directory = directory
        self._commands: deque[Command] = deque()
        self._pending = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._seen: float | None = None
        self._on_hang: Callable[[], None] | None = None
        if lifeline_fd >= 0:
            threading.Thread(target=self._listen, name="lifeline", daemon=True).start()

    # ---- for the main loop

    def report(self, report: Report) -> None:
        try:
            os.write(self._status_fd, msgspec.json.encode(report) + b"\n")
        except OSError:
            sys.exit(1)  # the supervisor is gone

    def fail(self, error: BaseException) -> NoReturn:
        """Report the reason in one line and end the process: status 78 for bad settings or checkpoints, else 1.

        An unexpected error also leaves its traceback on stderr.
        """
        if not isinstance(error, QuireError):
            traceback.print_exception(error)
        text = str(error) if isinstance(error, QuireError) else f"{type(error).__name__}: {error}"
        status = EX_CONFIG if isinstance(error, ConfigError) else 1
        self.report(Report("failed", " ".join(text.split()), status))
        sys.exit(status)

    def fileno(self) -> int:
        return self._wake

    def take_commands(self) -> list[Command]:
        """Those that came since the last call, in order."""
        if not self._pending:
            return []
        self._pending = False
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        commands = []
        while self._commands:
            commands.append(self._commands.popleft())
        return commands

    def wait(self) -> None:
        """Until there may be commands."""
        select.select([self._wake], [], [])

    def put(self, command: Command) -> None:
        """As if the supervisor had said it."""
        # In this order: a thread that takes the wake in between takes the command, too, and does not sleep on.
        self._commands.append(command)
        os.eventfd_write(self._wake, 1)
        self._pending = True

    def watch_progress(self, on_hang: Callable[[], None]) -> None:
        """From now on ``progress`` is called at least every second or so; where it is not for HANG_S, the stacks of all
        threads are written to stderr, ``on_hang`` is called in a thread of its own, and the signs of life end.
        """
        self._seen, self._on_hang = time.monotonic(), on_hang

    def progress(self) -> None:
        """The main loop has come round."""
        self._seen = time.monotonic()

    def close(self) -> None:
        """For tests: a process ends with it."""
        os.close(self._wake)

    # ---- the thread

    def _listen(self) -> None:
        partial = b""
        while True:
            readable, _, _ = select.select([self._lifeline_fd], [], [], HEARTBEAT_S)
            if not readable:
                self._beat()
                continue
            data = os.read(self._lifeline_fd, 65536)
            if not data:
                self._end_with_parent()
            *lines, partial = (partial + data).split(b"\n")
            for line in lines:
                self.put(msgspec.json.decode(line, type=Command))

    def _beat(self) -> None:
        if self._seen is not None and time.monotonic() > self._seen + HANG_TIMEOUT_S:
            self._hang()
            return
        try:
            os.write(self._status_fd, b'{"event":"alive"}\n')
        except OSError:
            self._end_with_parent()

    def _hang(self) -> None:
        """Once: the supervisor hears nothing from now on."""
        on_hang, self._on_hang = self._on_hang, None
        if on_hang is not None:
            faulthandler.dump_traceback(all_threads=True)
            on_hang()

    def _end_with_parent(self) -> NoReturn:
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        os._exit(1)


def child_parser(description: str | None) -> argparse.ArgumentParser:
    """The arguments that the supervisor gives every child."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--directory", type=Path, required=True, help="socket directory; holds the file config")
    parser.add_argument("--status-fd", type=int, required=True)
    parser.add_argument("--lifeline-fd", type=int, required=True)
    return parser


def init_child(status_fd: int, lifeline_fd: int, directory: Path, *, death_signal: int = signal.SIGCONT) -> Child:
    """To be called first: tie this process to its parent, and leave signals to the supervisor.

    A SIGTERM or SIGINT that goes to the whole process group is the supervisor's to obey: it says what to do, in order.

    Args:
        death_signal: from the kernel, when the parent is gone: SIGCONT wakes a process that was stopped, so that it can
            end by itself; SIGKILL is for one that may be stuck in native code and has nothing to clean up.
    """
    survive_without_stderr()
    start_logging()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    for fd in (status_fd, lifeline_fd):
        os.set_inheritable(fd, False)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(death_signal))
    return Child(status_fd, lifeline_fd, directory)
