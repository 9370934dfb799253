"""Steps with draft tokens, from hand-written diffs and a scripted proposer."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from runner_steps import PROMPT, Runner, adding, alone
from side_parts import parts_of

from quire.protocol.wire.side_rows import LOGPROBS
from quire.protocol.wire.worker_messages import ModelRunnerOutput
from quire.worker_proc.batch.input_batch import StepRefused

BLOCKS = [3, 1, 7, 5, 2, 9]


class ScriptedProposer:
    """Proposes the lists of draft tokens that the test gives it, in order."""

    def __init__(self, *drafts: list[int]) -> None:
        self.drafts = list(drafts)
        self.wanted: list[dict[int, int]] = []

    def propose(self, wanted: Mapping[int, int]) -> dict[int, list[int]]:
        self.wanted.append(dict(wanted))
        return {row: self.drafts.pop(0)[:most] for row, most in wanted.items() if self.drafts}


def drafting(runner: Runner, *drafts: list[int]) -> ScriptedProposer:
    proposer = runner.runner._proposer = ScriptedProposer(*drafts)
    return proposer


def ask(most: int, *handles: int) -> dict[str, Any]:
    return {"counts": [(h, 1 + most) for h in handles], "drafts": [(h, most) for h in handles]}


def tokens_of(result: ModelRunnerOutput) -> list[list[int]]:
    assert result.tokens is not None
    counts = np.ones(len(result.tokens), int) if result.counts is None else result.counts
    return [own.tolist() for own in np.split(result.tokens, np.cumsum(counts)[:-1])]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}])
def test_correct_drafts_are_accepted_and_wrong_ones_change_no_token(sampling: dict[str, Any]) -> None:
    want = alone(PROMPT, 9, **sampling)
    runner = Runner()
    got = [runner.step(**adding((4, PROMPT, BLOCKS), **sampling))[4]]
    wrong = (want[2] + 1) % 61
    proposer = drafting(runner, want[1:3], [want[4], wrong], [wrong, wrong])
    results = [runner.result(**ask(2, 4)) for _ in range(3)]
    assert proposer.wanted == [{0: 2}] * 3
    taken = [tokens_of(result)[0] for result in results]
    assert [len(own) for own in taken] == [3, 2, 1]
    assert got + [token for own in taken for token in own] == want[:7]
    assert [r.drafts.tolist() for r in results if r.drafts is not None] == [[2]] * 3
    assert [runner.step()[4] for _ in range(2)] == want[7:9]


def test_proposer_may_make_fewer_drafts_than_allowed() -> None:
    want = alone(PROMPT, 4)
    runner = Runner()
    runner.step(**adding((4, PROMPT, BLOCKS)))
    drafting(runner, [want[1]], [])
    assert tokens_of(runner.result(**ask(3, 4))) == [want[1:3]]
    last = runner.result(**ask(3, 4))
    assert tokens_of(last) == [want[3:4]] and last.counts is None and last.drafts is None


def test_rows_with_drafts_beside_rows_without_and_a_prefill() -> None:
    first, second = alone(PROMPT, 4), alone([8, 8], 3)
    runner = Runner()
    runner.step(**adding((0, PROMPT, BLOCKS), (1, [8, 8], [10, 11, 12])))
    drafting(runner, [first[1], 0 if first[2] else 1])
    joined = adding((2, [6, 6, 6], [13, 14, 15]))
    result = runner.result(**joined | {"counts": [(0, 3), *joined["counts"]], "drafts": [(0, 2)]})
    assert result.handles is not None and result.handles.tolist() == [0, 1, 2]
    assert tokens_of(result) == [first[1:3], second[1:2], alone([6, 6, 6], 1)]
    assert runner.step() == {0: first[3], 1: second[2], 2: alone([6, 6, 6], 2)[1]}


def test_logprobs_of_accepted_tokens_only() -> None:
    want = alone(PROMPT, 4)
    plain = Runner()
    plain.step(**adding((0, PROMPT, BLOCKS), logprobs=2))
    single = [plain.result() for _ in range(2)]
    runner = Runner()
    runner.step(**adding((0, PROMPT, BLOCKS), logprobs=2))
    drafting(runner, [want[1], (want[2] + 1) % 61, 5])
    result = runner.result(**ask(3, 0))
    assert tokens_of(result) == [want[1:3]]
    ((_, start, (ids, _, values)),) = parts_of(result, LOGPROBS)
    assert (start, len(ids)) == (0, 2)
    expected = np.concatenate([own for r in single for _, _, (_, _, own) in parts_of(r, LOGPROBS)])
    np.testing.assert_allclose(values, expected, atol=1e-5)


@pytest.mark.parametrize(
    "fields",
    [
        {"counts": [(4, 3)], "drafts": [(4, 3)]},
        {"drafts": [(4, 1)]},
        {"counts": [(4, 3)], "drafts": [(9, 1)]},
        {"counts": [(4, 3)], "drafts": [(4, 1)]},
    ],
    ids=["all are drafts", "no count", "unknown handle", "two known tokens where there is one"],
)
def test_refuses_invalid_draft_counts(fields: dict[str, Any]) -> None:
    runner = Runner()
    runner.step(**adding((4, PROMPT, BLOCKS)))
    drafting(runner, [1, 1, 1])
    with pytest.raises(StepRefused):
        runner.result(**fields)


def test_refuses_drafts_in_a_prefill_chunk() -> None:
    runner = Runner()
    drafting(runner, [1])
    with pytest.raises(StepRefused):
        runner.result(**adding((4, PROMPT, BLOCKS)) | {"counts": [(4, 3)], "drafts": [(4, 1)]})
