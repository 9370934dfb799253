"""The fleet policy with fake processes and a fake clock."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from quire.launch.fleet.fleet_policy import FleetCounts, FleetPolicy
from quire.launch.fleet.places import LocalPlaces, Places
from quire.launch.supervision.members import Process, Role
from quire.protocol.config import RankPlace
from quire.protocol.errors import EngineError
from quire.protocol.process.child import Command, Report
from quire.protocol.routing import EnginePlace

DRAIN_S = 10.0


@dataclass(eq=False)
class FakeProcess:
    """``number``: of an engine, incarnation of a router, index of a front end. ``start``: of an engine.

    ``incarnation``: of a front end's router.
    """

    pid: int
    role: Role
    number: int
    start: int = 0
    ranks: list[RankPlace] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)
    alive: bool = True

    @property
    def places(self) -> list[EnginePlace]:
        """The newest list of engines that it was sent."""
        return next((c.engines for c in reversed(self.commands) if c.kind == "engines"), [])

    @property
    def router(self) -> int:
        return next((c.incarnation for c in reversed(self.commands) if c.kind == "router"), 0)

    def count(self, kind: str) -> int:
        return sum(command.kind == kind for command in self.commands)


class FakeFleet:
    """The policy's Runner, and a clock. ``refuses``: role whose processes cannot be started."""

    def __init__(self, num_engines: int = 2, num_front_ends: int = 1, places: Places | None = None) -> None:
        self.now = 0.0
        self.started: list[FakeProcess] = []
        self.ended: list[tuple[int, int]] = []
        self.refuses: Role | None = None
        counts = FleetCounts(num_engines, num_front_ends)
        self.policy = FleetPolicy(counts, "/fleet", places or LocalPlaces(2), self, DRAIN_S)
        self.policy.begin(self.now)
        self.policy.check()

    # ---- policy.Runner

    def start_engine(self, engine: int, num_starts: int, num_engines: int, ranks: list[RankPlace]) -> FakeProcess:
        assert num_engines == len(self.policy.engines.slots)
        assert not any(p.role == "engine" and (p.number, p.start) == (engine, num_starts) for p in self.started)
        return self._start("engine", engine, num_starts, ranks)

    def start_router(self, incarnation: int) -> FakeProcess:
        return self._start("router", incarnation)

    def start_front_end(self, index: int) -> FakeProcess:
        return self._start("frontend", index)

    def _start(self, role: Role, number: int, start: int = 0, ranks: list[RankPlace] | None = None) -> FakeProcess:
        if role == self.refuses:
            raise EngineError("too many processes")
        self.started.append(FakeProcess(len(self.started) + 100, role, number, start, ranks or []))
        return self.started[-1]

    def send(self, process: Process, command: Command) -> None:
        assert isinstance(process, FakeProcess)
        process.commands.append(command)

    def kill(self, process: Process) -> None:
        assert isinstance(process, FakeProcess)
        process.alive = False

    def engine_ended(self, engine: int, num_starts: int) -> None:
        assert not any((p.number, p.start) == (engine, num_starts) for p in self.alive("engine"))
        self.ended.append((engine, num_starts))

    # ---- events

    def alive(self, role: Role) -> list[FakeProcess]:
        return [process for process in self.started if process.role == role and process.alive]

    def engine(self, number: int) -> FakeProcess:
        (process,) = (process for process in self.alive("engine") if process.number == number)
        return process

    def die(self, process: FakeProcess, reason: str = "", exit_status: int = 1) -> None:
        """End a process; with a reason, it reports that first."""
        if reason:
            self.policy.reported(process, Report("failed", reason, exit_status), self.now)
        process.alive = False
        self.policy.ended(process, "killed by SIGKILL", self.now)
        self.policy.check()
        self.tick()

    def report(self, process: FakeProcess, event: str, **more: Any) -> None:
        self.policy.reported(process, Report(event, **more), self.now)  # type: ignore[arg-type]
        self.policy.check()

    def become_ready(self, *roles: Role) -> None:
        """Send the reports of a successful start from all live processes of these roles; without any, of all."""
        for role in roles or ("engine", "router", "frontend"):
            for process in self.alive(role):
                self.report(process, "started")
                self.report(process, "ready", detail={"block_size": 16.0} if role == "engine" else {})
        self.tick()

    def order(self, text: str, engine: int = -1) -> None:
        """Let an administrator give an order to a front end."""
        self.report(self.alive("frontend")[0], "order", text=text, engine=engine)
        self.tick()

    def obey(self) -> None:
        """Let front ends drain, and engines end, as their commands say."""
        for front_end in self.alive("frontend"):
            for place in front_end.places:
                if place.state == "draining":
                    self.report(front_end, "drained", engine=place.engine)
        for engine in self.alive("engine"):
            if engine.count("stop"):
                self.die(engine)
        self.tick()

    def tick(self) -> None:
        self.policy.tick(self.now)
        self.policy.check()

    def pass_time(self, seconds: float, *, silent: tuple[FakeProcess, ...] = ()) -> None:
        """Advance the clock in small steps; all live processes but ``silent`` report at each."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + 0.5)
            for process in self.started:
                if process.alive and process not in silent:
                    self.policy.reported(process, Report("alive"), self.now)
            self.tick()

    # ---- state

    @property
    def states(self) -> dict[int, str]:
        return {place.engine: place.state for place in self.policy.engines.places()}

    @property
    def starts(self) -> dict[int, int]:
        return {place.engine: place.num_starts for place in self.policy.engines.places()}

    def check(self) -> None:
        """All processes of the server know the newest engines and router, and no engine has two processes."""
        self.policy.check()
        assert max(Counter(process.number for process in self.alive("engine")).values(), default=0) <= 1
        assert len(self.alive("router")) <= 1
        for process in self.alive("frontend") + self.alive("router"):
            assert process.places == self.policy.engines.places()
        for front_end in self.alive("frontend"):
            assert front_end.router == self.policy.router_incarnation
