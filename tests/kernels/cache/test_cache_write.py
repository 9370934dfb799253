"""The reference of the cache write, on worked examples."""

import pytest
import torch

from quire.kernels.cache.cache_write import write_cache_reference
from quire.kernels.cache.slot_mapping import PAD_SLOT_ID


def test_worked_example() -> None:
    cache = torch.zeros(2, 2, 4, 1, 1)
    key = torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1)
    write_cache_reference(key, -key, cache, torch.tensor([6, PAD_SLOT_ID, 0]))
    assert cache[0].flatten().tolist() == [3, 0, 0, 0, 0, 0, 1, 0]
    assert cache[1].flatten().tolist() == [-3, 0, 0, 0, 0, 0, -1, 0]


def test_fp8_cache_holds_scaled_and_clamped_values() -> None:
    cache = torch.zeros(2, 1, 1, 2, 1, dtype=torch.float8_e4m3fn)
    tokens = torch.tensor([[[3.0], [900.0]]])
    write_cache_reference(tokens, tokens, cache, torch.tensor([0]), torch.tensor([2.0]), torch.tensor([0.5, 900.0]))
    assert cache.float().flatten().tolist() == [1.5, 448.0, 6.0, 1.0]


def test_cache_of_another_dtype() -> None:
    cache = torch.zeros(2, 1, 1, 1, 1, dtype=torch.bfloat16)
    third = torch.full((1, 1, 1), 1 / 3)
    write_cache_reference(third, third, cache, torch.tensor([0]))
    assert cache.flatten().tolist() == [third.bfloat16().item()] * 2


def test_reference_raises_past_the_end_of_the_cache() -> None:
    ones = torch.ones(1, 1, 1)
    with pytest.raises(IndexError):
        write_cache_reference(ones, ones, torch.zeros(2, 2, 4, 1, 1), torch.tensor([8]))
