"""Starts engines, router and front ends, watches them, and stops them in order. Touches no request.

The FleetPolicy (policy.py) decides what to do about a death or an order.
"""

import contextlib
import copy
import os
import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from quire.launch.config.sampling_options import import_paths
from quire.launch.fleet.engine_settings import engine_config
from quire.launch.fleet.places import Places
from quire.launch.fleet.policy import FleetCounts, FleetPolicy
from quire.launch.fleet.slots import EngineSlot, directory_name
from quire.launch.supervision.child_process import ChildProcess
from quire.launch.supervision.children import Children
from quire.launch.supervision.directory import make_directory, remove_directory
from quire.launch.supervision.members import Process, WatchedProcess
from quire.launch.supervision.supervisor import FrontEndProgram, WorkerProgram, write_config
from quire.protocol.config import EngineConfig, RankPlace
from quire.protocol.errors import EngineError, shortage
from quire.protocol.process.child import Command, Report
from quire.protocol.process.log import LOG_ENGINE_VARIABLE, LogOptions
from quire.protocol.process.restarts import Restarts, read_pids, read_restarts, write_pids, write_restarts
from quire.protocol.routing import RoutingConfig

STOP_DEADLINE = 8.0
"""Seconds to end all processes. An engine gives its own processes 5 of them."""
PUBLISH_S = 1.0
"""Seconds between two sums of the engines' figures."""


class Fleet:
    """The processes of a server with several engines, as the Supervisor is for one engine.

    Owns the socket directory (mode 0700), in which each process of an engine has one of its own, and the children; a
    context manager that removes and ends them. All methods must be called from one thread, which must not end before
    the children.
    """

    def __init__(
        self,
        config: EngineConfig,
        routing: RoutingConfig,
        num_engines: int,
        *,
        places: Places,
        worker: WorkerProgram,
        front_end: FrontEndProgram,
        standby: bool,
        drain_timeout: float,
        log: LogOptions,
    ) -> None:
        """
        Args:
            config: what all engines have in common.
            standby: keep a standby worker per rank of each engine.
            log: options of the logs of all processes.
        """
        self.config = config
        self._routing = routing
        self._worker = worker
        self._front_end = front_end
        self._standby = standby
        self._log = log
        self._import_paths = import_paths(config.logits_processors)
        self._children = Children()
        self.directory, self._lock = make_directory()
        self._ended_restarts: Counter[str] = Counter()
        """Restarts within engine processes that have ended."""
        self._engine_restarts: dict[int, Restarts] = {}
        """Restarts within each engine process that runs, as of the last time they were published."""
        self._publish_at = 0.0
        self._written_restarts = Restarts()
        self._written_pids: dict[str, list[int]] = {}
        counts = FleetCounts(num_engines, front_end.num_processes)
        self.policy = FleetPolicy(counts, str(self.directory), places, self, drain_timeout)

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.stop()

    def start_all(self) -> None:
        """Start all processes. ``is_ready`` is true once they can serve."""
        write_config(self.directory, self.config)
        (self.directory / "router").write_bytes(msgspec.json.encode(self._routing))
        self.policy.begin(time.monotonic())

    @property
    def is_ready(self) -> bool:
        return self.policy.is_ready

    @property
    def awaited(self) -> str:
        """The engines that a start waits for, for people."""
        return ", ".join(f"engine {each.number}" for each in self.slots if each.state == "starting") or "connecting"

    @property
    def wakeup_fd(self) -> int:
        """A descriptor; a byte written to it makes ``watch`` return."""
        return self._children.wakeup_fd

    @property
    def slots(self) -> list[EngineSlot]:
        """The engines, by number."""
        return [slot for _, slot in sorted(self.policy.engines.slots.items())]

    def watch(self, timeout: float | None) -> None:
        """Process reports and ends of children; return after the first ones, or after ``timeout`` seconds.

        Raises:
            ConfigError, EngineError: the server cannot continue, with the reason.
        """
        wait = min(self.policy.next_event(time.monotonic()), PUBLISH_S)
        for child, reports, ended in self._children.wait(wait if timeout is None else min(timeout, wait)):
            self._take(child, reports, ended)
        self.policy.tick(time.monotonic())
        self._publish(time.monotonic())
        if self.policy.fatal_error is not None:
            raise self.policy.fatal_error

    def _take(self, child: WatchedProcess, reports: Sequence[Report], ended: bool) -> None:
        now = time.monotonic()
        for report in reports:
            self.policy.reported(child, report, now)
        if ended:
            member = next((m for m in self.policy.members() if m.process is child), None)
            reason = child.describe_end(member.role if member is not None else "front end")
            self._children.close_child(child)
            self.policy.ended(child, reason, now)

    def _publish(self, now: float) -> None:
        """Publish the sums of all engines to the front ends. A full disk must not end the server: the next call tries
        again."""
        if now < self._publish_at:
            return
        self._publish_at = now + PUBLISH_S
        pids = {"supervisor": [os.getpid()], **self.policy.pids}
        for slot in self.slots:
            if slot.member is None:
                continue
            directory = self._engine_directory(slot.number, slot.num_starts)
            self._engine_restarts[slot.number] = read_restarts(directory)
            for role, found in read_pids(directory).items():
                if role != "supervisor":  # which is the process of the engine
                    pids.setdefault(role, []).extend(found)
        totals = self._ended_restarts.copy()
        for each in self._engine_restarts.values():
            totals.update(msgspec.structs.asdict(each))
        restarts = copy.copy(self.policy.restarts)
        restarts.scheduler, restarts.worker = totals["scheduler"], totals["worker"]
        if restarts != self._written_restarts:
            self._written_restarts = restarts
            with contextlib.suppress(OSError):
                write_restarts(self.directory, restarts)
        if pids != self._written_pids:
            self._written_pids = pids
            with contextlib.suppress(OSError):
                write_pids(self.directory, pids)

    def _engine_directory(self, engine: int, num_starts: int) -> Path:
        return self.directory / directory_name(engine, num_starts)

    # ---- policy.Runner

    def start_engine(self, engine: int, num_starts: int, num_engines: int, ranks: list[RankPlace]) -> ChildProcess:
        directory = self._engine_directory(engine, num_starts)
        config = engine_config(self.config, engine, num_starts, num_engines, ranks)
        arguments = ["--directory", str(directory), "--worker", self._worker.module]
        arguments += [f"--worker-argument={argument}" for argument in self._worker.arguments]
        arguments += ["--standby"] if self._standby else []
        try:
            directory.mkdir(mode=0o700)
            write_config(directory, config)  # before the router reads it
        except OSError as error:
            raise EngineError(shortage(error) or str(error)) from None
        return self._start("quire.launch.fleet", arguments, more={LOG_ENGINE_VARIABLE: str(engine)})

    def start_router(self, incarnation: int) -> ChildProcess:
        return self._start("quire.router_proc", ["--directory", str(self.directory), "--incarnation", str(incarnation)])

    def start_front_end(self, index: int) -> ChildProcess:
        program = self._front_end
        arguments = ["--directory", str(self.directory), *program.arguments, "--index", str(index)]
        return self._start(program.module, arguments, program.pass_fds)

    def _start(
        self, module: str, arguments: Sequence[str], fds: Sequence[int] = (), more: Mapping[str, str] | None = None
    ) -> ChildProcess:
        """``more``: variables besides those of the log."""
        environment = {**self._log.environment, **(more or {})}
        try:
            return self._children.start(module, arguments, fds, environment, self._import_paths)
        except OSError as error:
            raise EngineError(shortage(error) or str(error)) from None

    def send(self, process: Process, command: Command) -> None:
        _child(process).send(command)

    def kill(self, process: Process) -> None:
        self._children.kill(_child(process))

    def engine_ended(self, engine: int, num_starts: int) -> None:
        directory = self._engine_directory(engine, num_starts)
        self._ended_restarts.update(msgspec.structs.asdict(self._engine_restarts.pop(engine, Restarts())))
        shutil.rmtree(directory, ignore_errors=True)

    # ---- shutdown

    def drain(self) -> None:
        """Let front ends refuse new requests, finish the running ones and end."""
        self.policy.drain()

    def has_front_ends(self) -> bool:
        return bool(self.policy.front_ends)

    def stop(self) -> None:
        """Stop all children, front ends first, and remove the directory. May be called twice.

        If the server has failed, front ends do not drain: their streams end with an error.
        """
        died = self.policy.fatal_error is not None
        self.policy.stop()
        deadline = time.monotonic() + STOP_DEADLINE
        for roles in (("frontend",), ("router", "engine")):
            members = [member for member in self.policy.members() if member.role in roles]
            for member in members:
                self.send(member.process, Command("engine_failed" if died and "frontend" in roles else "stop"))
            for member in members:
                _child(member.process).end(deadline)
        self._children.close()
        remove_directory(self.directory, self._lock)
        self._lock = -1

    def kill_all(self) -> None:
        """Kill all children now. The processes of engines that are killed end with them."""
        self.policy.stop()
        for member in self.policy.members():
            _child(member.process).kill()


def _child(process: Process) -> ChildProcess:
    assert isinstance(process, ChildProcess)
    return process
