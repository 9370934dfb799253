"""Forked requests: they share what their parent has computed, also if it ends."""

from itertools import product
from typing import Any

import pytest
from scheduler_driver import Driver, expected_tokens
from tiers import thinned

from quire.protocol.wire.front_end_messages import EndReason
from quire.scheduler_proc.requests.reasons import WaitReason

PROMPT = list(range(1, 15))


def forked(driver: Driver, parent: str, *children: str, **extra: Any) -> None:
    for child in children:
        driver.add(child, [], forked_from=parent, **{"max_tokens": 8} | extra)


def sampling_steps(driver: Driver) -> int:
    return sum(len(diff.forks) for diff in driver.diffs)


@pytest.mark.parametrize(
    ("length", "chunk", "caching"), thinned(product([4, 5, 8, 14, 16], [64, 5], [True, False]), keep=7)
)
def test_children_share_the_prompt_to_the_block(length: int, chunk: int, caching: bool) -> None:
    """The prompt is computed once, in one chunk or several; each child has at most one block more than it shares."""
    driver = Driver(max_num_batched_tokens=chunk, max_num_seqs=4, enable_prefix_caching=caching)
    prompt = list(range(1, length + 1))
    driver.add("p", prompt, max_tokens=8)
    forked(driver, "p", "a", "b", "c")
    assert [driver.request(child).wait_reason for child in "abc"] == [WaitReason.FORK] * 3
    while not driver.diffs or not driver.diffs[-1].forks:
        driver.step()
    usable, free = driver.scheduler.kv.pool.num_usable_blocks, driver.scheduler.kv.pool.num_free_blocks
    num_full = length // 4
    assert usable - free <= num_full + 4 + 1, "shared blocks, one of each request, and one that is copied from"
    driver.finish()
    num_computed = sum(sum(count for _, count in diff.counts) for diff in driver.diffs)
    assert num_computed == (length if length % chunk != 1 else length - 1), "counts of 1 are not listed"
    assert [len(diff.forks) for diff in driver.diffs if diff.forks] == [3]
    for name in "pabc":
        assert driver.answers[name].tokens == expected_tokens(prompt, 8)
        assert driver.answers[name].reason is EndReason.LENGTH
    assert driver.replay_lines() is None


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("caching", [True, False])
def test_fork_at_an_earlier_token(asynchronous: bool, caching: bool) -> None:
    """Children of a parent with more tokens: each computes one token, and its blocks have their own hashes."""
    driver = Driver(async_scheduling=asynchronous, enable_prefix_caching=caching)
    driver.add("p", PROMPT, max_tokens=20)
    driver.step(9)
    parent = driver.request("p")
    lengths = [*range(len(PROMPT), parent.num_tokens + 1), 0]
    for length in lengths:
        forked(driver, "p", f"at {length}", max_tokens=20, num_forked_tokens=length)
    driver.finish()
    want = expected_tokens(PROMPT, 20)
    for length in lengths[:-1]:
        assert driver.answers[f"at {length}"].tokens == want[length - len(PROMPT) :]
    assert driver.answers["at 0"].tokens == driver.answers[f"at {lengths[-2]}"].tokens
    assert driver.replay_lines() is None


@pytest.mark.parametrize("length", [-1, 1, len(PROMPT) - 1, 99])
def test_fork_at_a_token_outside_the_answer_is_refused(length: int) -> None:
    driver = Driver()
    driver.add("p", PROMPT, max_tokens=20)
    driver.step(3)
    forked(driver, "p", "a", num_forked_tokens=length)
    refusal = driver.answers["a"].rejected
    assert refusal is not None and refusal.param == "num_forked_tokens" and f"(got {length})" in refusal.message
    driver.finish()


def test_fork_in_the_middle_of_an_answer_copies_one_block_and_computes_one_token() -> None:
    driver = Driver(async_scheduling=True)
    driver.add("p", PROMPT, max_tokens=20)
    driver.step(6)
    known = driver.request("p").num_tokens
    forked(driver, "p", "a", "b", max_tokens=20)
    assert driver.request("a").num_tokens == known > len(PROMPT)
    driver.step()
    new = driver.diffs[-1].new_requests
    assert [row.num_computed_tokens for row in new] == [known - 1] * 2
    assert len(driver.diffs[-1].block_copies) == (2 if (known - 1) % 4 else 0)
    driver.finish()
    want = expected_tokens(PROMPT, 20)
    assert driver.answers["p"].tokens == want
    for child in "ab":
        assert driver.answers[child].tokens == want[known - len(PROMPT) :]
        assert driver.answers[child].ended.num_output_tokens == 20  # type: ignore[union-attr]
    assert driver.replay_lines() is None


def test_fork_without_blocks_waits_while_its_parent_continues() -> None:
    """The parent has all four blocks. Its child needs a copy of the last one, and runs when the parent has ended."""
    driver = Driver(5)
    driver.add("p", PROMPT[:13], max_tokens=3)
    driver.step(1)
    forked(driver, "p", "a", max_tokens=3, num_forked_tokens=13)
    while not driver.answers["p"].ended:
        assert driver.request("a").wait_reason is WaitReason.FORK
        driver.step()
    driver.finish()
    for name in "pa":
        assert driver.answers[name].tokens == expected_tokens(PROMPT[:13], 3)
    assert driver.scheduler.statistics().num_preemptions == 0
    assert driver.replay_lines() is None
