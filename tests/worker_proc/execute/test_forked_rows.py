"""Forked rows with handwritten diffs: they share a prompt's blocks, and sample what they would alone."""

from typing import Any

import numpy as np
import pytest
from runner_steps import PROMPT, Runner, adding, appending

from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.wire.worker_messages import NewRequestData
from quire.worker_proc.batch.input_batch import StepRefused

SAMPLING = SamplingParams(temperature=1.5)
BLOCK_SIZE = 4


def rows_of(*rows: tuple[int, list[int], list[int], int]) -> dict[str, Any]:
    """Return fields of a step that adds (handle, tokens, blocks, computed) rows; the seed of each is its handle."""
    new = [NewRequestData(h, f"r{h}", len(t), len(t), computed, [len(b)], SAMPLING, h) for h, t, b, computed in rows]
    return {
        "new_requests": new,
        "token_ids": np.array([t for _, tokens, _, _ in rows for t in tokens], np.int32),
        "block_ids": np.array([b for _, _, blocks, _ in rows for b in blocks], np.int32),
        "counts": [(h, len(t) - computed) for h, t, _, computed in rows if len(t) - computed > 1],
    }


def solo(handle: int, prompt: list[int], num_tokens: int) -> list[int]:
    runner = Runner()
    tokens = [runner.step(**rows_of((handle, prompt, [1, 2, 3, 4, 5], 0)))[handle]]
    return tokens + [runner.step()[handle] for _ in range(num_tokens - 1)]


@pytest.mark.parametrize("prompt", [PROMPT, [*PROMPT, 3, 3], [4]], ids=["part of a block", "whole blocks", "one token"])
def test_forked_rows_sample_what_they_would_alone(prompt: list[int]) -> None:
    """The parent fills its last block in the step of the fork, so that it is copied before the next one."""
    num_full = len(prompt) // BLOCK_SIZE
    full = [1, 2, 3][:num_full]
    blocks = {0: [1, 2, 3, 4], 1: [*full, 5, 6], 2: [*full, 7, 8]}
    runner = Runner()
    step = rows_of(*((handle, prompt, blocks[handle], handle and len(prompt)) for handle in blocks))
    tokens = [runner.step(**step, forks=[(1, 0), (2, 0)])]
    copies = [(blocks[0][num_full], blocks[handle][num_full]) for handle in (1, 2)] if len(prompt) % BLOCK_SIZE else []
    tokens += [runner.step(block_copies=copies), runner.step(), runner.step()]
    for handle in blocks:
        assert [of[handle] for of in tokens] == solo(handle, prompt, 4)


def test_row_forked_in_the_middle_of_an_answer_continues_it() -> None:
    want = solo(0, PROMPT, 6)
    runner = Runner()
    tokens = [runner.step(**rows_of((0, PROMPT, [1, 2, 3], 0)))[0], runner.step()[0], runner.step()[0]]
    known = PROMPT + tokens
    child = rows_of((9, known, [1, 2, 6], len(known) - 1))
    child["new_requests"][0] = NewRequestData(9, "r9", len(PROMPT), len(known), len(known) - 1, [3], SAMPLING, 0)
    got = [runner.step(**child, block_copies=[(3, 6)])]
    got += [runner.step(), runner.step()]
    assert [of[0] for of in got] == [of[9] for of in got] == want[3:]


def test_forks_with_other_rows_prefill_and_decode() -> None:
    runner = Runner()
    other = [runner.step(**rows_of((3, [8], [10, 11, 12], 0)))[3]]
    other.append(runner.step(**rows_of((0, PROMPT, [1, 2], 0)) | {"counts": [(0, 3)]})[3])
    last = rows_of((1, PROMPT, [1, 4], len(PROMPT))) | {"counts": [(0, 3)]}
    tokens = [runner.step(**last, forks=[(1, 0)])]
    tokens += [runner.step(block_copies=[(2, 4)])]
    tokens += [runner.step(**appending(0, 0, [3]) | {"appended_handles": np.array([0, 1], np.int32)} | APPENDED)]
    for handle in (0, 1):
        assert [of[handle] for of in tokens] == solo(handle, PROMPT, 3)
    assert other + [of[3] for of in tokens] == solo(3, [8], 5)


APPENDED = {"appended_groups": None, "appended_block_ids": np.array([3, 5], np.int32)}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a parent that is not held": ({"forks": [(1, 5)]}, "handle 5 is not held"),
    "a parent with tokens left": ({"forks": [(1, 0)], "counts": [(0, 3)]}, "cannot be forked from handle 0, which has"),
    "a parent of another length": ({"forks": [(1, 2)]}, "cannot be forked from handle 2, which has 1 and"),
    "tokens to compute": ({"forks": [(0, 2), (1, 0)], "counts": []}, "handle 0 is forked, but is not new or has"),
    "no tokens to compute and no parent": ({}, "handle 1 has 6 computed tokens of 6 tokens"),
    "two parents": ({"forks": [(1, 0), (1, 2)]}, "duplicate handle 1"),
    "a copy to the null block": ({"forks": [(1, 0)], "block_copies": [(1, 0)]}, "must be between 1 and"),
    "a copy out of range": ({"forks": [(1, 0)], "block_copies": [(1, 99)]}, "must be between 1 and"),
    "a target twice": ({"forks": [(1, 0)], "block_copies": [(1, 9), (2, 9)]}, "occurs twice, or is copied from"),
    "a target that is a source": ({"forks": [(1, 0)], "block_copies": [(1, 9), (9, 8)]}, "or is copied from"),
}


@pytest.mark.parametrize("fields,text", REFUSED.values(), ids=REFUSED)
def test_wrong_fork_or_copy_is_refused(fields: dict[str, Any], text: str) -> None:
    runner = Runner()
    rows = rows_of((0, PROMPT, [1, 2], 0), (1, PROMPT, [1, 4], len(PROMPT)), (2, [5], [6], 0))
    with pytest.raises(StepRefused, match=text):
        runner.step(**rows | fields)


def test_row_continues_with_a_chosen_token() -> None:
    """The token replaces the one that the row sampled, in a general step and in a row of decode steps."""
    runner = Runner()
    runner.step(**rows_of((0, PROMPT, [1, 2, 3], 0)))
    got = [runner.step(chosen=[(0, 7)])[0], runner.step()[0], runner.step(chosen=[(0, 9)])[0]]
    known = [*PROMPT, 7]
    other = Runner()
    new = NewRequestData(0, "r0", len(PROMPT), len(known), 0, [3], SAMPLING, 0)
    fields = rows_of((0, known, [1, 2, 3], 0)) | {"new_requests": [new]}
    assert got == [other.step(**fields)[0], other.step()[0], other.step(chosen=[(0, 9)])[0]]


@pytest.mark.parametrize(
    ("chosen", "text"),
    [
        ([(5, 1)], "handle 5 is not held"),
        ([(0, 10**6)], "handle 0: the chosen token has id 1000000, which is outside"),
        ([(0, -1)], "handle 0: the chosen token has id -1, which is outside"),
        ([(0, 1), (0, 2)], "duplicate handle 0"),
        ([(1, 1)], "handle 1 has a chosen token, but 4 of 6 tokens are computed"),
    ],
)
def test_wrong_chosen_token_is_refused(chosen: list[tuple[int, int]], text: str) -> None:
    runner = Runner()
    runner.step(**rows_of((0, PROMPT, [1, 2, 3], 0), (1, PROMPT, [4, 5], 0)) | {"counts": [(0, len(PROMPT)), (1, 4)]})
    with pytest.raises(StepRefused, match=text):
        runner.step(chosen=chosen)


def test_copy_to_a_block_that_a_row_reads_is_refused() -> None:
    runner = Runner()
    runner.step(**adding((0, PROMPT, [1, 2])))
    runner.step(**adding((1, PROMPT, [1, 4]), computed=4))
    with pytest.raises(StepRefused, match="block 1 to copy to is read by a row"):
        runner.step(block_copies=[(2, 1)])


def test_copy_to_a_block_that_only_removed_rows_read() -> None:
    """A child gets a block of a request that the same step removes."""
    runner = Runner()
    runner.step(**rows_of((0, PROMPT, [1, 2, 3], 0)))
    runner.step(**rows_of((1, PROMPT, [1, 4], 4)))
    runner.step(**rows_of((2, PROMPT[:3], [1], 2)), block_copies=[(2, 1)], removed=[0, 1])


def test_fork_without_a_block_for_its_last_tokens_is_refused() -> None:
    runner = Runner()
    rows = rows_of((0, PROMPT, [1, 2], 0), (1, PROMPT, [1], len(PROMPT)))
    with pytest.raises(StepRefused, match="handle 1, KV group 0: no block for position 5"):
        runner.step(**rows, forks=[(1, 0)])
