"""Prefill share: while requests decode, prefills get only a part of the token budget."""

from typing import Any

import pytest
from scheduler_driver import Driver, expected_tokens

from quire.scheduler_proc.requests.reasons import WaitReason


def prompt_of(n: int, first: int = 0) -> list[int]:
    return list(range(first, first + n))


def decoding(share: float, **settings: Any) -> Driver:
    """Return an engine with a budget of 32 tokens and one decoding request."""
    driver = Driver(**{"max_prefill_share": share, "max_num_batched_tokens": 32} | settings)
    driver.add("decodes", [900], max_tokens=60)
    driver.step()
    return driver


def one_step(driver: Driver) -> dict[str, int]:
    """Run and answer one step; return its tokens per request."""
    diff = driver.schedule()
    assert diff is not None
    counts = driver.counts(diff)
    driver.answer()
    return counts


@pytest.mark.parametrize("steady_decode", [True, False])
@pytest.mark.parametrize(("share", "tokens"), [(0.25, 8), (0.5, 16), (0.1, 3), (1.0, 31), (0.0, 1), (0.001, 1)])
def test_long_prompt_gets_the_share_and_at_least_one_token(share: float, tokens: int, steady_decode: bool) -> None:
    driver = decoding(share, steady_decode=steady_decode)
    driver.add("long", prompt_of(70), max_tokens=2)
    assert one_step(driver) == {"decodes": 1, "long": tokens}
    assert one_step(driver) == {"decodes": 1, "long": tokens}
    driver.finish()
    assert driver.answers["long"].tokens == expected_tokens(prompt_of(70), 2)


def test_prefill_gets_the_whole_budget_without_decodes() -> None:
    driver = Driver(max_prefill_share=0.25, max_num_batched_tokens=32)
    driver.add("long", prompt_of(70), max_tokens=2)
    assert [one_step(driver) for _ in range(3)] == [{"long": 32}, {"long": 32}, {"long": 6}]


def test_prefill_gets_the_whole_budget_after_the_last_decode() -> None:
    driver = decoding(0.25)
    driver.add("long", prompt_of(70), max_tokens=2)
    assert one_step(driver) == {"decodes": 1, "long": 8}
    driver.abort("decodes")
    assert one_step(driver) == {"long": 32}


def test_prompts_use_the_share_in_order_of_admission() -> None:
    driver = decoding(0.5, long_prefill_token_threshold=10)
    for index, name in enumerate(("one", "two", "three")):
        driver.add(name, prompt_of(25, 30 * index), max_tokens=2)
    assert one_step(driver) == {"decodes": 1, "one": 10, "two": 6}
    assert driver.scheduler.table.waiting.peek_request().wait_reason is WaitReason.PREFILL_SHARE
    assert one_step(driver) == {"decodes": 1, "one": 10, "two": 6}
    assert one_step(driver) == {"decodes": 1, "one": 5, "two": 10, "three": 1}
    driver.finish()


def test_prefill_gets_only_what_decodes_leave() -> None:
    driver = Driver(max_prefill_share=0.9, max_num_batched_tokens=10, max_num_seqs=8)
    for index in range(5):
        driver.add(f"d{index}", [index], max_tokens=40)
    driver.step()
    driver.add("long", prompt_of(30), max_tokens=2)
    assert one_step(driver)["long"] == 5


def test_no_prompt_is_cut_without_chunked_prefill() -> None:
    driver = decoding(0.1, enable_chunked_prefill=False, max_num_batched_tokens=128)
    driver.add("long", prompt_of(70), max_tokens=2)
    assert one_step(driver) == {"decodes": 1, "long": 70}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_share_bounds_every_step_with_decodes(asynchronous: bool) -> None:
    """With arrivals of many lengths, each decoding request gets a token in each step, and prefills their share."""
    driver = Driver(
        max_prefill_share=0.5, max_num_batched_tokens=16, async_scheduling=asynchronous, enable_prefix_caching=False
    )
    for index in range(30):
        driver.add(f"r{index}", prompt_of(1 + 7 * index % 40, index), max_tokens=3 + index % 9)
    while driver.scheduler.table.requests:
        table = driver.scheduler.table
        decoding = {r.handle for r in table.running.values() if r.is_steady}
        diff = driver.schedule()
        if diff is not None and decoding - set(diff.removed) and not diff.parked:
            new = {n.handle for n in diff.new_requests}
            prefill = sum(count for _, count in diff.counts) + len(new - dict(diff.counts).keys())
            assert prefill <= 8
        driver.answer()
    driver.settle()
    driver.check_drained()
