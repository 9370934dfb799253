"""Fleet policy: decides which engines, routers and front ends to start, stop or notify. No I/O; the Fleet executes the
decisions.

An engine is one process here: it supervises its scheduler and workers itself. An engine that ends is restarted while
the others serve; front ends move its requests to them. The router and the front ends are restarted likewise.
"""

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from quire.launch.fleet.fleet_engines import FIRST_STARTS, STABLE_S, EngineRunner, FleetEngines, backoff
from quire.launch.fleet.places import Places
from quire.launch.supervision.members import Member, Process, Role
from quire.launch.supervision.supervision_policy import END_S, MAX_DEATHS, SILENT_S, START_S
from quire.protocol.errors import ConfigError, EngineError, QuireError
from quire.protocol.process.child import EX_CONFIG, Command, Report
from quire.protocol.process.log import event_logger
from quire.protocol.process.restarts import Restarts
from quire.protocol.routing import EnginePlace

log = event_logger("fleet")


class FleetRunner(EngineRunner, Protocol):
    """Executes decisions: starts, notifies and kills processes. A process that cannot be started now: EngineError."""

    def start_router(self, incarnation: int) -> Process: ...

    def start_front_end(self, index: int) -> Process: ...


class FleetCounts(NamedTuple):
    """How many engines and front ends to run at the start."""

    num_engines: int
    num_front_ends: int


class FleetPolicy:
    """Policy of the processes of a server with several engines. ``fatal_error`` is set if it cannot continue: no engine
    could ever start, or front ends cannot run.

    Invariants (``check``): those of FleetEngines; a router or front end that is not running has a time at which it
    will be started; all know the newest list of engines.
    """

    def __init__(
        self, counts: FleetCounts, root: str, places: Places, runner: FleetRunner, drain_timeout: float
    ) -> None:
        """
        Args:
            root: the fleet's directory.
            drain_timeout: seconds after which front ends move the requests of an engine that drains.
        """
        self._counts = counts
        self._runner = runner
        self.front_ends: list[Member] = []
        self.engines = FleetEngines(root, places, runner, self.front_ends, drain_timeout)
        self.router: Member | None = None
        self.router_incarnation = 0
        self.restarts = Restarts()
        self._fatal_error: QuireError | None = None
        self._due: dict[tuple[Role, int], float] = {}
        """When to start each missing router or front end, by (role, index)."""
        self._router_since: float | None = None
        """When the router that runs was ready."""
        self._router_failures = self._front_end_failures = 0
        self._announced: list[EnginePlace] = []
        self._front_end_was_ready = self._draining = self._stopping = False

    # ---- events

    def begin(self, now: float) -> None:
        for _ in range(self._counts.num_engines):
            self.engines.add(now)
        self._start_router(now)
        for index in range(self._counts.num_front_ends):
            self._start_front_end(index, now)
        self._announce()

    def drain(self) -> None:
        """Let front ends finish their requests and end. The engines keep running until they have ended."""
        self._draining = True
        self._due = {(role, index): when for (role, index), when in self._due.items() if role != "frontend"}
        self._send(self.front_ends, Command("drain"))

    def stop(self) -> None:
        """Stop replacing processes, which are now expected to end."""
        self._stopping = True
        self._due.clear()
        self.engines.stop()

    def reported(self, process: Process, report: Report, now: float) -> None:
        """Process a report."""
        member = self._find(process)
        if member is None:
            return
        member.last_report_at = now
        match report.event:
            case "started":
                member.started = True
            case "ready":
                self._ready(member, report, now)
            case "incarnation":
                self.engines.scheduler_replaced(self.engines.slots[member.index], report.incarnation)
            case "drained":
                self.engines.front_end_drained(member, report.engine, now)
            case "order" if not self._draining:
                self.engines.order(report.text, report.engine, now)
            case "failed":
                member.failure, member.failed_at = report, now
        self._announce()

    def ended(self, process: Process, how: str, now: float) -> None:
        """Process the end of a process. ``how``: the reason, if it reported none."""
        member = self._find(process)
        if member is None or self._stopping:
            return
        reason = member.failure.text if member.failure is not None else how
        match member.role:
            case "engine":
                self.engines.ended(self.engines.slots[member.index], member, reason, now)
            case "router":
                self._router_ended(reason, now)
            case _:
                self._front_end_ended(member, reason, now)
        self._announce()

    def tick(self, now: float) -> None:
        """Start what is due, kill what has not reported for too long, and carry on with orders."""
        if self._stopping:
            return
        for member in self.members:
            limit = SILENT_S if member.started else START_S
            if now > member.last_report_at + limit:
                log.error("process stopped reporting", role=member.role, pid=member.process.pid, seconds=limit)
                self._end(member, f"the {member.role} process sent no heartbeat for {limit:g} s", now)
            elif member.failure is not None and now > member.failed_at + END_S:
                self._end(member, member.failure.text, now)
        for role, index in [key for key, when in self._due.items() if when <= now]:
            del self._due[role, index]
            if role == "router":
                self._start_router(now)
            else:
                self._start_front_end(index, now)
        self.engines.tick(now)
        self._announce()

    def next_event(self, now: float) -> float:
        """Return the number of seconds until ``tick`` must be called."""
        times = [*self._due.values(), *self.engines.times()]
        times += [m.last_report_at + (SILENT_S if m.started else START_S) for m in self.members]
        return max(0.0, min(times, default=now + 1.0) - now)

    # ---- state

    @property
    def fatal_error(self) -> QuireError | None:
        return self._fatal_error or self.engines.fatal_error

    @property
    def is_ready(self) -> bool:
        """Whether all engines have served or failed, one serves, and router and front ends are ready. A router that
        cannot start is not waited for: front ends then choose engines themselves."""
        has_router = (self.router is not None and self.router.ready) or self._router_failures >= FIRST_STARTS
        ready = [front_end for front_end in self.front_ends if front_end.ready]
        return self.engines.have_settled and has_router and len(ready) == self._counts.num_front_ends

    @property
    def members(self) -> list[Member]:
        """All running processes that the fleet has started."""
        engines = [slot.member for slot in self.engines.slots.values() if slot.member is not None]
        return [*self.front_ends, *([] if self.router is None else [self.router]), *engines]

    @property
    def pids(self) -> dict[str, list[int]]:
        """The ids of these processes by role."""
        found: dict[str, list[int]] = {}
        for member in self.members:
            found.setdefault(member.role, []).append(member.process.pid)
        return found

    def check(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        if self._stopping or self.fatal_error is not None:
            return
        self.engines.check()
        assert (self.router is None) == (("router", 0) in self._due)
        for index in range(0 if self._draining else self._counts.num_front_ends):
            assert [f.index for f in self.front_ends].count(index) + (("frontend", index) in self._due) == 1, index
        assert self._announced == self.engines.places()

    # ---- router and front ends

    def _start_router(self, now: float) -> None:
        try:
            process = self._runner.start_router(self.router_incarnation + 1)
        except EngineError as error:
            self._router_ended(str(error), now)
            return
        self.router_incarnation += 1
        self.router = Member("router", process, now)
        self._router_since = None
        self._runner.send(process, Command("engines", engines=self._announced))
        self._send(self.front_ends, Command("router", incarnation=self.router_incarnation))

    def _router_ended(self, reason: str, now: float) -> None:
        if self._router_since is not None and now - self._router_since >= STABLE_S:
            self._router_failures = 0
        self._router_failures += 1
        self.restarts.router += 1
        self.router = None
        delay = backoff(self._router_failures)
        log.error("restarting the router", seconds=delay, reason=reason)
        self._due["router", 0] = now + delay

    def _start_front_end(self, index: int, now: float) -> None:
        try:
            process = self._runner.start_front_end(index)
        except EngineError as error:
            self._front_end_failed(index, None, str(error), now)
            return
        self.front_ends.append(Member("frontend", process, now, index))
        self._runner.send(process, Command("engines", engines=self._announced))
        self._runner.send(process, Command("router", incarnation=self.router_incarnation))

    def _front_end_ended(self, member: Member, reason: str, now: float) -> None:
        self.front_ends.remove(member)
        self._send(self.members, Command("front_end_exited", pid=member.process.pid), ("engine", "router"))
        self.engines.front_end_ended(now)
        if not self._draining:
            self._front_end_failed(member.index, member.failure, reason, now)

    def _front_end_failed(self, index: int, failure: Report | None, reason: str, now: float) -> None:
        """Restart a front end later. ``failure``: what it reported, if it has."""
        self._front_end_failures += 1
        if failure is not None and (failure.exit_status == EX_CONFIG or not self._front_end_was_ready):
            self._fatal_error = (ConfigError if failure.exit_status == EX_CONFIG else EngineError)(reason)
        elif self._front_end_failures == MAX_DEATHS:
            self._fatal_error = EngineError(f"{reason} ({MAX_DEATHS} times in a row)")
        self.restarts.frontend += 1
        delay = backoff(self._front_end_failures)
        log.error("restarting a front end", seconds=delay, reason=reason)
        self._due["frontend", index] = now + delay

    # ---- all processes

    def _ready(self, member: Member, report: Report, now: float) -> None:
        member.ready = True
        if member.role == "engine":
            self.engines.ready(self.engines.slots[member.index], report, now)
        elif member.role == "frontend":
            self._front_end_was_ready, self._front_end_failures = True, 0
        else:
            self._router_since = now

    def _end(self, member: Member, reason: str, now: float) -> None:
        """Kill a process that does not end by itself."""
        self._runner.kill(member.process)
        self.ended(member.process, reason, now)

    def _announce(self) -> None:
        """Send the list of engines to front ends and router, if it has changed."""
        self.restarts.engine = self.engines.num_restarts
        places = self.engines.places()
        if places != self._announced:
            self._announced = places
            self._send(self.members, Command("engines", engines=places), ("frontend", "router"))

    def _send(self, members: Iterable[Member], command: Command, roles: tuple[Role, ...] = ("frontend",)) -> None:
        for member in members:
            if member.role in roles:
                self._runner.send(member.process, command)

    def _find(self, process: Process) -> Member | None:
        return next((m for m in self.members if m.process is process), None)
