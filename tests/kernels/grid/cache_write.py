"""The cache write kernel against its reference; run by test_triton.py."""

import pytest
import torch

from quire.kernels.cache_write import write_cache, write_cache_reference


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(1, 16), (2, 80), (3, 48), (8, 128), (16, 96)])
def test_equals_reference(
    num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    rng = torch.Generator().manual_seed(2)
    num_tokens, num_blocks = 9, 4
    # Key and value are slices of one projection, as a model makes them: neither is contiguous.
    fused = torch.randn(num_tokens, 2 * num_kv_heads + 1, head_dim, generator=rng).to(dtype).to(device)
    key, value = fused[:, :num_kv_heads], fused[:, num_kv_heads : 2 * num_kv_heads]
    slots = torch.randperm(num_blocks * block_size, generator=rng)[:num_tokens].to(device)
    slots[[2, 5]] = -1
    slots[6] = num_blocks * block_size - 1
    before = torch.randn(2, num_blocks, block_size, num_kv_heads, head_dim, generator=rng).to(dtype).to(device)
    expected, result = before.clone(), before.clone()
    write_cache_reference(key, value, expected, slots)
    write_cache(key, value, result, slots)
    assert torch.equal(result, expected)


def test_cache_of_one_layer_among_many(dtype: torch.dtype, device: torch.device) -> None:
    key, value = (torch.ones(2, 1, 16, dtype=dtype, device=device) * i for i in (1, 2))
    layers = torch.zeros(2, 5, 3, 4, 1, 16, dtype=dtype, device=device)
    write_cache(key, value, layers[:, 2], torch.tensor([0, 11], device=device))
    assert layers[:, [0, 1, 3, 4]].count_nonzero() == 0
    assert layers[0, 2].sum() == 2 * 16
    assert layers[1, 2].sum() == 2 * 2 * 16


def test_slots_behind_the_cache_are_not_written(device: torch.device) -> None:
    memory = torch.zeros(2, 3, 4, 1, 16, device=device)
    ones = torch.ones(2, 1, 16, device=device)
    write_cache(ones, ones, memory[:, :2], torch.tensor([8, 2**40], device=device))
    assert memory.count_nonzero() == 0


def test_no_tokens(device: torch.device) -> None:
    cache = torch.zeros(2, 1, 8, 2, 16, device=device)
    none = torch.zeros(0, 2, 16, device=device)
    write_cache(none, none, cache, torch.zeros(0, dtype=torch.int64, device=device))
    assert cache.count_nonzero() == 0
