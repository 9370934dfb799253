"""A workload through the real Scheduler and KV manager, on a virtual clock, with a simulated worker."""

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from quire.launch.replay.collector import RunCollector
from quire.launch.replay.cost import CostModel
from quire.launch.replay.rows import SimulatedRows
from quire.launch.replay.run_record import RequestRun, RunRecord
from quire.launch.replay.sources import Source
from quire.launch.replay.workload import NAME_BYTES, Call, block_names
from quire.protocol.config import EngineConfig
from quire.protocol.kv_layout import KVLayout
from quire.protocol.messages import Int32, OpaqueRequest, OpaqueResult
from quire.protocol.sampling_params import SamplingParams
from quire.scheduler_proc.scheduler import Scheduler


class _Computing(NamedTuple):
    """A step that the worker has, with when it begins and ends it."""

    step: int
    begin: float
    end: float
    handles: Int32 | None


class Simulator:
    """Runs one workload to its end. Owns the virtual clock and what stands between Scheduler and worker.

    The order of things is the live loop's: what has come by now is consumed, then steps are decided while the
    pipeline has room; a step begins when the worker is done with the one before.
    """

    def __init__(
        self,
        config: EngineConfig,
        layout: KVLayout,
        num_usable_blocks: int,
        cost: CostModel,
        source: Source,
        record: RunRecord,
        *,
        reuse_answers: bool = False,
        progress: Callable[[float, int], None] | None = None,
    ) -> None:
        """
        Args:
            progress: told now and then of the virtual time and the ended calls.
        """
        self.scheduler = Scheduler(config, layout, num_usable_blocks + 1)
        self._collector = RunCollector(record, self.scheduler)
        self._cost = cost
        self._source = source
        self._reuse_answers = reuse_answers
        self._progress = progress
        self._rows = SimulatedRows()
        self._computing: deque[_Computing] = deque()
        self._worker_free = 0.0
        self._calls: dict[RequestRun, Call] = {}
        self._now = 0.0
        self._num_ended = 0

    def run(self) -> RunRecord:
        """Until every call has ended."""
        began = time.perf_counter()
        source, scheduler = self._source, self.scheduler
        begin = min(source.next_time(), 1e18)
        while True:
            done = self._computing[0].end if self._computing else float("inf")
            now = min(source.next_time(), done)
            if now == float("inf"):
                break
            self._now = max(self._now, now)
            if done <= self._now:
                self._answer()
            for call in source.take(self._now):
                self._arrive(call)
            while scheduler.can_schedule and self._decide():
                pass
        stuck = scheduler.table.requests
        assert not stuck, f"{len(stuck)} requests never ended, {next(iter(stuck.values()))!r} among them"
        record = self._collector.finish(self._now - begin if self._num_ended else 0.0)
        record.wall_s = time.perf_counter() - began
        return record

    def _arrive(self, call: Call) -> None:
        run = RequestRun(call.request_id, self._now, call.num_prompt_tokens, call.conversation, call.priority)
        refusal = self._refusal(call)
        if refusal:
            self._collector.rejected(run, refusal)
            self._end(call)
            return
        block_size = self.scheduler.kv.block_size
        names = block_names(call, block_size, reuse_answers=self._reuse_answers)
        sampling = SamplingParams(max_tokens=call.num_output_tokens, ignore_eos=True)
        self.scheduler.consume(
            OpaqueRequest(
                f"{call.number}",
                call.num_prompt_tokens,
                sampling,
                0,
                names,
                hash_bytes=NAME_BYTES,
                priority=call.priority,
                arrival=self._now,
            )
        )
        run.request_id = f"{call.number}"
        self._collector.arrived(run)
        self._calls[run] = call

    def _refusal(self, call: Call) -> str:
        """Why the call can never run to its end; empty when it can."""
        total = call.num_prompt_tokens + call.num_output_tokens
        limit = self.scheduler.config.max_model_len
        if total > limit:
            return f"prompt and answer have {total} tokens; max_model_len is {limit}"
        kv = self.scheduler.kv
        needed = kv.num_blocks_for(total - 1)
        if needed > kv.pool.num_usable_blocks:
            return f"it needs {needed} KV blocks; the pool has {kv.pool.num_usable_blocks}"
        return ""

    def _decide(self) -> bool:
        diff = self.scheduler.schedule(self._now)
        if diff is None:
            return False
        shape = self._rows.apply(diff)
        self._collector.decided(self._now, diff.step, shape)
        begin = max(self._now, self._worker_free)
        self._worker_free = begin + self._cost.seconds(shape)
        self._computing.append(_Computing(diff.step, begin, self._worker_free, self._rows.take_handles()))
        return True

    def _answer(self) -> None:
        done = self._computing.popleft()
        self.scheduler.consume(OpaqueResult(done.step, done.handles, [], [], seconds=done.end - done.begin))
        for run in self._collector.answered(self._now, done.step, done.begin, done.end, done.handles):
            self._end(self._calls.pop(run))

    def _end(self, call: Call) -> None:
        self._num_ended += 1
        self._source.ended(call, self._now)
        if self._progress is not None and self._num_ended % 64 == 0:
            self._progress(self._now, self._num_ended)
