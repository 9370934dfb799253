"""The bitmask kernel against its reference; run by test_triton.py."""

import pytest
import torch

from quire.kernels.sampling.token_bitmask import TILE_WORDS, apply_token_bitmask_reference, launch_token_bitmask


@pytest.mark.parametrize(("vocab", "num_words"), [(5, 1), (64, 2), (70, 2), (40, 3), (TILE_WORDS * 32 + 3, 65)])
def test_equals_reference(vocab: int, num_words: int, device: torch.device) -> None:
    rng = torch.Generator().manual_seed(vocab)
    logits = torch.randn(4, vocab + 3, generator=rng).to(device)[:, :vocab]
    words = torch.randint(-(2**31), 2**31, (3, num_words), generator=rng, dtype=torch.int64).int().to(device)
    words[1] = -1
    rows = torch.tensor([2, 0, 3], device=device)
    want, got = logits.clone(), logits.clone()
    apply_token_bitmask_reference(want, rows, words)
    launch_token_bitmask(got, rows, words)
    assert torch.equal(got, want)
    assert torch.equal(got[1], logits[1])


def test_row_out_of_range_is_ignored(device: torch.device) -> None:
    logits = torch.zeros(2, 40, device=device)
    rows, words = torch.tensor([-1, 2], device=device), torch.zeros(2, 2, dtype=torch.int32, device=device)
    launch_token_bitmask(logits, rows, words)
    assert not logits.any()
