"""Starts the engine's processes, watches them, and ends them in order. Touches no request.

Each child has two pipes: *status*, on which it reports, and *lifeline*, whose end tells it that the supervisor is
gone (``protocol/child.py``). The first failure that a child reports is the reason the user is told.
"""

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from quire.launch.sampling_options import import_paths
from quire.protocol.child import EX_CONFIG, Report
from quire.protocol.config import FIRST_EPOCH, EngineConfig
from quire.protocol.errors import ConfigError, EngineError, QuireError

# A thread of the worker that waits for the others spins this often and then sleeps. Spinning for ever, which is the
# default of the OpenMP library that torch brings, takes the core from whoever is waited for: the scheduler, the front
# end, another program. Docs: the log of 2026-11-21.
WORKER_ENVIRONMENT = {"GOMP_SPINCOUNT": "20000"}
START_DEADLINE = 60.0
STOP_DEADLINE = 5.0


class WorkerProgram(NamedTuple):
    """What runs as a worker: a module, and arguments of its own."""

    module: str = "quire.worker_proc"
    arguments: tuple[str, ...] = ()


REAL_WORKER = WorkerProgram()


class ChildProcess:
    """One process, its pipes and what it reported."""

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        pass_fds: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
        import_paths: Sequence[str] = (),
    ) -> None:
        """``environment``: variables for the child, where the user's own do not set them.

        ``import_paths``: where the child finds modules, besides where it would.
        """
        self.name = name
        self.failure: Report | None = None
        self.started = self.ready = False
        self.detail: dict[str, float] = {}
        status, child_status = os.pipe()
        child_lifeline, self._lifeline = os.pipe()
        command = [sys.executable, "-P", "-m", module, "--status-fd", str(child_status)]
        command += ["--lifeline-fd", str(child_lifeline), *arguments]
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=(child_status, child_lifeline, *pass_fds),
                env={**(environment or {}), **os.environ, **_python_path(import_paths)},
            )
        finally:
            os.close(child_status)
            os.close(child_lifeline)
        self.status = status
        os.set_blocking(status, False)
        self._partial = b""

    def read_reports(self) -> bool:
        """Take in what the child wrote; False once it has closed its end, which it does by ending."""
        while True:
            try:
                data = os.read(self.status, 65536)
            except BlockingIOError:
                return True
            if not data:
                return False
            *lines, self._partial = (self._partial + data).split(b"\n")
            for line in lines:
                self._take(msgspec.json.decode(line, type=Report))

    def _take(self, report: Report) -> None:
        match report.event:
            case "started":
                self.started = True
            case "ready":
                self.ready = True
                self.detail = report.detail
            case "failed":
                self.failure = report

    def reason(self) -> str:
        """Why it is not running: what it said itself, else how it died."""
        if self.failure is not None:
            return self.failure.text
        code = self.process.poll()
        if code is not None and code < 0:
            return f"the {self.name} process was killed by {signal.Signals(-code).name}"
        return f"the {self.name} process ended with status {code} and said nothing"

    def end(self, deadline: float, request: int = signal.SIGTERM) -> None:
        """Ask with a signal, wait until ``deadline`` (monotonic), then kill. Leaves nothing behind."""
        if self.process.poll() is None:
            self.process.send_signal(request)
            try:
                self.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for fd in (self.status, self._lifeline):
            with contextlib.suppress(OSError):
                os.close(fd)
        self.status = self._lifeline = -1


def _python_path(more: Sequence[str]) -> dict[str, str]:
    """The variable by which a child also finds what lies in ``more``; behind the user's own entries."""
    entries = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return {"PYTHONPATH": os.pathsep.join(dict.fromkeys([*entries, *more]))} if more else {}


class Supervisor:
    """The engine's processes: a scheduler, a worker per rank, and for a server its front end.

    Owns the socket directory (mode 0700) and the children; a context manager that ends both.
    """

    def __init__(self, config: EngineConfig, *, quiet: bool = False, worker: WorkerProgram = REAL_WORKER) -> None:
        self.config = config
        self._worker = worker
        self._quiet = quiet
        self._import_paths = import_paths(config.logits_processors)
        self._children: list[ChildProcess] = []
        self._selector = selectors.DefaultSelector()
        self._begun = time.monotonic()
        self.directory = Path(tempfile.mkdtemp(prefix="quire-"))  # mkdtemp makes it 0700

    def __enter__(self) -> "Supervisor":
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.stop(engine_died=kind is not None and issubclass(kind, EngineError))

    def start_engine(self) -> None:
        """Spawn scheduler and workers; ``wait_ready`` tells when they can serve."""
        self._begun = time.monotonic()
        (self.directory / "config").write_bytes(msgspec.msgpack.encode(self.config))
        place = ["--directory", str(self.directory)]
        self.spawn("scheduler", "quire.scheduler_proc", place)
        quiet = ["--quiet"] if self._quiet else []
        for rank in range(self.config.tensor_parallel_size):
            # Rank 0 speaks for the others, unless something goes wrong.
            silent = ["--quiet"] if rank else quiet
            arguments = [*place, "--epoch", str(FIRST_EPOCH), "--rank", str(rank), *silent, *self._worker.arguments]
            self.spawn("worker", self._worker.module, arguments, environment=WORKER_ENVIRONMENT)

    def spawn(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        pass_fds: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> ChildProcess:
        child = ChildProcess(name, module, arguments, pass_fds, environment, self._import_paths)
        self._children.append(child)
        self._selector.register(child.status, selectors.EVENT_READ, child)
        return child

    @property
    def ready(self) -> bool:
        """Whether the scheduler (which waits for the worker) and the front end, if any, are ready."""
        return all(child.ready for child in self._children if child.name != "worker")

    def wait_ready(self) -> None:
        """Until ``ready``. Loading may take as long as it takes; starting may not.

        Raises:
            ConfigError, EngineError: a child failed (with its own reason) or did not even start in time.
        """
        while not self.ready:
            self.watch(0.5)

    def wake_on(self, fd: int) -> None:
        """``watch`` also returns when ``fd`` can be read (and empties it)."""
        self._selector.register(fd, selectors.EVENT_READ, None)

    def watch(self, timeout: float | None) -> None:
        """Take in reports; returns at the first, or after ``timeout`` seconds (None: no limit).

        Raises:
            ConfigError, EngineError: a child has ended, or did not start in time; says why.
        """
        starting = [child for child in self._children if not child.started]
        if starting:
            timeout = min(1.0, START_DEADLINE if timeout is None else timeout)
        for key, _ in self._selector.select(timeout):
            if key.data is None:
                os.read(key.fd, 4096)
                continue
            child: ChildProcess = key.data
            if not child.read_reports():
                self._selector.unregister(child.status)
                child.process.wait()
                raise self._first_failure(child)
        if starting and not starting[0].started and time.monotonic() > self._begun + START_DEADLINE:
            raise EngineError(f"the {starting[0].name} process did not start within {START_DEADLINE:.0f} s")

    def _first_failure(self, dead: ChildProcess) -> QuireError:
        """The reason behind the death of ``dead``: a worker's own words before those of whoever noticed."""
        settle = time.monotonic() + 0.5
        for child in self._children:
            while child is not dead and child.failure is None and time.monotonic() < settle:
                if not child.read_reports():
                    break
                time.sleep(0.01)
        failed = [c for c in self._children if c.failure is not None] or [dead]
        failed.sort(key=lambda c: c.name != "worker")
        cause = failed[0]
        refused = cause.failure is not None and cause.failure.exit_status == EX_CONFIG
        return (ConfigError if refused else EngineError)(cause.reason())

    def child(self, name: str) -> ChildProcess:
        return next(child for child in self._children if child.name == name)

    def stop(self, *, engine_died: bool = False) -> None:
        """End all children, front ends first and workers last, and remove the directory. May be called twice.

        Args:
            engine_died: the front end need not drain: its streams end with an error.
        """
        order = {"frontend": 0, "scheduler": 1, "worker": 2}
        deadline = time.monotonic() + STOP_DEADLINE
        for child in sorted(self._children, key=lambda c: order[c.name]):
            told = signal.SIGUSR1 if engine_died and child.name == "frontend" else signal.SIGTERM
            child.end(deadline, told)
        self._children.clear()
        self._selector.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def kill(self) -> None:
        """End everything now."""
        for child in self._children:
            with contextlib.suppress(ProcessLookupError):
                child.process.kill()
