"""Tiles of decoding rows in attention with torch operators."""

import numpy as np
import pytest
import torch
from cpu_attention_cases import Ask, make_case, run

from quire.worker_proc.attention import cpu_plan
from quire.worker_proc.attention.cpu import CpuBackend


@pytest.mark.parametrize("spread", [1, 10, 4000])
def test_tiles_hold_every_row_once_with_bounded_padding_and_size(spread: int) -> None:
    lengths = np.random.default_rng(0).integers(1, 1 + spread, 200)
    token_bytes = 2 * 3 * 64 * 4
    order, tiles = cpu_plan._cut_tiles(lengths, token_bytes)
    assert sorted(np.concatenate([order[rows] for rows in tiles]).tolist()) == list(range(200))
    for rows in tiles:
        members = lengths[order[rows]]
        padded = int(members.max()) * len(members) * token_bytes
        assert padded <= members.sum() * token_bytes * cpu_plan.PADDED_WORK + cpu_plan.TILE_OVERHEAD_BYTES
        assert len(members) == 1 or padded <= cpu_plan.TILE_BYTES_PER_THREAD * torch.get_num_threads()
    assert len(tiles) < 20 + lengths.sum() * token_bytes / cpu_plan.TILE_BYTES_PER_THREAD * 1.5


def test_rows_that_fit_one_tile_keep_their_order() -> None:
    order, tiles = cpu_plan._cut_tiles(np.array([5, 9, 7]), 1536)
    assert order.tolist() == [0, 1, 2] and tiles == [slice(0, 3)]


@pytest.mark.parametrize("ask", [Ask(), Ask(window=11, sinks=True), Ask(chunk=24)], ids=str)
def test_decode_batch_in_many_tiles(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_plan, "TILE_BYTES_PER_THREAD", 1 << 14)
    case = make_case([(20 + 7 * i % 60, 1) for i in range(12)], (4, 2, 16), 16, torch.float32, ask=ask)
    torch.testing.assert_close(run(CpuBackend(native=False), case).double(), case.expected, atol=2e-5, rtol=2e-5)
