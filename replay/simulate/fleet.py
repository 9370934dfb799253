"""Runs a workload through several simulated engines on one virtual clock."""

import time
from collections import deque
from collections.abc import Callable

from quire.replay.costs.cost import CostModel
from quire.replay.costs.expert_parallel import ExpertParallelCost
from quire.replay.run.merged import merge_engines
from quire.replay.run.run_record import RunRecord
from quire.replay.simulate.choice import Choice, RouterChoice, VllmChoice
from quire.replay.simulate.lockstep import JointSteps, LockstepSimulator
from quire.replay.simulate.setup import Setup
from quire.replay.simulate.simulator import Simulator
from quire.replay.workload.sources import NEVER, OpenLoop, Source
from quire.replay.workload.workload import SHORT_HASH_BYTES, Call
from quire.scheduler_proc.kv.events import KVEventRecorder


class Inbox:
    """The calls that were routed to one engine and that it has not received: a Source of its simulation."""

    def __init__(self, on_ended: Callable[[Call, float], None]) -> None:
        self._on_ended = on_ended
        self._calls: deque[tuple[float, Call]] = deque()

    def add(self, call: Call, now: float) -> None:
        self._calls.append((now, call))

    def next_time(self) -> float:
        return self._calls[0][0] if self._calls else NEVER

    def take(self, now: float) -> list[Call]:
        taken = [call for _, call in self._calls]  # a call is added when the clock has reached its arrival
        self._calls.clear()
        return taken

    def ended(self, call: Call, now: float) -> None:
        self._on_ended(call, now)


class FleetSimulator:
    """Runs one workload to its end on several engines. Owns the clock and the calls between source and engines.

    The engine with the earliest event advances, so that each choice sees the engines as they are at that time. Engines
    fast-forward at most to the next arrival; unless arrivals depend on endings, they do so independently.
    """

    def __init__(
        self,
        setup: Setup,
        cost: CostModel,
        source: Source,
        record: RunRecord,
        *,
        reuse_answers: bool = False,
        fast_forward: bool = True,
        progress: Callable[[float, int], None] | None = None,
    ) -> None:
        """
        Args:
            record: receives the figures of all engines.
            reuse_answers, fast_forward, progress: see Simulator.
        """
        self._source = source
        self._record = record
        self._progress = progress
        self._now = 0.0
        self._num_ended = 0
        self._inboxes = [Inbox(self._ended) for _ in range(setup.num_engines)]
        recorders = [
            KVEventRecorder(setup.layout, SHORT_HASH_BYTES) if setup.routing == "cache" else None for _ in self._inboxes
        ]
        records = [RunRecord(block_size=record.block_size) for _ in self._inboxes]
        shared = isinstance(cost, ExpertParallelCost)
        self.engines = [
            (LockstepSimulator if shared else Simulator)(
                setup,
                cost,
                inbox,
                each,
                reuse_answers=reuse_answers,
                fast_forward=fast_forward,
                kv_events=recorder,
                on_started=self._started,
                number=number,
            )
            for number, (inbox, each, recorder) in enumerate(zip(self._inboxes, records, recorders, strict=True))
        ]
        self._times = [NEVER] * len(self.engines)
        """When each engine must act next."""
        self._choice: Choice
        if setup.routing == "vllm":
            self._choice = VllmChoice([engine.scheduler for engine in self.engines])
        else:
            self._choice = RouterChoice(setup, recorders, [each.steps for each in records])
        self._together: JointSteps | None = None
        if isinstance(cost, ExpertParallelCost):
            self._together = JointSteps([each for each in self.engines if isinstance(each, LockstepSimulator)], cost)

    def run(self) -> RunRecord:
        """Run until every call has finished; return the record of all engines together."""
        began = time.perf_counter()
        begin = min(self._source.next_time(), 1e18)
        while (now := self._next_time()) != NEVER:
            self._now = max(self._now, now)
            self._advance()
        seconds = self._now - begin if self._num_ended else 0.0
        merge_engines(self._record, [engine.finish(seconds) for engine in self.engines], self._choice.reasons)
        self._record.wall_s = time.perf_counter() - began
        return self._record

    def _next_time(self) -> float:
        """Return the time of the next event, after beginning the steps that begin before it."""
        due = min(*self._times, self._source.next_time())
        together = self._together
        if together is None:
            return due
        # Only when nothing else happens at this time: all engines must have scheduled before they step together.
        if due > self._now and together.begin(self._now):
            self._times = [engine.next_time() for engine in self.engines]
            due = min(*self._times, self._source.next_time())
        return min(due, together.end) if together.end > self._now else due

    def _advance(self) -> None:
        """Route the calls that are due, or let the engine with the earliest event advance."""
        arrival, due = self._source.next_time(), min(self._times)
        # Arrivals first, as in the router's process: a choice sees the engines before the step that ends at the same
        # moment.
        if arrival <= due:
            self._place_due()
        elif due <= self._now:
            number = self._times.index(due)
            engine = self.engines[number]
            self._times[number] = NEVER
            # In a closed loop the end of a call on one engine makes the next call, which may go to this engine: it must
            # not run ahead of the others.
            horizon = arrival if isinstance(self._source, OpenLoop) else min(arrival, *self._times)
            engine.advance(due, horizon)
            self._times[number] = engine.next_time()
            self._choice.advanced(number, due)

    def _place_due(self) -> None:
        """Route the calls that have arrived."""
        while self._source.next_time() <= self._now:
            for call in self._source.take(self._now):
                number = self._choice.choose(call, self._now)
                self._inboxes[number].add(call, self._now)
                self._times[number] = self.engines[number].next_time()

    def _started(self, call: Call) -> None:
        self._choice.started(call)

    def _ended(self, call: Call, now: float) -> None:
        self._num_ended += 1
        self._now = max(self._now, now)
        self._choice.ended(call)
        self._source.ended(call, now)
        self._place_due()  # so that the engine schedules its next step with the call that follows at once
        if self._progress is not None and self._num_ended % 64 == 0:
            self._progress(now, self._num_ended)
