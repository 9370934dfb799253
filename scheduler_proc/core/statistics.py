"""Counters of the scheduler, recent decisions, and the Statistics message."""

from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from itertools import islice
from typing import Any

from quire.protocol.wire.front_end_messages import (
    Histogram,
    RequestState,
    Statistics,
    StepOutputs,
)
from quire.protocol.wire.timeline import TimelineEvent
from quire.scheduler_proc.core.request_table import RequestTable
from quire.scheduler_proc.kv.block_pool import BlockPool
from quire.scheduler_proc.kv.manager import KVCacheManager
from quire.scheduler_proc.requests.reasons import RESERVED_REASONS, RUNNING_REASON, Decision, PreemptReason, WaitReason
from quire.scheduler_proc.requests.request import Request

MAX_LISTED = 200
"""Most requests in one answer, the oldest ones."""


class Counters:
    """Totals since start, with the field names of the Statistics message."""

    def __init__(self, num_speculative_tokens: int) -> None:
        self.num_preemptions = 0
        self.prefix_cache_queries = 0
        self.prefix_cache_hit_tokens = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.dropped_tokens = 0
        self.refused_messages = 0
        self.num_requests_refused = 0
        self.num_stray_messages = 0
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.num_worker_restarts = 0

        self.num_accepted_tokens_per_pos = [0] * num_speculative_tokens
        self.steps_by_size: defaultdict[int, int] = defaultdict(int)
        """Number of steps by their number of tokens: one cheap operation per step."""

    @property
    def num_steps(self) -> int:
        return sum(self.steps_by_size.values())

    @property
    def step_tokens(self) -> Histogram:
        """The number of tokens of each step."""
        bounds = [2**i for i in range(15)]
        counts = [0] * (len(bounds) + 1)
        for size, count in self.steps_by_size.items():
            counts[bisect_left(bounds, size)] += count
        total = sum(size * count for size, count in self.steps_by_size.items())
        return Histogram([float(bound) for bound in bounds], counts, float(total))

    def as_dict(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if isinstance(value, int)}


class RecentDecisions:
    """The newest decisions with their reasons, and the number of preemptions and choices by reason since start.

    ``now``: the time of what happens, for timelines only.
    """

    def __init__(self, max_kept: int = 4096) -> None:
        self._decisions: deque[Decision] = deque(maxlen=max_kept)
        self.preemptions: Counter[str] = Counter({str(reason): 0 for reason in PreemptReason})
        self.load_choices = Counter({"load": 0, "compute": 0, "split": 0})
        self.now = 0.0
        self._events: list[tuple[int, StepOutputs]] = []

    def note(self, decision: Decision) -> None:
        self._decisions.append(decision)
        if decision.kind == "preempt":
            self.preemptions[decision.reason] += 1
        elif decision.kind == "choose" or decision.reason == WaitReason.LOADING:
            self.load_choices["load" if decision.kind == "wait" else decision.reason] += 1

    def preempted(self, step: int, request: Request, reason: PreemptReason, beneficiary: str = "") -> None:
        """Note that a request is about to be preempted."""
        lost = request.num_computed_tokens
        self.note(Decision(step, "preempt", request.request_id, reason, beneficiary, num_tokens=lost))
        self.follow(request, "preempted", reason, lost)

    def follow(self, request: Request, event: str, reason: str = "", num_tokens: int = 0) -> None:
        """Keep an event for the client of a request, if it has asked for them."""
        if request.sampling.return_timeline:
            entry = request.request_id, TimelineEvent(event, self.now, reason, num_tokens)
            self._events.append((request.client, StepOutputs([], None, None, [], timeline=[entry])))

    def take_events(self) -> list[tuple[int, StepOutputs]]:
        """Return and clear the (client, message) pairs of events. They are to be sent before tokens and endings."""
        taken, self._events = self._events, []
        return taken

    def take(self) -> list[Decision]:
        """Return and clear the decisions since the last call; only the newest ``max_kept`` are kept."""
        taken = list(self._decisions)
        self._decisions.clear()
        return taken


def make_statistics(
    table: RequestTable,
    pool: BlockPool,
    decisions: RecentDecisions,
    counters: Counters,
    query: int,
    done: bool,
    is_paused: bool,
) -> Statistics:
    """Return the reply to a Control message. ``query``: its number; ``done``: whether the command was executed."""
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


def list_requests(
    table: RequestTable, kv: KVCacheManager, describe: Callable[[Request], dict[str, Any]], *, is_paused: bool
) -> list[RequestState]:
    """Return the oldest requests. O(requests). ``describe``: the fields of a request that features have."""
    return [
        _request_state(table, kv, each, is_paused, describe(each))
        for each in islice(table.requests.values(), MAX_LISTED)
    ]


def _request_state(
    table: RequestTable, kv: KVCacheManager, request: Request, is_paused: bool, fields: dict[str, Any]
) -> RequestState:
    handle, reason = request.handle, ""
    if handle in table.running:
        state, reason = "running", "" if table.can_run(request) else str(RUNNING_REASON)
    elif handle in table.leaving:
        state = "leaving"
    elif handle in table.skipped_waiting:
        state, reason = "held", str(request.wait_reason)
    else:
        state, reason = "waiting", _queue_reason(table, is_paused)
    return RequestState(
        request_id=request.request_id,
        state=state,
        reason=reason,
        arrival=request.arrival,
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=request.num_output_tokens,
        num_blocks=kv.num_held_blocks(request),
        num_preemptions=request.num_preemptions,
        **fields,
    )


def _queue_reason(table: RequestTable, is_paused: bool) -> str:
    """Return why the queue's first request waits; those behind it wait for the same reason."""
    return str(WaitReason.PAUSED if is_paused else table.waiting.peek_request().wait_reason)
