"""Log probabilities of prompts, with any division into steps, against one pass over each whole text."""

from typing import Any

import numpy as np
import pytest
import torch
from model_steps import Rows
from runner_steps import Runner, adding
from side_parts import parts_of

from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.wire.side_rows import PROMPT_LOGPROBS
from quire.protocol.wire.worker_messages import ModelRunnerOutput, NewRequestData
from quire.worker_proc.attention.cpu import CpuBackend
from quire.worker_proc.models.decoder import Decoder
from quire.worker_proc.sampling import prompt_logprobs

A, B, C = [5, 9, 2, 7, 7, 1, 30, 4, 11], [8, 8, 3, 60, 0], [1, 2, 3, 4]

Reported = dict[int, dict[int, tuple[list[int], list[float], int]]]
"""Handle → position → token ids, values, and the rank of the first."""


def gather(results: list[ModelRunnerOutput]) -> Reported:
    reported: Reported = {}
    for result in results:
        for handle, start, (ids, ranks, values) in parts_of(result, PROMPT_LOGPROBS):
            own = reported.setdefault(handle, {})
            rows = zip(ids.tolist(), values.tolist(), ranks[:, 0].tolist(), strict=True)
            for position, found in enumerate(rows, start):
                assert position not in own, "reported twice"
                own[position] = found
    return reported


def check(
    model: Decoder, reported: dict[int, tuple[list[int], list[float], int]], prompt: list[int], num_best: int
) -> None:
    """Compare with the model."""
    logits = Rows(model, [len(prompt)], CpuBackend(native=False)).step({0: torch.tensor(prompt)})[0]
    want = torch.log_softmax(logits.double(), -1)
    assert sorted(reported) == list(range(1, len(prompt)))
    for position, (ids, values, rank) in reported.items():
        row = want[position - 1]
        assert len(ids) == 1 + num_best
        assert ids[0] == prompt[position]
        assert ids[1 : 1 + num_best] == row.argsort(descending=True)[:num_best].tolist()
        assert values == pytest.approx(row[ids].tolist(), abs=1e-4)
        assert rank == 1 + int((row > row[prompt[position]]).sum())


def model_of(runner: Runner) -> Decoder:
    return runner.runner._model


def asking(handle: int, tokens: list[int], prompt_len: int, best: int | None) -> NewRequestData:
    params = SamplingParams(temperature=0.0, prompt_logprobs=best, max_tokens=None)
    return NewRequestData(handle, f"r{handle}", prompt_len, len(tokens), 0, [-(-len(tokens) // 4) + 1], params, 7)


def starting(*requests: tuple[int, list[int], int, int | None], counts: dict[int, int]) -> dict[str, Any]:
    """Return fields of a step that adds (handle, tokens, prompt length, asked) rows, with consecutive blocks."""
    new = [asking(*request) for request in requests]
    total = sum(sum(n.num_blocks) for n in new)
    return {
        "new_requests": new,
        "token_ids": np.array([token for _, tokens, _, _ in requests for token in tokens], np.int32),
        "block_ids": np.arange(1, 1 + total, dtype=np.int32),
        "counts": list(counts.items()),
    }


@pytest.mark.parametrize("piece", [1, 2, 3, 20])
def test_prompt_in_prefill_chunks(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_logprobs, "SLICE", 2)
    runner = Runner()
    step = starting((3, A, len(A), 4), counts={3: min(piece, len(A))})
    results = [runner.result(**step)]
    for done in range(piece, len(A), piece):
        results.append(runner.result(counts=[(3, min(piece, len(A) - done))]))
    assert (results[-1].tokens is not None) and all(result.tokens is None for result in results[:-1])
    results += [runner.result(), runner.result()]
    reported = gather(results)
    assert list(reported) == [3]
    check(model_of(runner), reported[3], A, 4)
    assert not results[-1].side and not results[-2].side


def test_requests_with_different_numbers_of_prompt_logprobs() -> None:
    runner = Runner()
    results = [
        runner.result(**starting((0, A, len(A), 2), (1, C, len(C), None), (2, B, len(B), 0), counts={0: 4, 1: 4, 2: 2}))
    ]
    results.append(runner.result(counts=[(0, 4), (2, 3)]))
    results.append(runner.result())
    reported = gather(results)
    assert sorted(reported) == [0, 2]
    check(model_of(runner), reported[0], A, 2)
    check(model_of(runner), reported[2], B, 0)


def test_output_of_a_resumed_request_is_not_reported() -> None:
    runner = Runner()
    answer = [13, 14, 15]
    results = [runner.result(**starting((0, B + answer, len(B), 1), counts={0: 4}))]
    results.append(runner.result(counts=[(0, 4)]))
    results.append(runner.result())
    reported = gather(results)
    check(model_of(runner), reported[0], B, 1)
    assert results[1].tokens is not None


def test_prompt_of_one_token_has_no_logprobs() -> None:
    runner = Runner()
    assert gather([runner.result(**starting((0, [5], 1, 3), counts={}))]) == {}
    assert gather([Runner().result(**adding((0, A, [1, 2, 3])))]) == {}
