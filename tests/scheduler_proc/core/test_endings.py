"""Every request ends exactly once, at the correct token, from every state, and leaves nothing behind."""

from collections.abc import Callable

import pytest
from scheduler_driver import VOCAB_SIZE, Driver, end_of, expected_tokens

from quire.protocol.wire.front_end_messages import EndReason

PROMPT = [3, 1, 4, 1, 5]
BOTH = pytest.mark.parametrize("asynchronous", [False, True])


def one(asynchronous: bool, **extra: object) -> Driver:
    driver = Driver(async_scheduling=asynchronous)
    driver.add("a", PROMPT, **{"max_tokens": 6} | extra)
    return driver


@BOTH
@pytest.mark.parametrize("max_tokens", [1, 2, 6])
def test_max_tokens_is_exact(asynchronous: bool, max_tokens: int) -> None:
    driver = one(asynchronous, max_tokens=max_tokens)
    driver.finish()
    assert end_of(driver, "a") == (EndReason.LENGTH, expected_tokens(PROMPT, max_tokens))
    assert driver.answers["a"].ended.num_output_tokens == max_tokens
    assert driver.scheduler.statistics().dropped_tokens == 0
    assert len(driver.diffs) == max_tokens, "a length limit is known ahead, so no step is wasted"


@BOTH
def test_context_length_is_a_limit(asynchronous: bool) -> None:
    driver = Driver(async_scheduling=asynchronous, max_model_len=9)
    driver.add("a", PROMPT, max_tokens=None)
    driver.finish()
    assert end_of(driver, "a") == (EndReason.LENGTH, expected_tokens(PROMPT, 4))


def test_request_at_its_length_is_removed_one_step_ahead() -> None:
    driver = Driver(async_scheduling=True)
    driver.add("a", PROMPT, max_tokens=2)
    driver.add("b", PROMPT, max_tokens=9)
    driver.schedule()
    driver.schedule()
    driver.answer()
    # The last token is in flight: removed from the workers, not yet ended, and its blocks are still held.
    diff = driver.schedule()
    assert diff is not None and diff.removed == [0]
    assert driver.answers["a"].ended is None and 0 in driver.scheduler.table.leaving
    assert len(driver.scheduler.kv.block_ids(driver.request("a"))[0])
    driver.finish()
    assert driver.answers["a"].tokens == expected_tokens(PROMPT, 2)


@BOTH
def test_stop_token_ends_the_request_and_is_reported(asynchronous: bool) -> None:
    want = expected_tokens(PROMPT, 6)
    driver = one(asynchronous, max_tokens=30, stop_token_ids=[want[2], 999])
    driver.finish()
    assert end_of(driver, "a") == (EndReason.STOPPED, want[:3])
    assert driver.answers["a"].ended.stop_reason == want[2]


@BOTH
def test_eos_ends_the_request_unless_ignored(asynchronous: bool) -> None:
    want = expected_tokens(PROMPT, 6)
    driver = Driver(async_scheduling=asynchronous, eos=[want[1]])
    driver.add("a", PROMPT, max_tokens=6)
    driver.add("b", PROMPT, max_tokens=6, ignore_eos=True)
    driver.finish()
    assert end_of(driver, "a") == (EndReason.STOPPED, want[:2])
    assert driver.answers["a"].ended.stop_reason is None
    assert end_of(driver, "b") == (EndReason.LENGTH, want)


@BOTH
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize(("min_tokens", "end"), [(0, 3), (2, 3), (3, 6), (5, 6), (6, 12)])
def test_no_stop_token_among_the_first_min_tokens(asynchronous: bool, drafts: int, min_tokens: int, end: int) -> None:
    """The workers ban stop tokens until then; if one is sampled nevertheless, it does not end the request."""
    want = expected_tokens(PROMPT, 12)
    driver = Driver(async_scheduling=asynchronous, num_speculative_tokens=drafts, eos=[want[5]])
    driver.add("a", PROMPT, max_tokens=12, min_tokens=min_tokens, stop_token_ids=[want[2]])
    driver.finish()
    assert end_of(driver, "a") == (EndReason.LENGTH if end == 12 else EndReason.STOPPED, want[:end])


def test_surplus_token_after_a_stop_token_is_dropped_and_counted() -> None:
    for asynchronous, surplus in ((False, 0), (True, 1)):
        want = expected_tokens(PROMPT, 3)
        driver = one(asynchronous, max_tokens=30, stop_token_ids=[want[2]])
        driver.finish()
        statistics = driver.scheduler.statistics()
        assert (statistics.dropped_tokens, statistics.generation_tokens) == (surplus, 3)
        assert len(driver.diffs) == 3 + surplus


def test_stop_token_at_the_length_limit_is_a_stop() -> None:
    want = expected_tokens(PROMPT, 3)
    driver = one(True, max_tokens=3, stop_token_ids=[want[2]])
    driver.finish()
    assert end_of(driver, "a") == (EndReason.STOPPED, want)


@BOTH
@pytest.mark.parametrize("given", [0, 1, 2])
def test_front_end_stop_counts_the_given_tokens(asynchronous: bool, given: int) -> None:
    driver = one(asynchronous, max_tokens=30)
    driver.step(4)
    assert len(driver.answers["a"].tokens) >= 3
    driver.stop("a", given)
    assert driver.answers["a"].reason is EndReason.STOPPED
    assert driver.answers["a"].ended.num_output_tokens == given
    assert driver.scheduler.statistics().generation_tokens == given
    driver.finish()


@pytest.mark.parametrize(("given", "counted"), [(99, 2), (-5, 0)])
def test_front_end_stop_count_is_clamped(given: int, counted: int) -> None:
    driver = one(False)
    driver.step(2)
    driver.stop("a", given)
    assert driver.answers["a"].ended.num_output_tokens == counted
    assert driver.scheduler.statistics().generation_tokens == counted


def aborted_waiting(driver: Driver) -> None:
    assert driver.scheduler.table.waiting


def aborted_in_prefill(driver: Driver) -> None:
    driver.schedule()
    driver.answer()
    assert 0 < driver.request("a").num_computed_tokens < len(PROMPT)


def aborted_with_prefill_in_flight(driver: Driver) -> None:
    driver.schedule()
    assert driver.request("a").num_in_flight == 1


def aborted_decoding(driver: Driver) -> None:
    driver.step(5)
    assert driver.answers["a"].tokens


def aborted_with_all_steps_in_flight(driver: Driver) -> None:
    aborted_decoding(driver)
    driver.fill()
    assert driver.request("a").num_in_flight == driver.config.pipeline_depth


def aborted_after_execution(driver: Driver) -> None:
    aborted_with_all_steps_in_flight(driver)
    driver.execute()


def aborted_leaving(driver: Driver) -> None:
    for _ in range(60):
        if not driver.scheduler.table.leaving and driver.schedule() is None and not driver.scheduler.table.leaving:
            driver.answer()
    assert driver.scheduler.table.leaving
    assert driver.answers["a"].ended is None


MOMENTS: list[Callable[[Driver], None]] = [
    aborted_waiting,
    aborted_in_prefill,
    aborted_with_prefill_in_flight,
    aborted_decoding,
    aborted_with_all_steps_in_flight,
    aborted_after_execution,
    aborted_leaving,
]


@pytest.mark.parametrize("moment", MOMENTS)
def test_abort_in_every_state(moment: Callable[[Driver], None]) -> None:
    driver = Driver(async_scheduling=True, max_num_batched_tokens=3, max_num_seqs=2)
    driver.add("a", PROMPT, max_tokens=8)
    moment(driver)
    received = list(driver.answers["a"].tokens)
    driver.abort("a")
    assert end_of(driver, "a") == (EndReason.ABORTED, received)
    assert driver.scheduler.kv.pool.num_free_blocks == 32, "its blocks are free immediately"
    driver.add("b", [9, 9], max_tokens=4)
    driver.finish()
    assert end_of(driver, "a") == (EndReason.ABORTED, received)
    assert driver.answers["b"].tokens == expected_tokens([9, 9], 4)


def test_abort_while_preempted_with_a_result_in_flight() -> None:
    driver = Driver(num_blocks=7, async_scheduling=True, enable_prefix_caching=False)
    driver.add("old", PROMPT, max_tokens=15)
    driver.add("a", [7, 7, 7, 7, 7], max_tokens=15)
    for _ in range(60):
        if not driver.request("a").num_preemptions and driver.schedule() is None:
            driver.answer()
    assert driver.request("a").num_in_flight
    driver.abort("a")
    driver.finish()
    assert driver.answers["a"].reason is EndReason.ABORTED
    assert driver.answers["old"].tokens == expected_tokens(PROMPT, 15)


def test_token_of_an_aborted_request_is_dropped_and_counted() -> None:
    driver = one(True)
    driver.schedule()
    driver.schedule()
    driver.abort("a")
    driver.finish()
    assert driver.answers["a"].tokens == [] and driver.scheduler.statistics().dropped_tokens == 2


def test_handle_is_reused_only_after_its_removal_is_acknowledged() -> None:
    driver = Driver(async_scheduling=True)
    driver.add("keep", [1, 2], max_tokens=30)
    driver.add("a", PROMPT, max_tokens=30)
    driver.schedule()
    driver.schedule()
    driver.abort("a")
    driver.add("b", [1], max_tokens=2)
    assert driver.request("b").handle == 2
    driver.answer()
    removal = driver.schedule()
    assert removal is not None and removal.removed == [1]
    driver.add("c", [1], max_tokens=2)
    assert driver.request("c").handle == 3
    while driver.scheduler.in_flight:
        driver.answer()
    driver.add("d", [1], max_tokens=2)
    assert driver.request("d").handle == 1
    driver.finish()


def test_bad_row_ends_only_its_request() -> None:
    driver = Driver(async_scheduling=True)
    for name in ("a", "b"):
        driver.add(name, [*PROMPT, ord(name)], max_tokens=8)
    driver.worker.bad_from["a"] = 3
    driver.finish()
    assert end_of(driver, "a") == (EndReason.ERROR, expected_tokens([*PROMPT, ord("a")], 3))
    assert driver.answers["a"].ended.detail.startswith("numerical_error: ")
    assert end_of(driver, "b") == (EndReason.LENGTH, expected_tokens([*PROMPT, ord("b")], 8))


@pytest.mark.parametrize("reader_is_bad_too", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_reader_of_a_bad_rows_blocks_recomputes_them(asynchronous: bool, reader_is_bad_too: bool) -> None:
    driver = Driver(async_scheduling=asynchronous)
    prompt = [*range(3, 40)]
    driver.add("writer", prompt, max_tokens=30)
    driver.add("stranger", [99, *prompt], max_tokens=30)
    driver.step(3)
    driver.add("reader", prompt, max_tokens=12)
    driver.worker.bad_from["writer"] = 9
    driver.step(4)
    assert driver.request("reader").num_cached_tokens > 0
    if reader_is_bad_too:
        now = driver.request("writer").num_output_tokens - driver.request("reader").num_output_tokens
        driver.worker.bad_once.add(("reader", 10 - now))
    driver.finish()
    assert end_of(driver, "writer") == (EndReason.ERROR, expected_tokens(prompt, 9))
    assert end_of(driver, "reader") == (EndReason.LENGTH, expected_tokens(prompt, 12))
    assert end_of(driver, "stranger") == (EndReason.LENGTH, expected_tokens([99, *prompt], 30))
    assert driver.scheduler.statistics().preemptions_by_reason["bad_prefix"] == 1


def test_preempted_reader_recomputes_a_bad_rows_blocks() -> None:
    """After the preemption it is not known whether the reader wrote the blocks itself."""
    driver = Driver()
    prompt = [*range(3, 40)]
    driver.add("writer", prompt, max_tokens=30)
    driver.step()
    driver.add("reader", prompt, max_tokens=30)
    driver.step(2)
    driver.begin_worker_epoch()
    driver.worker.bad_from["writer"] = 9
    driver.finish()
    assert end_of(driver, "writer") == (EndReason.ERROR, expected_tokens(prompt, 9))
    assert end_of(driver, "reader") == (EndReason.LENGTH, expected_tokens(prompt, 30))
    assert driver.scheduler.statistics().preemptions_by_reason["bad_prefix"] == 1


def test_request_as_large_as_the_pool_ends_with_length() -> None:
    driver = Driver(num_blocks=5, async_scheduling=True)
    driver.add("a", PROMPT, max_tokens=100)
    driver.finish()
    # 4 blocks have 16 positions, and the last token needs none.
    assert end_of(driver, "a") == (EndReason.LENGTH, expected_tokens(PROMPT, 12))


@BOTH
def test_resubmission_continues_after_delivered_tokens(asynchronous: bool) -> None:
    want = expected_tokens(PROMPT, 6)
    driver = Driver(async_scheduling=asynchronous)
    driver.add("a", PROMPT, want[:2], max_tokens=6)
    driver.finish()
    assert end_of(driver, "a") == (EndReason.LENGTH, want[2:])
    assert driver.answers["a"].ended.num_output_tokens == 6


def test_request_id_can_be_reused_after_its_end() -> None:
    driver = one(False)
    driver.finish()
    driver.answers.clear()
    driver.add("a", PROMPT, max_tokens=2)
    driver.finish()
    assert driver.answers["a"].tokens == expected_tokens(PROMPT, 2)


def test_vocabulary_of_one_token() -> None:
    driver = Driver(vocab_size=1)
    driver.add("a", [0, 0], max_tokens=3)
    driver.finish()
    assert driver.answers["a"].tokens == [0, 0, 0] and VOCAB_SIZE > 1
