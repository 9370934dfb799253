"""One step while it is being decided, and its diff once it is."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from quire.protocol.config import EngineConfig
from quire.protocol.wire.worker_messages import NewRequestData, SchedulerOutput
from quire.scheduler_proc.kv.coordinator import GroupBlocks
from quire.scheduler_proc.kv.manager import KVCacheManager
from quire.scheduler_proc.requests.request import Request


@dataclass(slots=True)
class StepRow:
    """One request's part of a step: ``num_tokens`` positions, the last ``num_drafts`` of them for drafts.

    The workers may find fewer drafts, and then compute fewer positions.

    Attributes:
        new_blocks: for a request that the workers hold already; None when they are to be sent everything.
        is_prefill: it counts towards prefill's part of the step.
        samples: the result has a token of it. Set when the step is sent.
    """

    request: Request
    num_tokens: int
    new_blocks: GroupBlocks | None
    num_drafts: int = 0
    is_prefill: bool = False
    samples: bool = False


class StepPlan:
    """Decisions of one call of ``schedule()``. Nothing here has touched a request's progress yet, so a row can be
    taken back as long as the plan is open.

    Invariant: the rows' tokens, one for each request in steady decode, and ``budget`` add up to the step's budget.

    Attributes:
        step: the number that the step will have.
        config: the limits that it is decided under.
        budget: tokens that are left.
        prefill_budget: of these, what prefill may have.
        begun: requests in steady decode that got a new block, in order, and ``grown_block_ids`` its ids.
        last: requests in steady decode that get their last token of this step.
    """

    def __init__(self, step: int, config: EngineConfig) -> None:
        self.step = step
        self.config = config
        self.budget = self.prefill_budget = config.max_num_batched_tokens
        self.rows: dict[int, StepRow] = {}
        self.preempted: list[Request] = []
        self.num_claimed = 0
        """Of these, those over their tenant's share, which made way for another's: more may still be admitted."""
        self.grown: list[Request] = []
        self.grown_block_ids: list[int] = []
        self.last: list[Request] = []

    def add(self, row: StepRow) -> None:
        self.rows[row.request.handle] = row
        self.budget -= row.num_tokens
        if row.is_prefill:
            self.prefill_budget -= row.num_tokens

    def withdraw(self, request: Request) -> None:
        """The request does not run in this step after all."""
        row = self.rows.pop(request.handle, None)
        if row is not None:
            self.budget += row.num_tokens
            if row.is_prefill:
                self.prefill_budget += row.num_tokens
        elif request.is_steady:
            self.budget += 1
        if request in self.grown:
            at = self.grown.index(request)
            del self.grown[at], self.grown_block_ids[at]


def build_diff(plan: StepPlan, unsteady: Iterable[Request], removed: list[int], kv: KVCacheManager) -> SchedulerOutput:
    """The diff from what the workers hold to what ``plan`` wants; marks requests as the workers will hold them.

    ``unsteady``: all that run and are not in steady decode; those without a row are parked.
    """
    handles = [request.handle for request in plan.grown]
    block_ids = plan.grown_block_ids
    if not plan.rows and not removed:  # all are in steady decode, or parked already
        return SchedulerOutput(
            step=plan.step,
            parked=_park_the_rest(plan, unsteady),
            appended_handles=np.array(handles, np.int32) if handles else None,
            appended_block_ids=np.array(block_ids, np.int32) if handles else None,
        )
    new: list[NewRequestData] = []
    tokens: list[np.ndarray[tuple[int], np.dtype[np.int32]]] = []
    new_ids: list[int] = []
    unparked: list[int] = []
    groups = [0] * len(handles)
    for handle, row in plan.rows.items():
        request = row.request
        if row.new_blocks is None:
            held = kv.block_ids(request)
            new.append(_new_request_data(request, [len(ids) for ids in held]))
            tokens.append(request.tokens.array())
            for ids in held:
                new_ids += ids
            request.on_worker, request.parked = True, False
            continue
        for group, blocks in enumerate(row.new_blocks):
            if blocks:
                handles += [handle] * len(blocks)
                block_ids += [block.block_id for block in blocks]
                groups += [group] * len(blocks)
        if request.parked:
            request.parked = False
            unparked.append(handle)
    return SchedulerOutput(
        step=plan.step,
        removed=removed,
        parked=_park_the_rest(plan, unsteady),
        new_requests=new,
        token_ids=np.concatenate(tokens) if tokens else None,
        block_ids=np.array(new_ids, np.int32) if new else None,
        unparked=unparked,
        appended_handles=np.array(handles, np.int32) if handles else None,
        appended_block_ids=np.array(block_ids, np.int32) if handles else None,
        appended_groups=np.array(groups, np.int32) if any(groups) else None,
        counts=[(handle, row.num_tokens) for handle, row in plan.rows.items() if row.num_tokens != 1],
        drafts=[(handle, row.num_drafts) for handle, row in plan.rows.items() if row.num_drafts],
    )


def _new_request_data(request: Request, num_blocks: list[int]) -> NewRequestData:
    return NewRequestData(
        handle=request.handle,
        request_id=request.request_id,
        num_prompt_tokens=request.num_prompt_tokens,
        num_tokens=request.num_tokens,
        num_computed_tokens=request.num_computed_tokens,
        num_blocks=num_blocks,
        sampling=request.sampling,
        seed=request.seed,
    )


def _park_the_rest(plan: StepPlan, unsteady: Iterable[Request]) -> list[int]:
    """Handles that the workers would run by themselves, and that got no row; in an order that depends on nothing."""
    parked: list[int] = []
    for request in unsteady:
        if request.handle not in plan.rows and not request.parked:
            request.parked = True
            parked.append(request.handle)
    return sorted(parked) if parked else parked
