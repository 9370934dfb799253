"""Tokens drawn by the GPU kernels, in Triton's interpreter, equal those of the CPU; run by test_gpu_step.py."""

from typing import Any

import numpy as np
import pytest
import torch
from sampling_batch import CPU, batch_of, make_sampler, sampling_config

from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.wire.worker_messages import NewRequestData
from quire.worker_proc.batch.positions import SampledPositions
from quire.worker_proc.device.transfer import Transfer
from quire.worker_proc.sampling.draw import NativeDraw, TorchDraw, TritonDraw, make_draw
from quire.worker_proc.sampling.sampler import Sampler

VOCAB = 300
ROWS: list[dict[str, Any]] = [
    {"temperature": 0.0, "top_k": 4},
    {"temperature": 0.8},
    {"temperature": 1.2, "top_k": 3},
    {"temperature": 1.2, "top_p": 0.7},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
]


def some_logits(rows: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("is_scaled", [False, True])
def test_gpu_and_cpu_draw_the_same_tokens_with_and_without_drafts(is_scaled: bool) -> None:
    batch, _ = batch_of([(seed, 4, params) for seed, params in enumerate(ROWS)], VOCAB)
    drawers = [TritonDraw(batch, Transfer(CPU)), TorchDraw(batch), make_draw(batch, CPU)]
    assert isinstance(drawers[2], NativeDraw | TorchDraw)
    drafts: list[list[int]] = [[], [1], [], [5, 5], [], [2]]
    for step, positions in enumerate(
        [
            SampledPositions.one_per_row(np.arange(6)),
            SampledPositions.with_drafts(np.arange(6), drafts),
            SampledPositions.one_per_row(np.array([1, 3])),
            SampledPositions.one_per_row(np.arange(6)),
        ]
    ):
        logits = some_logits(len(positions), step)
        logits[0, 7] = torch.nan if step == 1 else 0.0
        found = []
        for drawer in drawers:
            drawer.prepare(positions)
            found.append(drawer.draw(logits, positions, is_scaled=is_scaled))
        for tokens, bad in found[1:]:
            assert tokens.tolist() == found[0][0].tolist()
            assert bad.tolist() == found[0][1].tolist() == drawers[0].bad(logits).tolist()
        batch.num_known += 1


def test_changed_rows_draw_by_their_new_parameters() -> None:
    batch, _ = make_sampler(VOCAB, 2, 4)
    sampler = Sampler(batch, sampling_config(VOCAB, max_num_seqs=2), CPU, draw=TritonDraw(batch, Transfer(CPU)))
    logits = some_logits(1, 9)
    positions = SampledPositions.one_per_row(np.arange(1))
    for handle, params in enumerate([SamplingParams(temperature=2.0, seed=1), SamplingParams(temperature=0.0)]):
        new = NewRequestData(handle, "r", 1, 1, 0, [1], params, 3)
        batch.change_rows(list(batch.row_of), [new], np.zeros(1, np.int32))
        sampler.update_state(batch.builder.get_and_reset(1))
        token = sampler.sample(logits.clone(), positions).tokens.tolist()
        assert (token == logits.argmax(-1).tolist()) is (params.temperature == 0.0)
