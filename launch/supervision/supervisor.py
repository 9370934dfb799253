"""Starts the engine's processes, watches them, and stops them in order. Touches no request.

The supervision policy (policy.py) decides what to do about a death. Each child (child_process.py) has two pipes: on
*status* it writes reports; on *lifeline* it reads commands, and the end of that pipe means that the supervisor exited.
"""

import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from quire.launch.config.sampling_options import import_paths
from quire.launch.supervision.child_process import ChildProcess
from quire.launch.supervision.members import Process, RemoteWorkers, Role, WatchedProcess
from quire.launch.supervision.process_owner import ProcessOwner
from quire.launch.supervision.supervision_policy import ProcessCounts, SupervisionPolicy
from quire.protocol.config import EngineConfig
from quire.protocol.process.child import Command

# A worker thread that waits for other threads spins this many times and then sleeps. The default of torch's OpenMP
# library is to spin forever, which takes the core from the scheduler, the front ends and other programs. Measurements:
# docs/log/2026-11-21.md.
WORKER_ENVIRONMENT = {"GOMP_SPINCOUNT": "20000"}


class WorkerModule(NamedTuple):
    """What a worker process runs: a module, with additional arguments."""

    module: str = "quire.worker_proc"
    arguments: tuple[str, ...] = ()


REAL_WORKER = WorkerModule()


class FrontEndModule(NamedTuple):
    """What the front-end processes run, their number, and the descriptors that they inherit."""

    module: str
    num_processes: int
    arguments: tuple[str, ...]
    pass_fds: tuple[int, ...]


class Supervisor(ProcessOwner):
    """The engine's processes: a scheduler, a worker per rank, and for a server its front ends."""

    policy: SupervisionPolicy
    stop_order = (("frontend",), ("scheduler",), ("worker",))
    stop_deadline = 5.0

    def __init__(
        self,
        config: EngineConfig,
        *,
        quiet: bool = False,
        worker: WorkerModule = REAL_WORKER,
        front_end: FrontEndModule | None = None,
        standby: bool = False,
        on_new_scheduler: Callable[[int], None] = lambda incarnation: None,
        environment: Mapping[str, str] | None = None,
        directory: Path | None = None,
        remote: RemoteWorkers | None = None,
    ) -> None:
        """
        Args:
            directory: the socket directory, of mode 0700, if the caller has made it; None: make one.
            environment: variables for all children, besides those of this process.
            standby: keep a standby worker per rank.
            remote: starts the workers, which are on nodes and have no standbys; None: they are on this machine.
            on_new_scheduler: for a front end in this process: called with the incarnation of each new scheduler.
        """
        self.config = config
        self._worker = worker
        self._front_end = front_end
        self._quiet = quiet
        self._environment = environment or {}
        self._on_new_scheduler = on_new_scheduler
        self._import_paths = import_paths(config.logits_processors)
        self._remote = remote
        super().__init__(directory)
        count = front_end.num_processes if front_end is not None else 0
        counts = ProcessCounts(config.tensor_parallel_size, count, standby and remote is None)
        self.policy = SupervisionPolicy(counts, self)

    def start_engine(self) -> None:
        """Start scheduler and workers. ``is_ready`` is true once they can serve."""
        write_config(self.directory, self.config)
        if self._remote is not None:
            self._remote.open(self.directory)
        self.policy.begin(time.monotonic())

    def start_all(self) -> None:
        """Start the engine and its front ends."""
        self.start_engine()
        self.policy.admit_front_ends(time.monotonic())

    @property
    def awaited(self) -> str:
        return self.policy.awaited

    def wake_on(self, fd: int) -> None:
        """Let ``watch`` return while ``fd`` is readable."""
        self._children.wake_on(fd)

    def _publish(self, now: float) -> None:
        self._write(self.policy.restarts, self.policy.pids)

    # ---- policy.Runner

    def start(self, role: Role, *, incarnation: int, worker_epoch: int, index: int) -> WatchedProcess:
        self._sweep(incarnation, worker_epoch)
        if self._remote is not None:
            self._remote.prepare_group(worker_epoch)
            if role == "worker":
                worker = self._remote.start(index, is_quiet=self._quiet)
                return self._children.add(worker)
        common = ["--directory", str(self.directory)]
        fds: tuple[int, ...] = ()
        environment = dict(self._environment)
        if role == "scheduler":
            module = "quire.scheduler_proc"
            arguments = ["--incarnation", str(incarnation), "--worker-epoch", str(worker_epoch)]
        elif role == "worker":
            module = self._worker.module
            arguments = [*(["--quiet"] if self._quiet else []), *self._worker.arguments]
            environment |= {name: value for name, value in WORKER_ENVIRONMENT.items() if name not in os.environ}
        else:
            assert self._front_end is not None
            module, fds = self._front_end.module, self._front_end.pass_fds
            arguments = [*self._front_end.arguments, "--index", str(index)]
        return self._children.add(ChildProcess(module, [*common, *arguments], fds, environment, self._import_paths))

    def send(self, process: Process, command: Command) -> None:
        if command.kind == "worker_epoch" and self._remote is not None:
            self._remote.prepare_group(command.worker_epoch)
        super().send(process, command)

    def scheduler_replaced(self, incarnation: int) -> None:
        self._on_new_scheduler(incarnation)

    def _sweep(self, incarnation: int, worker_epoch: int) -> None:
        """Unlink sockets and shared memory of ended schedulers and groups. A process that has one open keeps it."""
        for file in self.directory.iterdir():
            found = re.match(r"(frontend|worker|ranks|links)-(\d+)", file.name)
            if found and int(found[2]) < (incarnation if found[1] == "frontend" else worker_epoch):
                file.unlink(missing_ok=True)

    def front_end_exited(self, pid: int) -> None:
        """Notify the scheduler that a front end which another process supervises has ended."""
        if (scheduler := self.policy.scheduler) is not None:
            self.send(scheduler.process, Command("front_end_exited", pid=pid))

    def _all_ended(self) -> None:
        self.policy.members.clear()
        if self._remote is not None:
            self._remote.close()


def write_config(directory: Path, config: EngineConfig) -> None:
    """Write the file ``config``; readers see the old or the new one."""
    fresh = directory / "config.new"
    fresh.write_bytes(msgspec.msgpack.encode(config))
    fresh.replace(directory / "config")
