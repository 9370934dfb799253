"""The Scheduler for replays: events without tokens, policies of other engines, and fast-forward."""

from functools import partial
from typing import Any

import msgspec
import numpy as np

from quire.protocol.config import EngineConfig
from quire.protocol.model.kv_layout import KVLayout
from quire.replay.core.fifo_pool import FifoBlockPool
from quire.replay.core.opaque import OpaqueRequest, OpaqueResult, OpaqueTokens, RecordedEndings
from quire.replay.core.planner import ImitatingPlanner
from quire.replay.core.policies import QUIRE, Policies
from quire.scheduler_proc.core.context import Core
from quire.scheduler_proc.core.planner import Planner
from quire.scheduler_proc.kv.block_pool import BlockPool
from quire.scheduler_proc.messages.arrivals import Refusal
from quire.scheduler_proc.messages.steps import InFlightStep
from quire.scheduler_proc.requests.events import Consumed
from quire.scheduler_proc.requests.request import Request
from quire.scheduler_proc.scheduler import Scheduler


class ReplayScheduler(Scheduler):
    """The live engine's Scheduler, which also consumes events without tokens and follows ``policies``.

    Requests without tokens have zeros instead. The zeros are sent to no client and finish no request: recorded endings
    and lengths do.
    """

    def __init__(
        self,
        config: EngineConfig,
        layout: KVLayout,
        num_blocks: int,
        *,
        policies: Policies = QUIRE,
        **parts: Any,
    ) -> None:
        """``parts``: as of ``Scheduler``."""
        self._policies = policies
        super().__init__(config, layout, num_blocks, **parts)

    def make_planner(self, core: Core) -> Planner:
        return ImitatingPlanner(core, self._policies)

    def pool_class(self, config: EngineConfig) -> type[BlockPool]:
        return super().pool_class(config) if self._policies.uncached_blocks_first else FifoBlockPool

    # ---- events without tokens

    def consume(self, event: Consumed | OpaqueRequest | OpaqueResult, client: int = 0) -> None:
        match event:
            case OpaqueRequest():
                self.arrivals.add(event.request, client, partial(self._admit, event, client))
            case OpaqueResult():
                self._answer(event)
            case _:
                super().consume(event, client)
        self.after_event()

    def _admit(self, event: OpaqueRequest, client: int) -> Request:
        admission, request = self.arrivals.admission, event.request
        admission.validate(request, event.num_prompt_tokens)
        admission.check_length(request, event.num_prompt_tokens)
        if event.num_output_tokens < 0:
            text = f"num_output_tokens must be at least 0 (got {event.num_output_tokens})"
            raise Refusal("invalid_value", "num_output_tokens", text)
        if event.hash_bytes < 1 or len(event.block_hashes) % event.hash_bytes:
            sizes = f"got {len(event.block_hashes)} bytes and hash_bytes {event.hash_bytes}"
            text = f"length of block_hashes must be a multiple of hash_bytes ({sizes})"
            raise Refusal("invalid_value", "block_hashes", text)
        names = event.names if self.kv.pool.enable_caching else []
        tokens = OpaqueTokens(event.num_prompt_tokens + event.num_output_tokens, self.kv.block_size, names)
        made = admission.build(request, client, tokens, event.num_prompt_tokens)
        admission.prepare(made, request, self.forks.parent_of(request, client))
        return made

    def _answer(self, event: OpaqueResult) -> None:
        output = event.output
        handles = self.in_flight.handles if output.handles is None else output.handles
        num_tokens = len(handles) if output.counts is None else int(output.counts.sum())
        output = msgspec.structs.replace(output, tokens=np.zeros(num_tokens, np.int32))
        self.results.update_from_output(output, RecordedEndings(event.ended, event.beams))

    def find(self, handle: int) -> Request | None:
        """Return the unfinished request with this handle; O(requests) when it is not running."""
        table = self.table
        found = table.running.get(handle) or table.leaving.get(handle)
        return found or next((r for r in table.requests.values() if r.handle == handle), None)

    # ---- many steps at once

    @property
    def num_quiet_steps(self) -> int:
        """Number of the next steps that need no decision: every request is in steady decode and none is due."""
        config, batch, table = self.config, self.steady_decode.batch, self.table
        if table.unsteady or table.waiting or table.leaving or any(table.ended_handles):
            return 0
        if not 0 < len(batch) <= config.step_tokens or self.pause == "pause":
            return 0
        if len(self.in_flight) < config.pipeline_depth or config.num_speculative_tokens:
            return 0
        if not (self.transfers.is_settled and self.adapters.is_settled and self.items.is_settled):
            return 0
        if self.in_flight.verified is not batch or not all(_is_only(step, batch) for step in self.in_flight.records):
            return 0
        return min(self.steady_decode.calendar, default=self.last_step + 1) - self.last_step - 1

    def fast_forward(self, count: int, now: float) -> None:
        """Do ``count`` times: consume a result of the oldest step, then ``schedule``.

        The state afterwards is the same, but no messages are made: they would contain only tokens.

        Args:
            count: at most ``num_quiet_steps``.
            now: when the last of the steps is scheduled, in seconds.
        """
        self.kv.pool.now = now
        clock, records = self.steady_decode.clock, self.in_flight.records
        newest = records[-1]
        for step in range(newest.step + 1, newest.step + count + 1):
            records.append(InFlightStep(step, {}, [], newest.num_tokens, steady=newest.steady))
            records.popleft()
        clock.sent += count
        clock.acknowledged += count
        self.stats.steps_by_size[newest.num_tokens] += count
        self.stats.generation_tokens += count * len(self.steady_decode.batch)


def _is_only(step: InFlightStep, batch: dict[int, Request]) -> bool:
    return step.steady is batch and not (step.rows or step.retired)
