"""The cache write kernel compared with its reference; run by test_triton.py."""

import pytest
import torch

from quire.kernels.cache.cache_write import CACHE_DTYPES, write_cache, write_cache_reference
from quire.kernels.common.fp8 import FP8_DTYPES, as_bits, to_fp8_reference

SIZES = [(1, 16), (2, 80), (3, 48), (8, 128), (16, 96)]
CACHES = [(dtype, None) for dtype in CACHE_DTYPES]
CACHES += [(dtype, scales) for dtype in FP8_DTYPES for scales in ("tensor", "head")]


def make_tokens(num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device, num_tokens: int = 9):
    """Make key and value as slices of one projection, as in a model: neither is contiguous."""
    rng = torch.Generator().manual_seed(2)
    fused = torch.randn(num_tokens, 2 * num_kv_heads + 1, head_dim, generator=rng).mul(3).to(dtype).to(device)
    return fused[:, :num_kv_heads], fused[:, num_kv_heads : 2 * num_kv_heads]


def make_slots(num_slots: int, device: torch.device, num_tokens: int = 9) -> torch.Tensor:
    slots = torch.randperm(num_slots - 1, generator=torch.Generator().manual_seed(3))[:num_tokens]
    slots[[2, 5]] = -1
    slots[6] = num_slots - 1
    return slots.to(device)


def make_cache(dtype: torch.dtype, device: torch.device, *shape: int) -> torch.Tensor:
    """Make a cache filled with numbers, which stand for other tokens' keys and values."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(4)).to(dtype).to(device)


def check_equal(result: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(as_bits(result), as_bits(expected))


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), SIZES)
def test_equals_reference(
    num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    key, value = make_tokens(num_kv_heads, head_dim, dtype, device)
    slots = make_slots(4 * block_size, device)
    before = make_cache(dtype, device, 2, 4, block_size, num_kv_heads, head_dim)
    expected, result = before.clone(), before.clone()
    write_cache_reference(key, value, expected, slots)
    write_cache(key, value, result, slots)
    check_equal(result, expected)


@pytest.mark.parametrize(("cache_dtype", "scales"), CACHES, ids=str)
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(2, 80), (8, 64)])
def test_equals_reference_in_other_caches(
    num_kv_heads: int, head_dim: int, cache_dtype: torch.dtype, scales: str | None, dtype, device
) -> None:
    if cache_dtype is torch.bfloat16 and device.type != "cuda":
        pytest.skip("Triton's interpreter computes bfloat16 wrongly")
    key, value = make_tokens(num_kv_heads, head_dim, dtype, device)
    # The value is stored head by head, so its strides differ from the key's.
    value = value.transpose(0, 1).contiguous().transpose(0, 1)
    key[0, 0, :3] = torch.tensor([1e4, -1e4, torch.inf])
    slots = make_slots(32, device)
    before = make_cache(cache_dtype, device, 2, 4, 8, num_kv_heads, head_dim)
    count = num_kv_heads if scales == "head" else 1
    k_scale, v_scale = (torch.linspace(low, 1.7, count, device=device) for low in (0.03, 0.3))
    arguments = (slots,) if scales is None else (slots, k_scale, v_scale)
    expected, result = before.clone(), before.clone()
    write_cache_reference(key, value, expected, *arguments)
    write_cache(key, value, result, *arguments)
    check_equal(result, expected)
    assert not result.float().isnan().any()


@pytest.mark.parametrize("num_tokens", [1, 16, 37])
def test_tiles_cover_every_token(num_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    key, value = make_tokens(1, 64, dtype, device, num_tokens)
    slots = torch.arange(num_tokens, device=device).flip(0)
    expected, result = (torch.zeros(2, 5, 8, 1, 64, dtype=dtype, device=device) for _ in range(2))
    write_cache_reference(key, value, expected, slots)
    write_cache(key, value, result, slots)
    check_equal(result, expected)


def test_offsets_are_64_bits_wide(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("needs 6 GB of memory")
    cache = torch.zeros(2, 3 * 2**16, 16, 8, 128, dtype=torch.float8_e4m3fn, device=device)
    key, value = make_tokens(8, 128, torch.float16, device)
    slots = cache.shape[1] * 16 - 1 - torch.arange(9, device=device)
    write_cache(key, value, cache, slots)
    for part, tokens in enumerate((key, value)):
        written = as_bits(cache[part]).flatten(0, 1)[slots]
        assert torch.equal(written, as_bits(to_fp8_reference(tokens.float(), cache.dtype)))


def test_cache_of_one_layer_among_many(dtype: torch.dtype, device: torch.device) -> None:
    key, value = (torch.ones(2, 1, 16, dtype=dtype, device=device) * i for i in (1, 2))
    layers = torch.zeros(2, 5, 3, 4, 1, 16, dtype=dtype, device=device)
    write_cache(key, value, layers[:, 2], torch.tensor([0, 11], device=device))
    assert layers[:, [0, 1, 3, 4]].count_nonzero() == 0
    assert layers[0, 2].sum() == 2 * 16
    assert layers[1, 2].sum() == 2 * 2 * 16


def test_slots_past_the_end_of_the_cache_are_not_written(device: torch.device) -> None:
    memory = torch.zeros(2, 3, 4, 1, 16, device=device)
    ones = torch.ones(2, 1, 16, device=device)
    write_cache(ones, ones, memory[:, :2], torch.tensor([8, 2**40], device=device))
    assert memory.count_nonzero() == 0


def test_no_tokens(device: torch.device) -> None:
    cache = torch.zeros(2, 1, 8, 2, 16, device=device)
    none = torch.zeros(0, 2, 16, device=device)
    write_cache(none, none, cache, torch.zeros(0, dtype=torch.int64, device=device))
    assert cache.count_nonzero() == 0
