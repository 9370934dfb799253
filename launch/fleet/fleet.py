"""Starts engines, router and front ends, watches them, and stops them in order. Touches no request.

The FleetPolicy (policy.py) decides what to do about a death or an order.
"""

import copy
import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from quire.launch.config.sampling_options import import_paths
from quire.launch.fleet.engine_settings import engine_config
from quire.launch.fleet.engine_slot import EngineSlot, directory_name
from quire.launch.fleet.fleet_policy import FleetCounts, FleetPolicy
from quire.launch.fleet.places import Places
from quire.launch.supervision.child_process import ChildProcess
from quire.launch.supervision.process_owner import ProcessOwner
from quire.launch.supervision.supervisor import FrontEndModule, WorkerModule, write_config
from quire.protocol.config import EngineConfig, RankPlace
from quire.protocol.errors import EngineError, shortage
from quire.protocol.process.log import LOG_ENGINE_VARIABLE, LogOptions
from quire.protocol.process.restarts import Restarts, read_pids, read_restarts
from quire.protocol.routing import RoutingConfig

PUBLISH_S = 1.0
"""Seconds between two sums of the engines' figures."""


class Fleet(ProcessOwner):
    """The processes of a server with several engines, as the Supervisor is for one engine.

    In the socket directory, each process of an engine has one of its own.
    """

    policy: FleetPolicy
    stop_order = (("frontend",), ("router", "engine"))
    stop_deadline = 8.0
    """An engine gives its own processes 5 s of it."""

    def __init__(
        self,
        config: EngineConfig,
        routing: RoutingConfig,
        num_engines: int,
        *,
        places: Places,
        worker: WorkerModule,
        front_end: FrontEndModule,
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
        super().__init__()
        self._ended_restarts: Counter[str] = Counter()
        """Restarts within engine processes that have ended."""
        self._engine_restarts: dict[int, Restarts] = {}
        """Restarts within each engine process that runs, as of the last time they were published."""
        self._publish_at = 0.0
        counts = FleetCounts(num_engines, front_end.num_processes)
        self.policy = FleetPolicy(counts, str(self.directory), places, self, drain_timeout)

    def start_all(self) -> None:
        """Start all processes. ``is_ready`` is true once they can serve."""
        write_config(self.directory, self.config)
        (self.directory / "router").write_bytes(msgspec.json.encode(self._routing))
        self.policy.begin(time.monotonic())

    @property
    def awaited(self) -> str:
        """The engines that a start waits for, for people."""
        return ", ".join(f"engine {each.number}" for each in self.slots if each.state == "starting") or "connecting"

    @property
    def slots(self) -> list[EngineSlot]:
        """The engines, by number."""
        return [slot for _, slot in sorted(self.policy.engines.slots.items())]

    def _longest_wait(self, now: float) -> float:
        return min(super()._longest_wait(now), PUBLISH_S)

    def _publish(self, now: float) -> None:
        """Publish the sums of all engines to the front ends."""
        if now < self._publish_at:
            return
        self._publish_at = now + PUBLISH_S
        pids = self.policy.pids
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
        self._write(restarts, pids)

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
        front_end = self._front_end
        arguments = ["--directory", str(self.directory), *front_end.arguments, "--index", str(index)]
        return self._start(front_end.module, arguments, front_end.pass_fds)

    def _start(
        self, module: str, arguments: Sequence[str], fds: Sequence[int] = (), more: Mapping[str, str] | None = None
    ) -> ChildProcess:
        """``more``: variables besides those of the log."""
        environment = {**self._log.environment, **(more or {})}
        try:
            return self._children.add(ChildProcess(module, arguments, fds, environment, self._import_paths))
        except OSError as error:
            raise EngineError(shortage(error) or str(error)) from None

    def engine_ended(self, engine: int, num_starts: int) -> None:
        directory = self._engine_directory(engine, num_starts)
        self._ended_restarts.update(msgspec.structs.asdict(self._engine_restarts.pop(engine, Restarts())))
        shutil.rmtree(directory, ignore_errors=True)
