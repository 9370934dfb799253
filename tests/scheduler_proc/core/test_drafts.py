"""Draft tokens: rejected ones are subtracted from the progress, and no stream depends on drafts."""

from typing import Any

import numpy as np
import pytest
from scheduler_driver import Driver, change, end_of, expected_tokens
from tiers import thinned

from quire.protocol.errors import ConfigError
from quire.protocol.wire.front_end_messages import EndReason
from quire.protocol.wire.worker_messages import ModelRunnerOutput, SchedulerOutput
from quire.scheduler_proc.scheduler import WorkerFault

BOTH = pytest.mark.parametrize("asynchronous", [False, True])
PROMPT = [3, 1, 4, 1, 5]


def drafting(asynchronous: bool, quality: float = 1.0, **settings: Any) -> Driver:
    """An engine with up to three drafts. ``quality``: probability that a draft is accepted."""
    driver = Driver(**{"async_scheduling": asynchronous, "num_speculative_tokens": 3} | settings)
    driver.worker.draft_quality = quality
    return driver


def always(driver: Driver, count: int) -> None:
    """Make the proposer find ``count`` drafts in each step, or as many as were requested if fewer."""
    driver.worker.draft_rng.randint = lambda low, high: min(count, high)  # type: ignore[method-assign]


def tokens_and_drafts(diffs: list[SchedulerOutput]) -> list[tuple[int, int]]:
    """Return (tokens, drafts) of handle 0 in each step."""
    return [(dict(d.counts).get(0, 1), dict(d.drafts).get(0, 0)) for d in diffs]


def test_accepted_drafts_save_steps_and_arrive_in_one_message() -> None:
    driver = drafting(False)
    always(driver, 3)
    driver.add("a", PROMPT, max_tokens=9)
    driver.schedule()
    driver.answer()
    driver.schedule()
    driver.execute()
    result = driver.deliver()
    assert result is not None and result.counts is not None and result.counts.tolist() == [4]
    ((_, message),) = driver.messages
    assert message.handles.tolist() == [0] and message.counts.tolist() == [4] and len(message.tokens) == 4
    driver.finish()
    assert tokens_and_drafts(driver.diffs) == [(5, 0), (4, 3), (4, 3)]


@BOTH
def test_no_drafts_beyond_the_length_limit(asynchronous: bool) -> None:
    driver = drafting(asynchronous)
    always(driver, 3)
    driver.add("a", PROMPT, max_tokens=7)
    driver.finish()
    assert [d for _, d in tokens_and_drafts(driver.diffs)] == [0, 3, 1], "the last token needs no draft"
    assert len(driver.answers["a"].tokens) == 7


def test_drafts_use_only_the_remaining_budget() -> None:
    driver = drafting(False, max_num_seqs=2, max_num_batched_tokens=8)
    always(driver, 3)
    for name in "ab":
        driver.add(name, [ord(name)], max_tokens=30)
    driver.step()
    driver.scheduler.config = change(driver.config, max_num_batched_tokens=6)
    diff = driver.schedule()
    assert diff is not None and diff.drafts == [(0, 3), (1, 1)] and diff.counts == [(0, 4), (1, 2)]
    driver.answer()
    driver.finish()


@pytest.mark.parametrize(("budget", "drafts"), [(5, [(0, 2)]), (4, [(0, 1)]), (3, [])])
def test_no_request_loses_its_token_to_drafts_of_another(budget: int, drafts: list[tuple[int, int]]) -> None:
    driver = drafting(False, max_num_seqs=3, max_num_batched_tokens=12)
    for name in "abc":
        driver.add(name, [ord(name)], max_tokens=30)
    driver.step()
    driver.scheduler.config = change(driver.config, max_num_batched_tokens=budget)
    diff = driver.schedule()
    assert diff is not None and diff.drafts == drafts and not diff.parked
    driver.answer()
    driver.finish()


def test_drafts_preempt_no_request() -> None:
    """7 usable blocks: a fills 2 blocks, b fills 4. A draft of b needs a fifth block, the next token of a a third."""
    driver = drafting(False, num_blocks=8)
    driver.add("a", list(range(8)), max_tokens=3)
    driver.add("b", list(range(50, 65)), max_tokens=3)
    driver.step()
    diff = driver.schedule()
    assert diff is not None and diff.drafts == [(0, 1)], "b has one position left, and a got the last block"
    driver.finish()
    assert driver.scheduler.statistics().num_preemptions == 0


@BOTH
def test_worker_without_drafts_computes_one_token(asynchronous: bool) -> None:
    driver = drafting(asynchronous)
    always(driver, 0)
    driver.add("a", PROMPT, max_tokens=7)
    driver.finish()
    assert sum(d for _, d in tokens_and_drafts(driver.diffs)) > 3, "drafts are scheduled up to the length limit"
    assert driver.answers["a"].tokens == expected_tokens(PROMPT, 7)
    statistics = driver.scheduler.statistics()
    assert (statistics.num_draft_tokens, statistics.num_accepted_tokens) == (0, 0)


@BOTH
@pytest.mark.parametrize("there", [1, 2])
def test_missing_drafts_are_subtracted(asynchronous: bool, there: int) -> None:
    driver = drafting(asynchronous)
    always(driver, there)
    driver.add("a", PROMPT, max_tokens=30)
    driver.finish()
    assert driver.answers["a"].tokens == expected_tokens(PROMPT, 30)
    statistics = driver.scheduler.statistics()
    assert statistics.num_draft_tokens == statistics.num_accepted_tokens > 0


def test_rejected_drafts_are_subtracted() -> None:
    driver = drafting(False, quality=0.0)
    always(driver, 3)
    driver.add("a", PROMPT, max_tokens=30)
    driver.step()
    driver.schedule()
    request = driver.request("a")
    assert (request.num_computed_tokens, request.num_output_placeholders, request.num_drafts_in_flight) == (9, 4, 3)
    driver.answer()
    assert (request.num_computed_tokens, request.num_output_placeholders, request.num_drafts_in_flight) == (6, 0, 0)
    assert request.num_acknowledged_tokens == 6 and request.num_tokens == 7
    driver.finish()


def test_scheduled_count_is_an_upper_bound_of_the_workers() -> None:
    driver = drafting(True, quality=0.0)
    driver.add("a", PROMPT, max_tokens=30)
    driver.schedule()
    driver.schedule()
    request = driver.request("a")
    assert (request.num_computed_tokens, request.num_output_placeholders) == (9, 5)
    for _ in range(6):
        driver.answer()
        driver.schedule()
        assert request.num_tokens + request.num_output_placeholders - request.num_computed_tokens == 1
        assert driver.worker.rows[0].num_computed <= request.num_computed_tokens
    driver.finish()
    assert driver.answers["a"].tokens == expected_tokens(PROMPT, 30)


@BOTH
def test_stop_token_among_accepted_drafts_drops_later_tokens(asynchronous: bool) -> None:
    """The third token ends the request; the worker has accepted two more in the same step."""
    want = expected_tokens(PROMPT, 9)
    driver = drafting(asynchronous)
    always(driver, 3)
    driver.add("a", PROMPT, max_tokens=30, stop_token_ids=[want[2]])
    driver.add("b", [9], max_tokens=30)
    driver.finish()
    assert end_of(driver, "a") == (EndReason.STOPPED, want[:3])
    ended = driver.answers["a"].ended
    assert ended is not None and (ended.num_output_tokens, ended.stop_reason) == (3, want[2])
    assert driver.answers["b"].tokens == expected_tokens([9], 30)
    statistics = driver.scheduler.statistics()
    assert statistics.generation_tokens == 3 + 30


def test_request_that_drafts_may_complete_waits_for_the_result() -> None:
    """4 placeholders in flight reach the length limit: the request is parked until their result is known."""
    driver = drafting(True, quality=0.0)
    driver.add("a", PROMPT, max_tokens=5)
    driver.add("b", [9], max_tokens=40)
    driver.schedule()
    driver.schedule()
    driver.answer()
    diff = driver.schedule()
    assert diff is not None and diff.parked == [0] and not diff.removed
    driver.finish()
    assert [h for d in driver.diffs for h in d.unparked].count(0) > 0
    assert driver.answers["a"].tokens == expected_tokens(PROMPT, 5)


def test_token_budget_must_have_room_for_all_drafts() -> None:
    drafting(False, max_num_seqs=8, max_num_batched_tokens=32)
    with pytest.raises(ConfigError, match=r"at least max_num_seqs \* \(1 \+ num_speculative_tokens\) = 32 \(got 31\)"):
        drafting(False, max_num_seqs=8, max_num_batched_tokens=31)


def test_no_steady_decode_with_drafts() -> None:
    driver = drafting(True)
    driver.add("a", PROMPT, max_tokens=20)
    driver.finish()
    assert driver.num_steady == 0


@BOTH
def test_blocks_of_accepted_drafts_are_cached(asynchronous: bool) -> None:
    driver = drafting(asynchronous, quality=0.5)
    driver.add("a", PROMPT, max_tokens=20)
    driver.run()
    longer = [*PROMPT, *driver.answers["a"].tokens]
    driver.add("b", longer, max_tokens=3)
    driver.finish()
    assert driver.answers["b"].num_cached_tokens >= 20
    assert driver.answers["b"].tokens == expected_tokens(longer, 3)


@pytest.mark.parametrize(
    "damage",
    [
        lambda r: change(r, counts=np.array([5], np.int32), tokens=np.arange(5, dtype=np.int32)),  # of 3 drafts
        lambda r: change(r, counts=np.array([0], np.int32), tokens=None),
        lambda r: change(r, counts=np.array([2], np.int32)),
        lambda r: change(r, counts=np.array([1, 1], np.int32)),
        lambda r: change(r, drafts=np.array([-1], np.int32)),
        lambda r: change(r, drafts=np.array([1, 1], np.int32)),
        lambda r: change(r, drafts=np.array([4], np.int32)),  # 3 were requested
        lambda r: change(r, drafts=np.array([1], np.int32)),  # 3 were accepted
        lambda r: change(r, drafts=None),
    ],
)
def test_refuses_results_with_invalid_drafts(damage: Any) -> None:
    driver = drafting(False)
    always(driver, 3)
    driver.add("a", PROMPT, max_tokens=20)
    driver.step()
    driver.schedule()
    driver.execute()
    assert driver.deliver_damaged(damage)
    driver.finish()
    assert driver.answers["a"].tokens == expected_tokens(PROMPT, 20)


def test_refuses_several_tokens_without_drafts() -> None:
    driver = Driver()
    driver.add("a", PROMPT, max_tokens=20)
    driver.schedule()
    several = ModelRunnerOutput(1, np.array([1, 2], np.int32), np.array([0], np.int32), np.array([2], np.int32))
    with pytest.raises(WorkerFault, match="tokens, expected 1 to"):
        driver.scheduler.consume(several)
    with pytest.raises(WorkerFault, match="drafts, more than the"):
        driver.scheduler.consume(change(several, drafts=np.array([1], np.int32)))


def adaptive(quality: float, asynchronous: bool) -> Driver:
    """A finished run of one request with 380 tokens, whose drafts cost almost nothing."""
    driver = drafting(asynchronous, quality, adaptive=True, max_model_len=400, num_blocks=120)
    driver.worker.step_seconds = lambda tokens, drafts: 1.0 + 0.001 * tokens
    always(driver, 3)
    driver.add("a", PROMPT, max_tokens=380)
    driver.finish()
    assert driver.answers["a"].tokens == expected_tokens(PROMPT, 380)
    return driver


@pytest.mark.parametrize("asynchronous", thinned([True, False], keep=1))
def test_rejected_drafts_stop_and_the_request_joins_steady_decode(asynchronous: bool) -> None:
    driver = adaptive(0.0, asynchronous)
    drafts = [number for _, number in tokens_and_drafts(driver.diffs)]
    assert sum(drafts[:34]) > 20 and sum(drafts[34:]) <= 5, "only probes remain, at increasing intervals"
    assert driver.num_steady > 300


@pytest.mark.parametrize("asynchronous", thinned([True, False], keep=1))
def test_accepted_drafts_stay_at_the_maximum(asynchronous: bool) -> None:
    driver = adaptive(1.0, asynchronous)
    drafts = [number for _, number in tokens_and_drafts(driver.diffs)]
    assert sum(number == 3 for number in drafts) > 0.9 * len(drafts) and driver.num_steady == 0
