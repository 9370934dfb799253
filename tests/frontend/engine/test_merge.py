"""The statistics of several engines as those of one."""

from quire.frontend.engine.merge import MAX_REQUESTS, merge_statistics
from quire.protocol.wire.front_end_messages import (
    AdapterCounts,
    Histogram,
    ProgramCounts,
    RequestState,
    Statistics,
    TenantState,
    TierState,
)


def test_counts_are_added_and_sizes_are_not() -> None:
    one = Statistics(
        1,
        num_running=2,
        block_size=16,
        waiting_by_reason={"queued": 1},
        step_tokens=Histogram([1.0, 2.0], [1, 2, 3], 9.0),
        tiers=[TierState("host", 8, 4, is_stopped=True)],
        adapters=[AdapterCounts("sql", "active", 1, 0), AdapterCounts("sql", "host", 5, 0)],
        programs=ProgramCounts(3, {"new": 3}),
        pin_seconds={"bash": 2.0},
        tenants=[TenantState(1, 1, 0, 4)],
        tenant_service=[(1, 100), (2, 5)],
    )
    other = Statistics(
        1,
        done=False,
        num_running=3,
        block_size=16,
        waiting_by_reason={"queued": 2, "kv_blocks": 1},
        step_tokens=Histogram([1.0, 2.0], [1, 1, 1], 1.0),
        tiers=[TierState("host", 8, 1), TierState("disk", 4, 0)],
        adapters=[AdapterCounts("sql", "active", 2, 1)],
        programs=ProgramCounts(1, {"new": 1, "prefix": 2}),
        pin_seconds={"bash": 1.0, "none": 3.0},
        tenants=[TenantState(1, 0, 2, 1), TenantState(2, 1, 0, 1)],
        tenant_service=[(1, 1)],
    )
    both = merge_statistics([one, other])
    assert (both.num_running, both.block_size, both.done) == (5, 16, False)
    assert both.waiting_by_reason == {"queued": 3, "kv_blocks": 1}
    assert both.step_tokens == Histogram([1.0, 2.0], [2, 3, 4], 10.0)
    assert both.tiers == [TierState("host", 16, 5, is_stopped=True), TierState("disk", 4, 0)]
    assert both.adapters == [AdapterCounts("sql", "active", 3, 1), AdapterCounts("sql", "host", 5, 0)]
    assert both.programs == ProgramCounts(4, {"new": 4, "prefix": 2})
    assert both.pin_seconds == {"bash": 2.0, "none": 3.0}
    assert both.tenants == [TenantState(1, 1, 2, 5), TenantState(2, 1, 0, 1)]
    assert both.tenant_service == [(1, 101), (2, 5)]


def test_the_oldest_requests_are_kept() -> None:
    def of(engine: int) -> Statistics:
        times = range(engine, 2 * MAX_REQUESTS, 2)
        return Statistics(1, requests=[RequestState(f"r{t}", 0, "running", "", float(t), 1, 1, 1, 0) for t in times])

    merged = merge_statistics([of(0), of(1)])
    assert [request.request_id for request in merged.requests] == [f"r{t}" for t in range(MAX_REQUESTS)]


def test_one_engine_is_itself() -> None:
    alone = Statistics(3, num_running=1)
    assert merge_statistics([alone]) is alone
