"""Starts the engine's processes, watches them, and ends them in order. Touches no request.

The SupervisionPolicy decides what to do about a death (policy.py). Each child (child_process.py) has two pipes:
*status*, on which it reports, and *lifeline*, on which it is told what to do, and whose end says that the supervisor is
gone.
"""

import contextlib
import fcntl
import os
import re
import selectors
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from quire.launch.config.sampling_options import import_paths
from quire.launch.supervision.child_process import ChildProcess
from quire.launch.supervision.members import Member, Process, Role
from quire.launch.supervision.policy import ProcessCounts, SupervisionPolicy
from quire.protocol.config import EngineConfig
from quire.protocol.process.child import Command

# A thread of the worker that waits for the others spins this often and then sleeps. Spinning for ever, which is the
# default of the OpenMP library that torch brings, takes the core from what is waited for: the scheduler, the front
# end, another program. Docs: the log of 2026-11-21.
WORKER_ENVIRONMENT = {"GOMP_SPINCOUNT": "20000"}
STOP_DEADLINE = 5.0
PREFIX = "quire-"
LOCK = "lock"
"""A file in the socket directory that its supervisor keeps locked: where it is not, the supervisor is gone."""


class WorkerProgram(NamedTuple):
    """What runs as a worker: a module, and arguments of its own."""

    module: str = "quire.worker_proc"
    arguments: tuple[str, ...] = ()


REAL_WORKER = WorkerProgram()


class FrontEndProgram(NamedTuple):
    """What runs as a front end, how many of it, and what it inherits."""

    module: str
    num_processes: int
    arguments: tuple[str, ...]
    pass_fds: tuple[int, ...]


class Supervisor:
    """The engine's processes: a scheduler, a worker per rank, and for a server its front ends.

    Owns the socket directory (mode 0700) and the children; a context manager that ends both. All its methods are for
    one thread, which must live as long as the children are to.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        quiet: bool = False,
        worker: WorkerProgram = REAL_WORKER,
        front_end: FrontEndProgram | None = None,
        standby: bool = False,
        on_new_scheduler: Callable[[int], None] = lambda incarnation: None,
    ) -> None:
        """
        Args:
            standby: keep a process per rank that has done the slow part of a worker's start.
            on_life: for a front end in this process: called when there is another scheduler, with its number.
        """
        self.config = config
        self._worker = worker
        self._front_end = front_end
        self._quiet = quiet
        self._on_new_scheduler = on_new_scheduler
        self._import_paths = import_paths(config.logits_processors)
        self._selector = selectors.DefaultSelector()
        self._wakeup, self._wake = os.pipe()
        for fd in (self._wakeup, self._wake):
            os.set_blocking(fd, False)
        self._selector.register(self._wakeup, selectors.EVENT_READ, None)
        self.directory, self._lock = _make_directory()
        count = front_end.num_processes if front_end is not None else 0
        self.policy = SupervisionPolicy(ProcessCounts(config.tensor_parallel_size, count, standby), self)

    def __enter__(self) -> "Supervisor":
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.stop()

    def start_engine(self) -> None:
        """Spawn scheduler and workers; ``is_ready`` tells when they can serve."""
        (self.directory / "config").write_bytes(msgspec.msgpack.encode(self.config))
        self.policy.begin(time.monotonic())

    def start_front_ends(self) -> None:
        self.policy.admit_front_ends(time.monotonic())

    @property
    def is_ready(self) -> bool:
        return self.policy.is_ready

    @property
    def wakeup_fd(self) -> int:
        """Whatever writes a byte to it makes ``watch`` return."""
        return self._wake

    def watch(self, timeout: float | None) -> None:
        """Look after the children; returns at the first that says something, or after ``timeout`` seconds.

        Raises:
            ConfigError, EngineError: the engine cannot go on; says why.
        """
        patience = self.policy.next_event(time.monotonic())
        for key, _ in self._selector.select(patience if timeout is None else min(timeout, patience)):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wakeup, 4096)
            else:
                self._hear(key.data)
        self.policy.tick(time.monotonic())
        if self.policy.fatal_error is not None:
            raise self.policy.fatal_error

    def _hear(self, child: ChildProcess) -> None:
        if not child.watched:
            return  # killed a moment ago
        reports, ended = child.read_reports()
        now = time.monotonic()
        for report in reports:
            self.policy.reported(child, report, now)
        if ended:
            member = next((m for m in self.policy.members if m.process is child), None)
            how = child.how_it_ended(member.role if member is not None else "worker")
            self._let_go(child)
            self.policy.ended(child, how, now)

    # ---- what the policy can do (policy.Runner)

    def start(self, role: Role, *, incarnation: int, worker_epoch: int, index: int) -> ChildProcess:
        self._sweep(incarnation, worker_epoch)
        place = ["--directory", str(self.directory)]
        fds: tuple[int, ...] = ()
        environment = None
        if role == "scheduler":
            module, own = (
                "quire.scheduler_proc",
                ["--incarnation", str(incarnation), "--worker-epoch", str(worker_epoch)],
            )
        elif role == "worker":
            module, own = self._worker.module, [*(["--quiet"] if self._quiet else []), *self._worker.arguments]
            environment = WORKER_ENVIRONMENT
        else:
            assert self._front_end is not None
            module, own, fds = self._front_end.module, list(self._front_end.arguments), self._front_end.pass_fds
            own += ["--index", str(index)]
        child = ChildProcess(module, [*place, *own], fds, environment, self._import_paths)
        for fd in child.watched:
            self._selector.register(fd, selectors.EVENT_READ, child)
        return child

    def send(self, process: Process, command: Command) -> None:
        assert isinstance(process, ChildProcess)
        process.send(command)

    def kill(self, process: Process) -> None:
        assert isinstance(process, ChildProcess)
        process.kill()
        self._let_go(process)

    def scheduler_replaced(self, incarnation: int) -> None:
        self._on_new_scheduler(incarnation)

    def _sweep(self, incarnation: int, worker_epoch: int) -> None:
        """Sockets and shared memory of schedulers and groups that are no more. A process that has one open keeps it."""
        for file in self.directory.iterdir():
            found = re.match(r"(frontend|worker|ranks)-(\d+)", file.name)
            if found and int(found[2]) < (incarnation if found[1] == "frontend" else worker_epoch):
                file.unlink(missing_ok=True)

    def _let_go(self, child: ChildProcess) -> None:
        for fd in child.watched:
            self._selector.unregister(fd)
        child.close()

    # ---- the end

    def drain(self) -> None:
        """Front ends take no more requests, and end when those that run have."""
        self.policy.drain()

    def has_front_ends(self) -> bool:
        return bool(self.policy.front_ends)

    def stop(self) -> None:
        """End all children, front ends first and workers last, and remove the directory. May be called twice.

        Where the engine is gone, front ends need not drain: their streams end with an error.
        """
        self.policy.stop()
        died = self.policy.fatal_error is not None
        why = " ".join(str(self.policy.fatal_error).split()) if died else ""
        deadline = time.monotonic() + STOP_DEADLINE
        for role in ("frontend", "scheduler", "worker"):
            members = [m for m in self.policy.members if m.role == role]
            for member in members:
                gone = died and role == "frontend"
                self.send(member.process, Command("engine_failed") if gone else Command("stop", text=why))
            for member in members:
                _child_of(member).end(deadline)
        self.policy.members.clear()
        self._selector.close()
        for fd in (self._wakeup, self._wake, self._lock):
            with contextlib.suppress(OSError):
                os.close(fd)
        self._wakeup = self._wake = self._lock = -1
        shutil.rmtree(self.directory, ignore_errors=True)

    def kill_all(self) -> None:
        """End everything now."""
        self.policy.stop()
        for member in self.policy.members:
            _child_of(member).kill()


def _child_of(member: Member) -> ChildProcess:
    assert isinstance(member.process, ChildProcess)
    return member.process


def _make_directory() -> tuple[Path, int]:
    """A socket directory of our own and its lock, once what killed supervisors have left behind is gone."""
    for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        _remove_if_left(left)
    directory = Path(tempfile.mkdtemp(prefix=PREFIX))  # mkdtemp makes it 0700
    fresh = directory / f"{LOCK}.new"
    lock = os.open(fresh, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fresh.rename(directory / LOCK)  # locked before another process can find it
    return directory, lock


def _remove_if_left(directory: Path) -> None:
    """Only where it is ours and has a lock that no process holds."""
    try:
        if directory.is_symlink() or directory.stat().st_uid != os.getuid():
            return
        lock = os.open(directory / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return
    else:
        shutil.rmtree(directory, ignore_errors=True)
    finally:
        os.close(lock)
