"""The diff of a step: what workers must change in their rows to compute it."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from quire.protocol.wire.arrays import Int32
from quire.protocol.wire.worker_messages import NewRequestData, SchedulerOutput
from quire.scheduler_proc.core.feature import Calls
from quire.scheduler_proc.core.step import Contents, StepPlan
from quire.scheduler_proc.kv.manager import KVCacheManager
from quire.scheduler_proc.requests.request import Request


def build_diff(
    plan: StepPlan, unsteady: Iterable[Request], removed: list[int], kv: KVCacheManager, calls: Calls
) -> SchedulerOutput:
    """Return the diff between the workers' state and ``plan``, and update the requests' worker state.

    ``unsteady``: all running requests outside of steady decode; those without a row are parked.
    """
    diff = _build(plan, unsteady, removed, kv, calls)
    for feature in calls.sending:
        diff = feature.sending(plan, diff)
    return diff


def _build(
    plan: StepPlan, unsteady: Iterable[Request], removed: list[int], kv: KVCacheManager, calls: Calls
) -> SchedulerOutput:
    handles, block_ids, groups = plan.new_blocks
    if not plan.rows and not removed:  # all requests are in steady decode or already parked
        return SchedulerOutput(
            step=plan.step,
            parked=_park_the_rest(plan, unsteady),
            appended_handles=np.array(handles, np.int32) if handles else None,
            appended_block_ids=np.array(block_ids, np.int32) if handles else None,
            appended_groups=np.array(groups, np.int32) if any(groups) else None,
        )
    new: list[NewRequestData] = []
    tokens: list[Int32] = []
    new_ids: list[Int32] = []
    shared: dict[Any, Contents] = {}
    unparked: list[int] = []
    for handle, row in plan.rows.items():
        request = row.request
        if not request.on_worker:
            found = (feature.contents(row, shared) for feature in calls.contents)
            known, held = next(filter(None, found), None) or (request.tokens.array(), kv.block_ids(request))
            new.append(_new_request_data(request, [len(ids) for ids in held], calls))
            tokens.append(known)
            new_ids += held
            request.on_worker, request.parked = True, False
            continue
        for group, blocks in enumerate(row.new_blocks or ()):
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
        block_ids=np.concatenate(new_ids) if new_ids else None,
        unparked=unparked,
        appended_handles=np.array(handles, np.int32) if handles else None,
        appended_block_ids=np.array(block_ids, np.int32) if handles else None,
        appended_groups=np.array(groups, np.int32) if any(groups) else None,
        counts=[(handle, row.num_tokens) for handle, row in plan.rows.items() if row.num_tokens > 1],
        drafts=[(handle, row.num_drafts) for handle, row in plan.rows.items() if row.num_drafts],
    )


def _new_request_data(request: Request, num_blocks: list[int], calls: Calls) -> NewRequestData:
    data = NewRequestData(
        handle=request.handle,
        request_id=request.request_id,
        num_prompt_tokens=request.num_prompt_tokens,
        num_tokens=request.num_tokens,
        num_computed_tokens=request.num_computed_tokens,
        num_blocks=num_blocks,
        sampling=request.sampling,
        seed=request.seed,
    )
    for feature in calls.building:
        data = feature.building(request, data)
    return data


def _park_the_rest(plan: StepPlan, unsteady: Iterable[Request]) -> list[int]:
    """Park the requests without a row, which the workers would otherwise decode. Returns their handles, sorted."""
    parked: list[int] = []
    for request in unsteady:
        if request.handle not in plan.rows and request.on_worker and not request.parked:
            request.parked = True
            parked.append(request.handle)
    return sorted(parked) if parked else parked
