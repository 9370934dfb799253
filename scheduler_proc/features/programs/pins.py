"""Pins: keep the blocks of a program while its tool runs, for as long as that is expected to pay."""

from collections import Counter
from collections.abc import Callable
from heapq import heappop, heappush
from typing import NamedTuple

import msgspec

from quire.protocol.config import EngineConfig
from quire.protocol.errors import ConfigError
from quire.protocol.process.log import event_logger
from quire.protocol.wire.front_end_messages import EndReason, Statistics
from quire.scheduler_proc.costs.costs import Costs, Prefill
from quire.scheduler_proc.features.programs.demand import Demand
from quire.scheduler_proc.features.programs.program_state import PROGRAM, ProgramState
from quire.scheduler_proc.features.programs.tools import MAX_TOOLS, KeepChoice, ToolPauses
from quire.scheduler_proc.kv.manager import KVCacheManager
from quire.scheduler_proc.requests.reasons import Decision
from quire.scheduler_proc.requests.request import Request
from quire.scheduler_proc.requests.step_clock import StepClock

log = event_logger("scheduler")

TOOL_S = 1.0
"""Seconds in which a front end says which tool an answer calls. Blocks are kept for them in any case."""
MAX_TOOL_NAME = 64
"""Characters of a tool's name that count; clients choose the names."""
ENDS = ("return", "deadline", "pressure", "replaced", "dropped")
"""Why a pin ends: the next turn is admitted, or has not arrived in time; all blocks were evicted, or lost by a reset;
another turn of the program ended later; the program was forgotten, or its next turn ended before it was admitted."""
_NORMAL_ENDS = (EndReason.STOPPED, EndReason.LENGTH)


class Pause(msgspec.Struct):
    """The time between two turns of a program.

    Attributes:
        number: of the program, and of its pin.
        job_id, request_id: of the turn that has ended.
        since: seconds, when it ended.
        until: seconds, until when its blocks are kept.
        num_tokens: tokens of the turn.
        is_pinned: whether blocks are kept for it.
        is_late: whether it lasts longer than ``until``.
        is_back: whether the next turn has arrived. It waits, and the blocks are kept until it is admitted.
    """

    number: int
    job_id: str
    request_id: str
    tool: str
    since: float
    until: float
    num_tokens: int
    is_pinned: bool = True
    is_late: bool = False
    is_back: bool = False


class _Worth(NamedTuple):
    """``benefit``: seconds that a hit saves. ``cost``: seconds that each second of the pin costs."""

    benefit: float
    cost: float


class Pins:
    """Decides for how long the blocks of a program are kept after a turn. With another policy, nothing is kept.

    A pin is soft: its blocks are free, and are allocated after all others. A program has at most one. Its number is
    that of the program.

    Attributes:
        is_enabled: whether blocks are kept.
        now: seconds, as of the last ``Clock``.
        pauses: by program number, the pauses that have not ended, and those with blocks for a turn that waits.
        ended: pins that have ended, by reason (``ENDS``).
        num_failures: choices that failed; the blocks were not kept.
        chosen: by tool, the seconds of the last choice; at most MAX_TOOLS.
    """

    def __init__(
        self,
        config: EngineConfig,
        kv: KVCacheManager,
        costs: Costs,
        clock: StepClock,
        note: Callable[[Decision], None],
    ) -> None:
        """Raises ConfigError if nothing could be kept with this configuration."""
        self.is_enabled = config.scheduling_policy == "continuum"
        if self.is_enabled and not config.enable_prefix_caching:
            text = "--scheduling-policy continuum needs --enable-prefix-caching: only cached blocks are kept"
            raise ConfigError(text)
        self.now = 0.0
        self.pauses: dict[int, Pause] = {}
        self.ended: Counter[str] = Counter(dict.fromkeys(ENDS, 0))
        self.num_failures = 0
        self.chosen: dict[str, float] = {}
        self._estimator = ToolPauses()
        self._demand = Demand()
        self._mean_tokens = 0.0
        self._due: list[tuple[float, int]] = []
        self._num_pinned = 0
        self._step_tokens = config.step_tokens
        self._kv, self._costs, self._clock, self._note = kv, costs, clock, note

    # ---- what happens

    def clock(self, now: float) -> None:
        """Set the time, and end the pins that are due."""
        if not self.is_enabled:
            return
        self.now = now
        mean = self._mean_tokens
        per_block = self._saved_seconds(int(mean)) * self._kv.block_size / mean if mean else 0.0
        self._demand.clock(now, self._kv.pool.num_evicted_blocks, per_block)
        if self._num_pinned != len(self._kv.pins):
            pins = self._kv.pins
            for lost in [each for each in self.pauses.values() if each.is_pinned and each.number not in pins]:
                self._unpin(lost, "pressure")
        while self._due and self._due[0][0] <= now:
            until, number = heappop(self._due)
            pause = self.pauses.get(number)
            if pause is not None and pause.until == until and not (pause.is_late or pause.is_back):
                self._expire(pause)

    def turn_ends(self, request: Request, reason: EndReason) -> int:
        """Note that a request ends. Returns the number of the pin with which its blocks are to be freed, or 0."""
        program = PROGRAM.of(request)
        if not self.is_enabled or program is None or program.has_ended or reason not in _NORMAL_ENDS:
            return 0
        before = self.pauses.pop(program.number, None)
        if before is not None and before.is_pinned:
            self._unpin(before, "replaced")
        number, now = program.number, self.now
        pause = Pause(number, program.job_id, request.request_id, program.tool, now, now, request.num_tokens)
        self._mean_tokens = (self._mean_tokens + pause.num_tokens) / 2.0 if self._mean_tokens else pause.num_tokens
        self._decide(pause)
        self.pauses[number] = pause
        pause.is_pinned = pause.until > now
        self._num_pinned += pause.is_pinned
        return number if pause.is_pinned else 0

    def turn_ended(self, program: ProgramState) -> None:
        """Note that a request has ended, and its blocks are free."""
        pause = self.pauses.get(program.number)
        if pause is None or not pause.is_pinned:
            return
        if pause.is_back and not program.live:
            self._unpin(pause, "dropped")
        elif pause.number not in self._kv.pins:  # it had no block of its own
            self._kv.unpin(pause.number)  # copies may hold some of them
            pause.is_pinned = False
            self._num_pinned -= 1
            if pause.is_back:
                del self.pauses[pause.number]

    def tool_called(self, program: ProgramState) -> None:
        """Choose again, now that the tool is known which the last answer calls."""
        pause = self.pauses.get(program.number)
        if pause is None or pause.is_late or pause.is_back:
            return
        pause.tool = program.tool
        self._decide(pause)
        if pause.until <= self.now:
            self._expire(pause)

    def returned(self, program: ProgramState) -> None:
        """Note that the next turn of a program has arrived."""
        pause = self.pauses.get(program.number)
        if pause is None or pause.is_back:
            return
        pause.is_back = True
        try:
            self._estimator.ended(pause.tool, self.now - pause.since, was_late=pause.is_late)
        except (ArithmeticError, LookupError, ValueError) as error:
            self._failed(error)
        if not pause.is_pinned:
            del self.pauses[pause.number]

    def admitted(self, program: ProgramState) -> None:
        """End the pin of a program whose next turn is admitted: it holds what it found."""
        pause = self.pauses.get(program.number)
        if pause is not None and pause.is_back:
            self._unpin(pause, "return")

    def forget(self, program: ProgramState) -> None:
        """End the pin of a program that is forgotten."""
        pause = self.pauses.pop(program.number, None)
        if pause is not None and pause.is_pinned:
            self._unpin(pause, "dropped")

    def _expire(self, pause: Pause) -> None:
        pause.is_late = True
        self._estimator.late(pause.tool)
        if pause.is_pinned:
            self._unpin(pause, "deadline")

    def _unpin(self, pause: Pause, reason: str) -> None:
        self._kv.unpin(pause.number)
        pause.is_pinned = False
        self._num_pinned -= 1
        if pause.is_back:
            self.pauses.pop(pause.number, None)
        self.ended[reason] += 1
        self._note(Decision(self._clock.sent + 1, "unpin", pause.request_id, reason))

    # ---- how long

    def _decide(self, pause: Pause) -> None:
        """Set the deadline of a pause."""
        pause.tool = pause.tool[:MAX_TOOL_NAME]
        worth = self._worth(pause.num_tokens)
        try:
            choice = self._estimator.choose(pause.tool, *worth)
            if not 0.0 <= choice.seconds < float("inf"):
                raise ValueError(f"invalid time to keep blocks: {choice.seconds} s")
            seconds = choice.seconds if pause.tool else max(choice.seconds, TOOL_S)
        except (ArithmeticError, LookupError, ValueError) as error:
            self._failed(error)
            choice, seconds = KeepChoice(0.0), 0.0
        pause.until = pause.since + seconds
        heappush(self._due, (pause.until, pause.number))
        self.chosen.pop(pause.tool, None)
        self.chosen[pause.tool] = choice.seconds
        if len(self.chosen) > MAX_TOOLS:
            del self.chosen[next(iter(self.chosen))]
        detail = (
            f"{seconds:.3g} s: P {choice.probability:.2f} of {choice.num_pauses} pauses, a hit saves "
            f"{worth.benefit:.3g} s, a second costs {worth.cost:.3g} s"
        )
        self._note(Decision(self._clock.sent + 1, "pin", pause.request_id, pause.tool or "none", detail=detail))

    def _worth(self, num_tokens: int) -> _Worth:
        share = num_tokens / self._kv.block_size / self._kv.pool.num_usable_blocks
        return _Worth(self._saved_seconds(num_tokens), share * self._demand.share)

    def _saved_seconds(self, num_tokens: int) -> float:
        """Return the seconds that a hit on all tokens saves; 0 before a prefill was measured.

        With a tier behind the device, the blocks could be loaded again instead.
        """
        if not self._costs.knows({}):
            return 0.0
        seconds = self._costs.prefill_seconds(Prefill.between(0, num_tokens), self._step_tokens, 0)
        for tier in self._kv.tiers:
            pages = {tier.name: num_tokens // self._kv.block_size}
            if self._costs.knows(pages):
                seconds = min(seconds, self._costs.load_seconds(pages))
        return seconds

    def _failed(self, error: Exception) -> None:
        self.num_failures += 1
        if self.num_failures == 1:
            log.error("cannot choose how long to keep blocks while a tool runs; they are not kept", reason=error)

    # ---- statistics and checks

    @property
    def seconds_by_tool(self) -> dict[str, float]:
        """The last choices by tool; ``none`` stands for answers that call no tool, or none that is known."""
        return {tool or "none": seconds for tool, seconds in self.chosen.items()}

    def add_to(self, statistics: Statistics) -> Statistics:
        """Return ``statistics`` with those of pins."""
        if not self.is_enabled:
            return statistics
        return msgspec.structs.replace(
            statistics,
            num_pins=len(self._kv.pins),
            num_pinned_blocks=sum(self._kv.pins.values()),
            pins_ended=dict(self.ended),
            pin_seconds=self.seconds_by_tool,
            num_pin_failures=self.num_failures,
        )

    def check(self) -> None:
        """Raise AssertionError unless each pin of the pool belongs to a pause, if this policy keeps any."""
        if not self.is_enabled:
            return
        pinned = {number for number, pause in self.pauses.items() if pause.is_pinned}
        assert self._kv.pins.keys() <= pinned, f"pins without a pause: {sorted(self._kv.pins.keys() - pinned)}"
        assert len(pinned) == self._num_pinned, f"{len(pinned)} pinned pauses, {self._num_pinned} counted"
        assert all(pause.number == number for number, pause in self.pauses.items())
        due = set(self._due)
        assert all(
            pause.is_late or pause.is_back or (pause.until, pause.number) in due for pause in self.pauses.values()
        )
