"""One step while it is being decided, and its diff once it is."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from quire.protocol.messages import NewRequestData, SchedulerOutput
from quire.scheduler_proc.kv.coordinator import GroupBlocks
from quire.scheduler_proc.kv.manager import KVCacheManager
from quire.scheduler_proc.request import Request


@dataclass(slots=True)
class Share:
    """What one request gets of a step: ``num_tokens`` positions; ``new_blocks`` for a request that ran already."""

    request: Request
    num_tokens: int
    new_blocks: GroupBlocks | None


class StepPlan:
    """Decisions of one call of ``schedule()``. Nothing here has touched a request's progress yet, so a share can be
    taken back as long as the plan is open.

    Invariant: the shares' tokens and ``budget`` add up to the step's token budget.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.shares: dict[int, Share] = {}
        self.preempted: list[Request] = []

    def add(self, request: Request, num_tokens: int, new_blocks: GroupBlocks | None) -> None:
        """``new_blocks`` None: the request is new to the workers, which are told everything."""
        self.shares[request.handle] = Share(request, num_tokens, new_blocks)
        self.budget -= num_tokens

    def take_back(self, request: Request) -> None:
        """The request does not run in this step after all."""
        share = self.shares.pop(request.handle, None)
        if share is not None:
            self.budget += share.num_tokens


@dataclass(slots=True)
class InFlightStep:
    """A step sent and not yet answered.

    Attributes:
        requests: all that run in it.
        sampling: those that sample, by handle: whom its tokens belong to, whatever a handle means by then.
        retired: handles that nobody uses once this step is answered.
    """

    step: int
    requests: list[Request]
    sampling: dict[int, Request]
    retired: list[int] = field(default_factory=list)


def build_diff(
    step: int, plan: StepPlan, running: Sequence[Request], removed: list[int], kv: KVCacheManager
) -> SchedulerOutput:
    """The diff from what the workers hold to what ``plan`` wants; marks requests as the workers will hold them."""
    new: list[NewRequestData] = []
    tokens: list[np.ndarray[tuple[int], np.dtype[np.int32]]] = []
    block_ids: list[int] = []
    unparked: list[int] = []
    appended: list[tuple[int, int, int]] = []
    counts: list[tuple[int, int]] = []
    for handle, share in plan.shares.items():
        request = share.request
        if share.new_blocks is None:
            held = kv.block_ids(request)
            new.append(_new_request_data(request, [len(ids) for ids in held]))
            tokens.append(request.tokens.array())
            for ids in held:
                block_ids += ids
            request.on_worker, request.parked = True, False
        else:
            for group, blocks in enumerate(share.new_blocks):
                appended += [(handle, group, block.block_id) for block in blocks]
            if request.parked:
                request.parked = False
                unparked.append(handle)
        if share.num_tokens != 1:
            counts.append((handle, share.num_tokens))
    handles, groups, new_blocks = np.array(appended, np.int32).reshape(-1, 3).T
    return SchedulerOutput(
        step=step,
        removed=removed,
        parked=_park_the_rest(plan, running),
        new_requests=new,
        token_ids=np.concatenate(tokens) if tokens else None,
        block_ids=np.array(block_ids, np.int32) if new else None,
        unparked=unparked,
        appended_handles=handles if appended else None,
        appended_block_ids=new_blocks if appended else None,
        appended_groups=groups if groups.any() else None,
        counts=counts,
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


def _park_the_rest(plan: StepPlan, running: Sequence[Request]) -> list[int]:
    """Handles that the workers would run by themselves, and that got no share."""
    if len(plan.shares) == len(running):
        return []
    parked: list[int] = []
    for request in running:
        if request.handle not in plan.shares and not request.parked:
            request.parked = True
            parked.append(request.handle)
    return parked
