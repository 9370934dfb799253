"""A child process's side of its supervision: status reports, commands, and exit with the supervisor.

A child inherits two pipe ends. It writes JSON lines (``Report``) to *status*: a heartbeat twice a second, and on
failure the reason as the last line. It reads JSON lines (``Command``) from *lifeline*. End of file there means that the
supervisor exited or was killed; the thread that reads it then ends the process, in the middle of a step if
necessary.

The kernel's parent-death signal covers the case that this thread cannot run. It fires when the *thread* that started
the child exits, so the supervisor starts all children in a thread that lives as long as itself.
"""

import argparse
import contextlib
import ctypes
import faulthandler
import os
import select
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

from quire.protocol.errors import ConfigError, QuireError, shortage
from quire.protocol.nodes import WorkerLink
from quire.protocol.process.log import first_line, start_logging
from quire.protocol.process.log_stream import survive_without_stderr
from quire.protocol.process.owned_folder import remove_folder
from quire.protocol.process.signals import IGNORED_SIGNALS, STOP_SIGNALS
from quire.protocol.routing import EnginePlace

EX_CONFIG = 78
HEARTBEAT_S = 0.5
"""Seconds between two heartbeats of a child."""
HANG_TIMEOUT_S = 15.0
"""Seconds without progress of the main loop after which a child counts as hung. A normal round takes milliseconds."""
PR_SET_PDEATHSIG = 1


class Report(msgspec.Struct, omit_defaults=True):
    """One line of a child's status pipe.

    Attributes:
        event: started; alive (``text``: what the start of a worker does now); joined (a worker moves to the group of
            ``worker_epoch``); ready (the scheduler: that group can run steps, on the device ``text``; a front end: it
            accepts connections);
            progress (that group committed a first token); suspect_confirmed (a request that made that group die has
            ended); group_failed (the scheduler gives that group up for the reason ``text``); failed (the child exits
            for the reason ``text``); incarnation (an engine: its scheduler now is ``incarnation``); drained (a front
            end: it has no request on ``engine``); order (a front end: an administrator orders ``text``, of
            launch/fleet, for ``engine``).
        text: one line for people, or the order.
        engine: number of the engine; -1 for all.
    """

    event: Literal[
        "started", "alive", "joined", "ready", "progress", "suspect_confirmed", "group_failed", "failed", "incarnation",
        "drained", "order",
    ]  # fmt: skip
    text: str = ""
    exit_status: int = 0
    detail: dict[str, float] = {}
    worker_epoch: int = 0
    incarnation: int = 0
    engine: int = -1


class Command(msgspec.Struct, omit_defaults=True):
    """One line from the supervisor to a child.

    Attributes:
        kind: join (a worker: join the group of ``worker_epoch`` as ``rank``); worker_epoch (the scheduler: the group
            before ``worker_epoch`` ended for the reason ``text``, expect the new one); front_end_exited (the
            scheduler, an engine for its scheduler, or the router: process ``pid`` ended); scheduler (a front end:
            connect to scheduler ``incarnation``); drain (a front end: accept no more requests, exit when none runs);
            engine_failed (a front end: end every answer with an error, then exit); stop (exit now); engines (a front
            end or the router of a server with several engines: they now are ``engines``); router (a front end: connect
            to router ``incarnation``).
        link: with join, for a worker on a node: how it reaches the scheduler.
    """

    kind: Literal[
        "join", "worker_epoch", "front_end_exited", "scheduler", "drain", "engine_failed", "stop", "engines", "router"
    ]
    worker_epoch: int = 0
    rank: int = 0
    incarnation: int = 0
    pid: int = 0
    text: str = ""
    engines: list[EnginePlace] = []
    link: WorkerLink | None = None


class Child:
    """A process's own end of both pipes.

    ``fileno`` is readable while commands are queued.
    """

    def __init__(self, status_fd: int, lifeline_fd: int = -1, directory: Path | None = None) -> None:
        """Without a ``lifeline_fd`` there are no commands and no heartbeats: for tests.

        Args:
            directory: the socket directory. A child that outlives the supervisor removes it, because the supervisor
                cannot.
        """
        self._status_fd = status_fd
        self._lifeline_fd = lifeline_fd
        self._directory = directory
        self._parent = os.getppid()
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
            sys.exit(1)  # the supervisor exited

    def fail(self, error: BaseException) -> NoReturn:
        """Report the reason in one line and exit: status 78 for bad settings or checkpoints, 1 for other errors.

        An unexpected error also leaves its traceback on stderr, unless the supervisor has exited.
        """
        if os.getppid() != self._parent:
            sys.exit(1)
        text = str(error) if isinstance(error, QuireError) else shortage(error)
        if not text:
            traceback.print_exception(error)
            text = f"{type(error).__name__}: {first_line(str(error))}"
        status = EX_CONFIG if isinstance(error, ConfigError) else 1
        self.report(Report("failed", " ".join(text.split()), status))
        sys.exit(status)

    def fileno(self) -> int:
        return self._wake

    def take_commands(self) -> list[Command]:
        """Return the commands received since the last call, in order."""
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
        """Block until commands may be queued."""
        select.select([self._wake], [], [])

    def put(self, command: Command) -> None:
        """Queue a command as if the supervisor had sent it."""
        # Append before waking: a reader that consumes the wake-up in between also finds the command.
        self._commands.append(command)
        os.eventfd_write(self._wake, 1)
        self._pending = True

    def watch_progress(self, on_hang: Callable[[], None]) -> None:
        """Start the hang watch: ``progress`` must then be called about once a second.

        After HANG_TIMEOUT_S without a call, the stacks of all threads are written to stderr, ``on_hang`` is called in
        the lifeline thread, and heartbeats stop.
        """
        self._seen, self._on_hang = time.monotonic(), on_hang

    def progress(self) -> None:
        """Report one round of the main loop to the hang watch."""
        self._seen = time.monotonic()

    def close(self) -> None:
        """Close the wake descriptor; for tests, since a process closes it by exiting."""
        os.close(self._wake)

    # ---- the thread

    def _listen(self) -> None:
        partial, beat_at = b"", time.monotonic() + HEARTBEAT_S
        while True:
            readable, _, _ = select.select([self._lifeline_fd], [], [], max(0.0, beat_at - time.monotonic()))
            if time.monotonic() >= beat_at:  # also while commands arrive all the time
                self._beat()
                beat_at = time.monotonic() + HEARTBEAT_S
            if not readable:
                continue
            data = os.read(self._lifeline_fd, 65536)
            if not data:
                self._end_with_parent()
            *lines, partial = (partial + data).split(b"\n")
            for line in lines:
                self.put(msgspec.json.decode(line, type=Command))

    def _beat(self) -> None:
        # The heartbeat comes from this thread and says that the process runs; that its main loop does is known only by
        # ``progress``.
        if self._seen is not None and time.monotonic() > self._seen + HANG_TIMEOUT_S:
            self._hang()
            return
        try:
            os.write(self._status_fd, b'{"event":"alive"}\n')
        except OSError:
            self._end_with_parent()

    def _hang(self) -> None:
        """Dump the stacks and call ``on_hang``, once; no heartbeat follows."""
        on_hang, self._on_hang = self._on_hang, None
        if on_hang is not None:
            # Before the heartbeat stops, after which the supervisor kills this process: the stacks are what is left of
            # it.
            faulthandler.dump_traceback(all_threads=True)
            on_hang()

    def _end_with_parent(self) -> NoReturn:
        if self._directory is not None:
            remove_folder(self._directory)
        # No clean-up handlers: they may wait for the main thread, which may be in the middle of a step.
        os._exit(1)


def child_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser for the arguments that the supervisor passes to every child."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--directory", type=Path, required=True, help="socket directory; holds the file config")
    parser.add_argument("--status-fd", type=int, required=True)
    parser.add_argument("--lifeline-fd", type=int, required=True)
    return parser


def init_child(status_fd: int, lifeline_fd: int, directory: Path, *, death_signal: int = signal.SIGCONT) -> Child:
    """Tie this process to its parent and leave signals to the supervisor; must be called first.

    STOP_SIGNALS are ignored: they go to the whole process group, and the supervisor then sends each child its command,
    in order.

    Args:
        death_signal: signal from the kernel when the parent exits. SIGCONT wakes a stopped process, so that it can exit
            by itself; SIGKILL is for a process that may be stuck in native code and has nothing to clean up.
    """
    survive_without_stderr()
    start_logging()
    for number in (*STOP_SIGNALS, *IGNORED_SIGNALS):
        signal.signal(number, signal.SIG_IGN)
    for fd in (status_fd, lifeline_fd):
        # A grandchild that kept the lifeline's other end, or the status pipe, would hide the death of this process.
        os.set_inheritable(fd, False)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(death_signal))
    return Child(status_fd, lifeline_fd, directory)
