"""The Statistics message."""

from collections import Counter
from itertools import islice
from typing import Any

from quire.protocol.wire.front_end_messages import RequestState, Statistics
from quire.scheduler_proc.core.context import Core
from quire.scheduler_proc.requests.reasons import RESERVED_REASONS, RUNNING_REASON, WaitReason
from quire.scheduler_proc.requests.request import Request
from quire.scheduler_proc.requests.request_table import RequestTable

MAX_LISTED = 200
"""Most requests in one answer, the oldest ones."""


def make_statistics(core: Core, query: int, done: bool, *, is_paused: bool) -> Statistics:
    """Return the reply to a Control message. ``query``: its number; ``done``: whether the command was executed."""
    table, pool, decisions, counters = core.table, core.kv.pool, core.decisions, core.stats
    # All of them, because a series that ends would be a gap in a graph.
    hidden = (RUNNING_REASON, *RESERVED_REASONS)
    reasons = Counter({str(reason): 0 for reason in WaitReason if reason not in hidden})
    reasons.update(str(request.wait_reason) for request in table.skipped_waiting.values())
    if table.waiting:
        reasons[_queue_reason(table, is_paused)] += len(table.waiting)
    return Statistics(
        query=query,
        done=done,
        num_running=len(table.running) + len(table.leaving),
        num_waiting=table.num_waiting,
        num_usable_blocks=pool.num_usable_blocks,
        num_free_blocks=pool.num_free_blocks,
        num_cached_blocks=pool.num_cached_blocks,
        num_evicted_blocks=pool.num_evicted_blocks,
        kv_block_lifetime=pool.metrics.lifetime,
        kv_block_idle_before_evict=pool.metrics.idle_before_evict,
        kv_block_reuse_gap=pool.metrics.reuse_gap,
        num_steps=counters.num_steps,
        step_tokens=counters.step_tokens,
        waiting_by_reason=dict(reasons),
        preemptions_by_reason=dict(decisions.preemptions),
        load_choices=dict(decisions.load_choices),
        evictions_by_policy={} if pool.releases is None else dict(pool.releases.num_evicted),
        num_accepted_tokens_per_pos={str(at): n for at, n in enumerate(counters.num_accepted_tokens_per_pos)},
        **counters.as_dict(),
    )


def list_requests(core: Core, *, is_paused: bool) -> list[RequestState]:
    """Return the oldest requests. O(requests)."""
    return [_request_state(core, each, is_paused) for each in islice(core.table.requests.values(), MAX_LISTED)]


def _request_state(core: Core, request: Request, is_paused: bool) -> RequestState:
    table, handle, reason = core.table, request.handle, ""
    if handle in table.running:
        state, reason = "running", str(table.pause_reason(request) or "")
    elif handle in table.leaving:
        state = "leaving"
    elif handle in table.skipped_waiting:
        state, reason = "held", str(request.wait_reason)
    else:
        state, reason = "waiting", _queue_reason(table, is_paused)
    fields: dict[str, Any] = {}
    for feature in core.calls.describe:
        fields |= feature.describe(request)
    return RequestState(
        request_id=request.request_id,
        state=state,
        reason=reason,
        arrival=request.arrival,
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=request.num_output_tokens,
        num_blocks=core.kv.num_held_blocks(request),
        num_preemptions=request.num_preemptions,
        **fields,
    )


def _queue_reason(table: RequestTable, is_paused: bool) -> str:
    """Return why the queue's first request waits; those behind it wait for the same reason."""
    return str(WaitReason.PAUSED if is_paused else table.waiting.peek_request().wait_reason)
