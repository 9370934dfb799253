"""The engines of a fleet: when each is started, drained, ended and restarted. No I/O."""

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from quire.launch.fleet.engine_slot import EngineSlot, Goal
from quire.launch.fleet.places import Places
from quire.launch.supervision.members import Member, Process
from quire.protocol.config import RankPlace
from quire.protocol.errors import ConfigError, EngineError, InvalidRequest, QuireError
from quire.protocol.process.child import EX_CONFIG, Command, Report
from quire.protocol.process.fleet_orders import OrderRefused, check_order, is_another_serving
from quire.protocol.process.log import event_logger
from quire.protocol.routing import EnginePlace

log = event_logger("fleet")

BACKOFF_S = (0.0, 0.5, 2.0, 5.0, 15.0, 30.0)
"""Delay before the first, second, ... restart in a row."""
REFUSED_AGAIN = 5
"""Failures in a row for which an engine counts at least if it refused its settings: another try is of use later."""
PLACE_S = 0.5
"""Pause between two questions for places that are being prepared."""
STABLE_S = 5.0
"""What has run for this long did not fail in a row."""
FIRST_STARTS = 3
"""Starts of an engine that end without a reason until its first start counts as failed."""
DRAIN_GRACE_S = 10.0
"""Time for front ends to report, after the drain timeout, that they have moved their requests."""
STOP_S = 10.0
"""Time limit for an engine to end its processes."""


class EngineRunner(Protocol):
    """Executes decisions about engines."""

    def start_engine(self, engine: int, num_starts: int, num_engines: int, ranks: list[RankPlace]) -> Process:
        """Start the process of an engine. Raises EngineError if it cannot be started now."""
        ...

    def engine_ended(self, engine: int, num_starts: int) -> None:
        """Remove what the process of an engine has left."""
        ...

    def send(self, process: Process, command: Command) -> None:
        """Send a command; no effect on a process that has ended."""
        ...

    def kill(self, process: Process) -> None: ...


class FleetEngines:
    """Owns a slot per engine, and the rolling restart.

    Attributes:
        slots: by number.
        fatal_error: set if no engine could ever start.
        num_restarts: of engines that ended without an order.

    Invariants (``check``): an engine that is not running has a time at which it will be started; no two processes get
    the same directory.
    """

    def __init__(
        self, root: str, places: Places, runner: EngineRunner, front_ends: Sequence[Member], drain_timeout: float
    ) -> None:
        """``front_ends``: the FleetPolicy's list of those that run, which must report that an engine is drained."""
        self._root = root
        self._places = places
        self._runner = runner
        self._front_ends = front_ends
        self._drain_timeout = drain_timeout
        self.slots: dict[int, EngineSlot] = {}
        self.fatal_error: QuireError | None = None
        self.num_restarts = 0
        self._starts: dict[int, int] = {}
        """Starts of each engine, also of removed ones: their directories are not used again."""
        self._rolling: deque[tuple[int, int]] = deque()
        """Engines that the rolling restart has not finished, with their starts before it, in order."""
        self._has_served = False

    # ---- events

    def add(self, now: float) -> None:
        """Start one more engine, with the lowest free number."""
        number = next(n for n in range(len(self.slots) + 1) if n not in self.slots)
        self.slots[number] = EngineSlot(number, num_starts=self._starts.get(number, 0))
        self._start(self.slots[number], now)

    def scheduler_replaced(self, slot: EngineSlot, incarnation: int) -> None:
        """Process that the engine starts another scheduler: it serves again when that is ready."""
        slot.incarnation = incarnation
        if slot.state == "serving":
            slot.state = "starting"

    def ready(self, slot: EngineSlot, report: Report, now: float) -> None:
        slot.ready_report = report
        if slot.state != "starting":
            return  # its workers were replaced
        slot.has_settled = self._has_served = True
        slot.detail = ""
        slot.serving_since = now if slot.serving_since is None else slot.serving_since
        if all(each.goal == "drain" for each in self.slots.values()):
            slot.goal = "serve"  # the others were removed since it was drained
        slot.state = "drained" if slot.goal == "drain" else "serving"
        log.info("engine is serving", engine=slot.number, start=slot.num_starts)

    def ended(self, slot: EngineSlot, member: Member, reason: str, now: float) -> None:
        """Process the end of the engine's process ``member``."""
        slot.member = slot.deadline = None
        slot.drained.clear()
        self._places.give_back(slot.number)
        self._runner.engine_ended(slot.number, slot.num_starts)
        if slot.goal == "remove":
            del self.slots[slot.number]
            log.info("engine is removed", engine=slot.number)
        elif slot.goal == "restart":
            slot.goal = "serve"
            self._start(slot, now)
        else:
            self.num_restarts += 1
            refused = member.failure is not None and member.failure.exit_status == EX_CONFIG
            self._fail(slot, reason, now, refused=refused, has_reason=member.failure is not None)

    def front_end_drained(self, front_end: Member, engine: int, now: float) -> None:
        """Process the report of a front end that it has no request on the engine."""
        slot = self.slots.get(engine)
        if slot is not None and slot.state == "draining":
            slot.drained.add(front_end)
            self._check_drained(slot, now)

    def front_end_ended(self, now: float) -> None:
        """Process the end of a front end: its requests have ended with it."""
        for slot in list(self.slots.values()):
            if slot.state == "draining":
                self._check_drained(slot, now)

    def tick(self, now: float) -> None:
        """Start engines that are due, and carry on with what has taken its time."""
        for slot in list(self.slots.values()):
            if slot.due is not None and slot.due <= now:
                self._start(slot, now)
            elif slot.deadline is not None and slot.deadline <= now:
                self._pass_deadline(slot, now)
        self._roll(now)

    def stop(self) -> None:
        """Stop replacing engines."""
        self._rolling.clear()
        for slot in self.slots.values():
            slot.due = slot.deadline = None

    def order(self, order: str, engine: int, now: float) -> None:
        """Carry out an order of an administrator (``orders.py``), unless it must be refused, which is logged."""
        try:
            check_order(order, engine, self.places())
        except (InvalidRequest, OrderRefused) as error:
            log.warning("order refused", order=order, engine=engine, reason=error)
            return
        log.info("order", order=order, engine=engine)
        slot = self.slots.get(engine)
        if order in ("drain", "resume") and any(number == engine for number, _ in self._rolling):
            self._rolling.clear()
        match order:
            case "add":
                self.add(now)
            case "resume":
                assert slot is not None
                slot.state, slot.goal, slot.deadline = "serving", "serve", None
            case "drain" | "remove" | "restart" if slot is not None:
                self._retire(slot, order, now)
            case _:
                self._rolling = deque((number, self.slots[number].num_starts) for number in sorted(self.slots))
        self._roll(now)

    # ---- state

    def places(self) -> list[EnginePlace]:
        """Return the list that is sent to front ends and the router, by number."""
        return [self.slots[number].place(self._root) for number in sorted(self.slots)]

    @property
    def have_settled(self) -> bool:
        """Whether each engine has served or has failed to start, and one is serving."""
        slots = self.slots.values()
        return all(slot.has_settled for slot in slots) and any(slot.state == "serving" for slot in slots)

    def times(self) -> list[float]:
        """Return the times at which ``tick`` has something to do."""
        return [when for slot in self.slots.values() for when in (slot.due, slot.deadline) if when is not None]

    def check(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        for number, slot in self.slots.items():
            assert slot.number == number and slot.num_starts == self._starts.get(number, 0)
            slot.check()

    # ---- changes of one engine

    def _start(self, slot: EngineSlot, now: float) -> None:
        slot.due = None
        ranks = self._places.take(slot.number)
        if ranks is None:  # no failure
            slot.state, slot.detail, slot.due = "failed", "its place is being prepared", now + PLACE_S
            return
        if isinstance(ranks, str):
            self._fail(slot, ranks, now, refused=True)
            return
        slot.num_starts += 1
        self._starts[slot.number] = slot.num_starts
        try:
            process = self._runner.start_engine(slot.number, slot.num_starts, len(self.slots), ranks)
        except EngineError as error:
            self._places.give_back(slot.number)
            self._fail(slot, str(error), now)
            return
        slot.member = Member("engine", process, now, slot.number)
        slot.state, slot.incarnation, slot.serving_since = "starting", 1, None

    def _fail(
        self, slot: EngineSlot, reason: str, now: float, *, refused: bool = False, has_reason: bool = True
    ) -> None:
        """Restart the engine later.

        Args:
            refused: it cannot run with these settings, or there is no place for it.
            has_reason: it has reported why it ended.
        """
        if slot.serving_since is not None and now - slot.serving_since >= STABLE_S:
            slot.num_failures = 0
        slot.num_failures += 1
        slot.has_settled |= has_reason or slot.num_failures >= FIRST_STARTS
        delay = backoff(max(slot.num_failures, REFUSED_AGAIN if refused else 0))
        slot.state, slot.detail, slot.due, slot.serving_since = "failed", reason, now + delay, None
        if slot.goal != "drain":
            slot.goal = "serve"
        if not self._has_served and all(each.has_settled for each in self.slots.values()):
            self.fatal_error = (ConfigError if refused else EngineError)(reason)
        else:  # the server's start shows the reason of an engine that cannot start
            report = log.error if self._has_served else log.info
            report("restarting an engine", engine=slot.number, seconds=delay, reason=reason)

    def _retire(self, slot: EngineSlot, goal: Goal, now: float) -> None:
        """Drain an engine, if it serves, and then do what ``goal`` says."""
        slot.goal = goal
        match slot.state:
            case "serving":
                slot.state, slot.deadline = "draining", now + self._drain_timeout + DRAIN_GRACE_S
                slot.drained.clear()
                self._check_drained(slot, now)
            case "drained" | "starting" if goal != "drain":
                self._stop(slot, now)
            case "failed" if goal == "remove":
                self._places.give_back(slot.number)
                del self.slots[slot.number]
            case "failed":
                slot.goal, slot.num_failures = "serve", 0
                self._start(slot, now)

    def _check_drained(self, slot: EngineSlot, now: float) -> None:
        if not all(front_end in slot.drained for front_end in self._front_ends):
            return
        slot.state, slot.deadline = "drained", None
        log.info("engine is drained", engine=slot.number)
        if slot.goal != "drain":
            self._stop(slot, now)

    def _stop(self, slot: EngineSlot, now: float) -> None:
        assert slot.member is not None
        slot.state, slot.deadline = "stopped", now + STOP_S
        self._runner.send(slot.member.process, Command("stop"))

    def _pass_deadline(self, slot: EngineSlot, now: float) -> None:
        if slot.state == "draining":
            log.warning("front ends have not reported that an engine is drained", engine=slot.number)
            slot.drained.update(self._front_ends)
            self._check_drained(slot, now)
        elif slot.member is not None:
            log.error("an engine did not end", engine=slot.number, seconds=STOP_S)
            self._runner.kill(slot.member.process)
            self.ended(slot, slot.member, "", now)

    def _roll(self, now: float) -> None:
        """Carry on with the rolling restart: begin with the next engine when the last one is serving again.

        An engine that cannot be restarted holds the others up, which then still serve. One that is not running when
        its turn comes is left out, because it is restarted anyway.
        """
        while self._rolling:
            number, before = self._rolling[0]
            slot = self.slots.get(number)
            if slot is not None and slot.num_starts > before and slot.state != "serving":
                return  # it is at it
            if slot is None or slot.num_starts > before or slot.state == "failed":
                self._rolling.popleft()
                continue
            if slot.state in ("serving", "drained") and is_another_serving(self.places(), number):
                self._rolling[0] = number, -1  # it is waited for, also while there is no place for it
                self._retire(slot, "restart", now)
            return


def backoff(num_failures: int) -> float:
    """Return the delay after this many failures in a row, at least 1."""
    return BACKOFF_S[min(num_failures, len(BACKOFF_S)) - 1]
