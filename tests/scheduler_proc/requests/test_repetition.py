"""Repetition detection ends a request, also after preemption and resubmission."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_driver import Driver, end_of, expected_tokens

from quire.protocol.request.structured_outputs import RepetitionDetection
from quire.protocol.wire.front_end_messages import EndReason
from quire.scheduler_proc.requests.repetition import RepetitionWatch

PROMPT = [3, 1, 4, 1, 5]
BOTH = pytest.mark.parametrize("asynchronous", [False, True])


def repeats(tokens: list[int], detection: RepetitionDetection) -> bool:
    """Whether ``tokens`` end with a repetition, by the definition."""
    for size in range(detection.min_pattern_size, detection.max_pattern_size + 1):
        length = size * detection.min_count
        if len(tokens) >= length and tokens[-length:] == tokens[-size:] * detection.min_count:
            return True
    return False


@pytest.mark.full
@given(
    tokens=st.lists(st.integers(0, 2), max_size=60),
    sizes=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    min_count=st.integers(2, 5),
    known=st.integers(0, 60),
)
@settings(deadline=None, max_examples=400)
def test_found_exactly_by_the_definition(tokens: list[int], sizes: tuple[int, int], min_count: int, known: int) -> None:
    detection = RepetitionDetection(min_pattern_size=min(sizes), max_pattern_size=max(sizes), min_count=min_count)
    watch = RepetitionWatch(detection, tokens[:known])
    assert watch.found == repeats(tokens[:known], detection)
    for end in range(known + 1, len(tokens) + 1):
        watch.add(tokens[end - 1])
        assert watch.found == repeats(tokens[:end], detection)


def repeating(driver: Driver, pattern: list[int], first: int, **extra: object) -> list[int]:
    """Add request a, whose output repeats ``pattern`` from token ``first`` on; return its unlimited output."""
    for index in range(first, 60):
        driver.worker.forced["a", index] = pattern[(index - first) % len(pattern)]
    driver.add("a", PROMPT, max_tokens=50, **extra)
    return [*expected_tokens(PROMPT, first), *pattern * 20]


@BOTH
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize(("pattern", "count"), [([7], 4), ([7, 8], 3), ([7, 8, 7, 9], 2)])
def test_output_keeps_the_repeated_tokens(asynchronous: bool, drafts: int, pattern: list[int], count: int) -> None:
    driver = Driver(async_scheduling=asynchronous, num_speculative_tokens=drafts)
    driver.worker.draft_quality = 0.9
    detection = RepetitionDetection(max_pattern_size=4, min_count=count)
    want = repeating(driver, pattern, 5, repetition_detection=detection)[: 5 + count * len(pattern)]
    driver.add("b", [9], max_tokens=40)
    driver.finish()
    assert end_of(driver, "a") == (EndReason.REPETITION, want)
    ended = driver.answers["a"].ended
    assert ended is not None and (ended.stop_reason, ended.num_output_tokens) == (None, len(want))
    assert driver.answers["b"].tokens == expected_tokens([9], 40)


def test_other_sizes_and_fewer_repetitions_do_not_count() -> None:
    driver = Driver()
    detection = RepetitionDetection(min_pattern_size=3, max_pattern_size=4, min_count=3)
    repeating(driver, [7, 8, 9, 6, 5], 2, repetition_detection=detection)
    driver.run()
    assert driver.answers["a"].reason is EndReason.LENGTH


def test_repetition_in_the_prompt_does_not_count() -> None:
    driver = Driver()
    driver.add("a", [7] * 20, max_tokens=5, repetition_detection=RepetitionDetection(max_pattern_size=1, min_count=3))
    driver.run()
    assert end_of(driver, "a") == (EndReason.LENGTH, expected_tokens([7] * 20, 5))


def test_not_before_min_tokens() -> None:
    driver = Driver()
    detection = RepetitionDetection(max_pattern_size=1, min_count=2)
    want = repeating(driver, [7], 1, repetition_detection=detection, min_tokens=9)
    driver.run()
    assert end_of(driver, "a") == (EndReason.REPETITION, want[:9])


def test_found_after_a_preemption() -> None:
    """The detector depends on the output tokens only, and a preempted request keeps them."""
    driver = Driver(num_blocks=7, async_scheduling=True, enable_prefix_caching=False)
    driver.add("old", [2, 7, 1, 8], max_tokens=15)
    want = repeating(driver, [7, 8], 6, repetition_detection=RepetitionDetection(max_pattern_size=2, min_count=4))
    driver.run()
    assert driver.scheduler.statistics().num_preemptions > 0
    assert end_of(driver, "a") == (EndReason.REPETITION, want[:14])


@pytest.mark.parametrize("delivered", range(5, 12))
def test_resubmission_continues_the_detection(delivered: int) -> None:
    driver = Driver()
    detection = RepetitionDetection(max_pattern_size=2, min_count=3)
    answer = [*expected_tokens(PROMPT, 5), *[7, 8] * 3]
    for index in range(5, 60):
        driver.worker.forced["a", index] = (7, 8)[(index - 5) % 2]
    driver.add("a", PROMPT, answer[:delivered], max_tokens=50, repetition_detection=detection)
    driver.finish()
    assert end_of(driver, "a") == (EndReason.REPETITION, answer[delivered:])


def test_no_steady_decode_with_repetition_detection() -> None:
    driver = Driver()
    driver.add("a", PROMPT, max_tokens=20, repetition_detection=RepetitionDetection(max_pattern_size=8))
    driver.run()
    assert driver.num_steady == 0 and driver.answers["a"].reason is EndReason.LENGTH


def test_only_the_last_tokens_matter() -> None:
    """Token ids can have any int32 value, and the detector keeps only as many tokens as the longest pattern."""
    watch = RepetitionWatch(RepetitionDetection(max_pattern_size=256, min_count=2))
    tokens = np.random.default_rng(0).integers(0, 2**31 - 1, 5000).tolist()
    for token in [*tokens, *tokens[-256:]]:
        assert not watch.found
        watch.add(token)
    assert watch.found
