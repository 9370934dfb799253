"""Load, compute or both: what a request does with the part of its prefix that host memory has."""

from itertools import product

import msgspec
import pytest
from lines_in_memory import numbered
from load_choices import FOUND, FRONT, PROMPT, compute_front, engine_with_prefix, learned, split
from scheduler_driver import Driver, expected_tokens
from tiers import thinned

from quire.protocol.model.kv_layout import KVGroup, KVLayout
from quire.protocol.wire.transfer_messages import BlocksMoved
from quire.replay.recorded.exact import replay_lines
from quire.scheduler_proc.costs.choice import LOAD_LIMIT_S
from quire.scheduler_proc.costs.costs import FULL_PAGES, PROBE_INTERVAL, CostState
from quire.scheduler_proc.features.transfers import SPLIT_AT
from quire.scheduler_proc.requests.events import LoadLate
from quire.scheduler_proc.requests.reasons import WaitReason
from quire.scheduler_proc.trace.lines import PrefixCacheEvent, StepSnapshot

WINDOW = KVLayout([KVGroup("sliding_window", 4, [0, 1], 30)], num_kv_heads=1, head_dim=4, dtype="float32")


def choices(engine: Driver) -> dict[str, int]:
    return {kind: count for kind, count in engine.scheduler.statistics().load_choices.items() if count}


def complete(engine: Driver, request_id: str = "again") -> None:
    engine.finish()
    engine.settle()
    engine.check_drained()
    assert engine.answers[request_id].tokens == expected_tokens(PROMPT, 4)
    assert engine.replay_lines() is None


@pytest.mark.parametrize(
    ("per_page", "kind", "admissions"),
    [
        (1e-5, "load", [("load", True, 0, FOUND, 0.00126)]),
        (4e-3, "split", [("split", True, 0, 0, 0.1), ("split", True, FRONT, FOUND - FRONT, 0.1)]),
        (1.0, "compute", [("compute", False, 0, 0, 25.0)]),
    ],
)
def test_the_faster_way_is_chosen(
    per_page: float, kind: str, admissions: list[tuple[str, bool, int, int, float]]
) -> None:
    engine = engine_with_prefix(per_page)
    engine.add("again", PROMPT, max_tokens=4, job_id="job")
    complete(engine)
    assert choices(engine) == {kind: 1}
    cached = engine.answers["again"].num_cached_tokens
    assert cached == {"load": FOUND, "split": FOUND - FRONT, "compute": 0}[kind], "the rest was computed"
    decided = [d for d in engine.scheduler.decisions.take() if d.kind == "choose" or d.reason == WaitReason.LOADING]
    expected = {
        "load": ["100 tokens from host; loading would take 0.0013 s, computing 0.1 s"],
        "split": ["loading would take 0.1 s, computing 0.1 s"],
        "compute": ["loading would take 25 s, computing 0.1 s"],
    }
    assert [d.detail for d in decided] == expected[kind]
    check_trace(engine, admissions)


def check_trace(engine: Driver, admissions: list[tuple[str, bool, int, int, float]]) -> None:
    """The trace says what was loaded for each admission, and why."""
    lines = engine.lines()
    hits = [line for line in lines if isinstance(line, PrefixCacheEvent) and line.req_id == "again"]
    found = [
        (hit.load_choice, hit.load_kv_async, hit.local_hit_tokens, hit.external_hit_tokens, hit.load_seconds)
        for hit in hits
    ]
    assert [(*parts, pytest.approx(seconds, rel=0.1)) for *parts, seconds in admissions] == found
    assert {(hit.job_id, hit.connector_name) for hit in hits} == {("job", "host")} and hits[0].compute_seconds > 0
    snapshots = [line for line in lines if isinstance(line, StepSnapshot)]
    free, total, cached = snapshots[-1].tiers["host"]
    assert (total, len(snapshots[-1].tiers)) == (128, 1) and 0 < free <= total and 0 < cached <= total


@pytest.mark.full
def test_traces_before_version_3_have_both_parts_of_a_hit_in_one_number() -> None:
    engine = engine_with_prefix(1e-5)
    engine.add("again", PROMPT, max_tokens=4)
    complete(engine)
    header, *lines = engine.lines()
    at = next(i for i, line in enumerate(lines) if isinstance(line, PrefixCacheEvent) and line.external_hit_tokens)
    old = PrefixCacheEvent(
        step=lines[at].step,
        req_id="again",
        local_hit_tokens=FOUND,
        total_prompt_tokens=len(PROMPT),
        num_tokens=len(PROMPT),
    )
    for version, is_equal in ((2, True), (3, False)):
        first = msgspec.structs.replace(header, version=version, crc=None)
        difference = replay_lines(numbered([first, *lines[:at], old, *lines[at + 1 :]]))
        assert (difference is None) == is_equal, difference


def test_nothing_is_split_if_the_blocks_of_a_prefix_depend_on_each_other() -> None:
    engine = engine_with_prefix(4e-3, layout=WINDOW)
    engine.add("again", PROMPT, max_tokens=4)
    complete(engine)
    assert "split" not in choices(engine)


def load_limit(engine: Driver) -> float:
    """Return the limit of the load that was decided."""
    engine.execute()
    (load,) = [move for move in engine.worker.host.pending if move.is_load]
    return engine.scheduler.transfers.load_limit(load.transfer)


def test_a_load_is_late_when_computing_would_have_ended() -> None:
    engine = engine_with_prefix(1e-5, costs=learned(1e-5, per_token=0.005))
    engine.add("again", PROMPT, max_tokens=4)
    engine.fill()
    assert load_limit(engine) == pytest.approx(0.5)
    complete(engine)
    unknown = engine_with_prefix(0.0, costs=CostState())
    unknown.add("again", PROMPT, max_tokens=4)
    unknown.fill()
    assert load_limit(unknown) == LOAD_LIMIT_S
    complete(unknown)


@pytest.mark.parametrize(("step_tokens", "num_probed"), [(16, FULL_PAGES), (512, 6)])
def test_a_slow_tier_is_probed_and_no_request_waits_for_it(step_tokens: int, num_probed: int) -> None:
    """Also if one step computes the whole prompt, whose hashes are then published, and few blocks are free."""
    slow = msgspec.structs.replace(learned(1.0), num_avoided=PROBE_INTERVAL - 1)
    engine = engine_with_prefix(1.0, costs=slow, max_num_batched_tokens=step_tokens)
    engine.worker.host.seconds = lambda pages: 1e-5 * pages
    engine.worker.step_seconds = lambda tokens, _: 0.001 * tokens
    engine.add("again", PROMPT, max_tokens=4)
    for _ in range(20):  # its copy does not run
        engine.schedule()
        engine.execute()
        engine.deliver()
    complete(engine)
    assert choices(engine) == {"compute": 1} and engine.answers["again"].num_cached_tokens == 0
    state = engine.scheduler.transfers.costs.state
    assert state.num_avoided == PROBE_INTERVAL and state.loads["host"] != slow.loads["host"]
    assert engine.scheduler.statistics().tiers[0].num_loaded == num_probed


# ---- a split


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_split_request_waits_for_its_load_and_no_longer(async_scheduling: bool) -> None:
    engine = split(async_scheduling=async_scheduling)
    compute_front(engine)
    for _ in range(4):
        engine.execute()
        engine.deliver()
    assert engine.request("again").wait_reason is WaitReason.LOADING
    engine.add("behind", [7, 8, 9], max_tokens=2)
    for _ in range(6):
        engine.schedule()
        engine.execute()
        engine.deliver()
    assert engine.answers["behind"].ended is not None, "no other request waits behind it"
    assert engine.request("again").wait_reason is WaitReason.LOADING
    complete(engine)
    assert engine.answers["again"].num_cached_tokens == FOUND - FRONT


def test_a_split_request_continues_behind_a_load_that_was_faster() -> None:
    engine = split()
    engine.execute()
    engine.move()
    while engine.deliver() is not None:
        pass
    assert SPLIT_AT.of(engine.request("again")) == FRONT
    complete(engine)
    assert engine.answers["again"].num_cached_tokens == FOUND - FRONT


ENDS = ["abort", "late", "failed", "new_epoch", "new_workers", "hold", "victim"]


@pytest.mark.parametrize(
    ("end", "when", "async_scheduling"),
    thinned(product(ENDS, ["sent", "received", "front", "answered"], [False, True]), keep=7),
)
def test_what_ends_a_split_leaves_nothing_behind(end: str, when: str, async_scheduling: bool) -> None:
    engine = split(async_scheduling=async_scheduling)
    if when == "received":
        engine.execute()
    elif when == "front":
        compute_front(engine)
    elif when == "answered":
        engine.execute()
        if end == "failed":
            engine.worker.host.pages.clear()
        engine.move()
        while not isinstance(engine.deliver(), BlocksMoved):
            pass
    match end:
        case "abort":
            engine.abort("again")
            engine.finish()
            engine.settle()
            engine.check_drained()
            assert engine.replay_lines() is None
            return
        case "late":
            for number in range(engine.scheduler.transfers._numbers.last + 1):
                engine.consume(LoadLate(number))
        case "failed":
            engine.worker.host.pages.clear()
        case "new_epoch":
            engine.begin_worker_epoch()
        case "new_workers":
            engine.restart_worker()
        case "hold":
            engine.hold("again")
            engine.settle()
            engine.release("again")
        case "victim":
            engine.add("large", [900] * 90, max_tokens=30, priority=-1)
    complete(engine)
