"""Runs calls through the real Scheduler and KV manager on a virtual clock, with a simulated worker."""

import random
import time
from collections import deque
from collections.abc import Callable
from hashlib import sha256
from typing import NamedTuple

from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.wire.adapter_messages import AdapterRef
from quire.protocol.wire.arrays import NO_TOKENS, Int32
from quire.protocol.wire.front_end_messages import AddRequest, CallsTool
from quire.protocol.wire.worker_messages import ModelRunnerOutput
from quire.replay.core.opaque import OpaqueRequest, OpaqueResult
from quire.replay.core.scheduler import ReplayScheduler
from quire.replay.costs.cost import CostModel
from quire.replay.costs.rows import SimulatedRows
from quire.replay.costs.side_clock import SideClock
from quire.replay.run.collector import RunCollector
from quire.replay.run.run_record import RequestRun, RunRecord
from quire.replay.run.step_shape import StepShape
from quire.replay.simulate.program_score import ProgramScore
from quire.replay.simulate.setup import Setup
from quire.replay.simulate.tier_copies import TierCopies
from quire.replay.workload.sources import NEVER, Source
from quire.replay.workload.workload import SHORT_HASH_BYTES, Call, block_names
from quire.scheduler_proc.features.programs.program_state import PROGRAM
from quire.scheduler_proc.kv.events import KVEventRecorder
from quire.scheduler_proc.process.ticks import TICK_S
from quire.scheduler_proc.requests.events import Clock
from quire.scheduler_proc.trace.decision_log import DecisionLog

IDLE_S = 1.0
"""Seconds after which an idle engine looks at the time again."""
HICCUP_S = 3.0
"""Duration of a hiccup, such as a frozen worker or a neighbour on the machine: steps stop, then continue."""
MIN_FAST_FORWARD = 3
"""Smallest number of quiet steps for which a fast-forward is faster than single steps."""


class StepInFlight(NamedTuple):
    """A step that the worker computes from ``begin`` to ``end``."""

    step: int
    begin: float
    end: float
    handles: Int32 | None


class Simulator:
    """Simulates one engine. Owns its virtual clock and the steps between Scheduler and worker.

    The order of events is the live loop's: events that are due are consumed, then steps are scheduled while the
    pipeline has room. A step begins when the worker has finished the previous one.

    ``run`` runs one engine to the end of its workload; a driver of several engines calls ``next_time`` and ``advance``.
    """

    def __init__(
        self,
        setup: Setup,
        cost: CostModel,
        source: Source,
        record: RunRecord,
        *,
        reuse_answers: bool = False,
        score: ProgramScore | None = None,
        fast_forward: bool = True,
        progress: Callable[[float, int], None] | None = None,
        kv_events: KVEventRecorder | None = None,
        on_started: Callable[[Call], None] | None = None,
        number: int = 0,
    ) -> None:
        """
        Args:
            setup: of this engine, or of several of which it is one.
            reuse_answers: see ``block_names``.
            score: judges which program each call was given to. The calls then do not name their conversation.
            fast_forward: False: schedule each step individually, which takes longer and gives the same result.
            progress: called from time to time with the virtual time in seconds and the number of finished calls.
            kv_events: records the changes of the prefix cache.
            on_started: called with each call that gets its first token.
            number: of the engine.
        """
        decision_log, tiers = DecisionLog(), setup.tiers
        self.scheduler = ReplayScheduler(
            setup.config,
            setup.layout,
            setup.num_usable_blocks + 1,
            hooks=decision_log,
            policies=setup.policies,
            num_host_pages=tiers.num_host_pages,
            num_disk_pages=tiers.num_disk_pages,
            num_slots=setup.num_slots,
            kv_events=kv_events,
        )
        self._copies = TierCopies(self.scheduler, tiers)
        self._side = SideClock(setup.adapter_load_s)
        self._collector = RunCollector(record, self.scheduler, decision_log, on_started and self._on_started)
        self._started = on_started
        self._cost = cost
        self._source = source
        self._reuse_answers = reuse_answers
        self._score = score
        self._may_fast_forward = fast_forward
        self._receives_between_steps = setup.policies.takes_between_steps
        self._progress = progress
        self._rows = SimulatedRows()
        self._in_flight: deque[StepInFlight] = deque()
        self._worker_free = 0.0
        self._calls: dict[RequestRun, Call] = {}
        self._now = 0.0
        self._num_ended = 0
        self._pace = setup.pace(number)
        self._hiccups_per_s = setup.hiccups_per_minute / 60
        self._rng = random.Random(f"{number} {setup.hiccups_per_minute}")
        self._until_hiccup = self._draw_hiccup()

    def run(self) -> RunRecord:
        """Run until every call has finished."""
        began = time.perf_counter()
        begin = min(self._source.next_time(), 1e18)
        while (now := self.next_time()) != NEVER:
            self.advance(now)
        record = self.finish(self._now - begin if self._num_ended else 0.0)
        record.wall_s = time.perf_counter() - began
        return record

    def next_time(self) -> float:
        """Return when the engine must act next; NEVER if it has no request and none is about to arrive."""
        scheduler = self.scheduler
        done = self._next_done()
        waits = self._receives_between_steps and bool(self._in_flight)
        now = done if waits else min(self._source.next_time(), done)
        if now == NEVER and not scheduler.table.requests:
            return NEVER  # stores in flight are not waited for
        # Without an event nothing would ever look at the clock, and requests that wait for an idle time would wait for
        # ever.
        if scheduler.programs.limit is not None and scheduler.table.waiting and not self._in_flight:
            now = min(now, self._now + IDLE_S)  # turns become overdue, and programs idle
        return min(now, NEVER if waits else min(self._copies.next_time, self._side.next_end))

    def advance(self, now: float, horizon: float = NEVER) -> None:
        """Consume the events that are due at ``now``, schedule steps, and fast-forward quiet ones.

        Args:
            now: as returned by ``next_time``.
            horizon: no call arrives before it, except those of the source; quiet steps are fast-forwarded up to it.
        """
        scheduler, source = self.scheduler, self._source
        done = self._next_done()
        self._now = max(self._now, now)
        # The order of this method is that of ``SchedulerLoop.turn``: the time, results, copies, arrivals, then steps. A
        # replay that took them in another order would admit other requests at ties.
        self._tick()
        if done <= self._now:
            self._finish_step()
        if self._copies.next_time <= self._now:
            self._finish_copies()
        self._finish_side_jobs()
        for call in source.take(self._now):
            self._arrive(call)
        self._send_side_jobs()
        self._copies.send_stores(self._now, self._worker_free)
        while scheduler.can_schedule and self._decide():
            pass
        # Most steps of a trace are steady decode, in which the Scheduler would decide nothing. Only their times are
        # computed.
        if self._may_fast_forward and (quiet := scheduler.num_quiet_steps) >= MIN_FAST_FORWARD:
            self._fast_forward(quiet, horizon)

    def finish(self, virtual_s: float) -> RunRecord:
        """Complete the record after the last event; ``virtual_s``: seconds from the first arrival to the last end."""
        stuck = self.scheduler.table.requests
        assert not stuck, f"{len(stuck)} requests never finished, such as {next(iter(stuck.values()))!r}"
        record = self._collector.finish(virtual_s)
        for name, tier in record.tiers.items():
            tier["hit_tokens"] = self._copies.hit_tokens[name]
        return record

    def _next_done(self) -> float:
        """Return when the worker finishes the oldest step in flight, or NEVER."""
        return self._in_flight[0].end if self._in_flight else NEVER

    def _on_started(self, run: RequestRun) -> None:
        assert self._started is not None
        self._started(self._calls[run])

    def _tick(self) -> None:
        programs = self.scheduler.programs
        now = self._now // TICK_S * TICK_S  # the same with and without fast-forward
        if programs.is_enabled and now > programs.now:
            self.scheduler.consume(Clock(now))

    def _arrive(self, call: Call) -> None:
        run = RequestRun(call.request_id, self._now, call.num_prompt_tokens, call.conversation, call.priority)
        refusal = self._refusal(call)
        if refusal:
            self._collector.rejected(run, refusal)
            self._end(call)
            return
        names = block_names(call, self.scheduler.kv.block_size, reuse_answers=self._reuse_answers)
        sampling = SamplingParams(max_tokens=max(call.num_output_tokens, 1), ignore_eos=True)
        adapter = None
        if call.adapter and self.scheduler.config.enable_lora:
            adapter = AdapterRef(call.adapter, sha256(call.adapter.encode()).digest(), "")
        known_as = f"{call.number}"  # ids of a trace may be equal or too long
        request = AddRequest(
            known_as,
            NO_TOKENS,
            sampling,
            0,
            priority=call.priority,
            arrival=self._now,
            adapter=adapter,
            items=[item for item in call.items if item.kind in self.scheduler.config.item_kinds],
            job_id=call.conversation if self._score is None else "",
            pooling=call.pooling,
        )
        self.scheduler.consume(OpaqueRequest(request, call.num_prompt_tokens, 0, names, SHORT_HASH_BYTES))
        if self._score is not None and (accepted := self.scheduler.table.requests.get((0, known_as))) is not None:
            self._score.add(call, PROGRAM.of(accepted))
        self._calls[run] = call
        for refused in self._collector.arrived(run, known_as=known_as):
            self._end(self._calls.pop(refused))

    def _refusal(self, call: Call) -> str:
        """Return why the call cannot run to its end; empty if it can."""
        total = call.num_prompt_tokens + call.num_output_tokens
        limit = self.scheduler.config.max_model_len
        if total > limit:
            return f"prompt and answer of {total} tokens exceed max_model_len {limit}"
        kv = self.scheduler.kv
        needed = kv.num_blocks_for(total - (call.pooling is None))
        if needed > kv.pool.num_usable_blocks:
            return f"needs {needed} KV blocks; the pool has {kv.pool.num_usable_blocks}"
        return ""

    def _decide(self) -> bool:
        diff = self.scheduler.schedule(self._now)
        self._copies.send_loads(self._now)
        self._send_side_jobs()
        if diff is None:
            self._collector.note(self._now, self.scheduler.decisions.take())
        else:
            shape = self._rows.apply(diff)
            self._collector.step_decided(self._now, diff.step, shape)
            self._launch(diff.step, shape, self._rows.take_handles())
        self._copies.send_stores(self._now, self._worker_free)
        return diff is not None

    def _launch(self, step: int, shape: StepShape, handles: Int32 | None) -> None:
        """Send a step to the worker."""
        # A device runs one step after the other; scheduling the next one costs no virtual time, as in a live engine
        # that is ahead of its workers.
        begin = max(self._now, self._worker_free)
        self._worker_free = begin + self._seconds(shape)
        self._in_flight.append(StepInFlight(step, begin, self._worker_free, handles))

    def _seconds(self, shape: StepShape) -> float:
        """Return the seconds of the next step on this engine's device, with the hiccup that it may have."""
        seconds = self._pace * self._cost.seconds(shape)
        # Counted in time of steps and not of the clock: an idle engine has no step that could be late.
        self._until_hiccup -= seconds
        if self._until_hiccup > 0:
            return seconds
        self._until_hiccup = self._draw_hiccup()
        return seconds + HICCUP_S

    def _draw_hiccup(self) -> float:
        """Return the seconds of steps until the next hiccup."""
        return self._rng.expovariate(self._hiccups_per_s) if self._hiccups_per_s else NEVER

    def _finish_step(self) -> None:
        done = self._in_flight.popleft()
        output = ModelRunnerOutput(done.step, handles=done.handles, seconds=done.end - done.begin)
        self.scheduler.consume(OpaqueResult(output))
        for run in self._collector.step_finished(self._now, done.step, done.begin, done.end, done.handles):
            call = self._calls.pop(run)
            if call.tool and self.scheduler.programs.is_enabled:
                self.scheduler.consume(CallsTool(f"{call.number}", call.tool))
            self._end(call)

    def _finish_copies(self) -> None:
        self._copies.consume(self._now)
        for run in self._collector.changed(self._now):
            self._end(self._calls.pop(run))

    def _send_side_jobs(self) -> None:
        for work in self.scheduler.take_side_jobs():
            self._side.send(work, self._now)

    def _finish_side_jobs(self) -> None:
        while (answer := self._side.take(self._now)) is not None:
            self.scheduler.consume(answer)
            for run in self._collector.changed(self._now):
                self._end(self._calls.pop(run))

    def _fast_forward(self, count: int, horizon: float) -> None:
        """Up to ``count`` times, finish the oldest step and schedule one more, without asking the Scheduler.

        Stops at the first step that ends after the next arrival, or the end of a copy or of side work.
        """
        shape = self._rows.steady_shape()
        until = min(horizon, self._source.next_time(), self._copies.next_time, self._side.next_end)
        depth, first = len(self._in_flight), self._worker_free
        ends = [done.end for done in self._in_flight]
        for at in range(count):
            # Also at equality: an event at the end of a step is consumed with its result, so the Scheduler must be
            # asked.
            if ends[at] >= until:
                break
            self._worker_free += self._seconds(shape)
            shape.decode_context += shape.num_decodes
            shape.longest_decode += 1
            ends.append(self._worker_free)
        count = len(ends) - depth
        if not count:
            return
        self._now = ends[count - 1]
        step = self._in_flight[-1].step + 1
        self.scheduler.fast_forward(count, self._now)
        self._rows.fast_forward(count)
        begins = [*(done.begin for done in self._in_flight), first, *ends[depth:-1]]
        self._collector.fast_forwarded(range(step, step + count), shape.num_decodes, begins[:count], ends[:count])
        for at in range(depth, len(ends)):
            self._in_flight.append(StepInFlight(step + at - depth, begins[at], ends[at], None))
            self._in_flight.popleft()

    def _end(self, call: Call) -> None:
        self._num_ended += 1
        self._source.ended(call, self._now)
        if self._progress is not None and self._num_ended % 64 == 0:
            self._progress(self._now, self._num_ended)
