"""The fused cache write kernel compared with its reference; run by test_triton.py."""

from typing import Any

import pytest
import torch

from quire.kernels.cache.cache_write import write_cache_reference
from quire.kernels.cache.fused_cache_write import TOLERANCES, CacheWrite, fused_cache_write, fused_cache_write_reference
from quire.kernels.common.fp8 import FP8_DTYPES, as_bits, to_fp8_reference

NUM_TOKENS = 7
MAX_POSITION = 50


def make_table(rotary_dim: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    frequencies = 10.0 ** -torch.linspace(0, 2, rotary_dim // 2)
    angles = torch.arange(MAX_POSITION)[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([torch.cat([cos, cos], 1), torch.cat([-sin, sin], 1)]).to(dtype).to(device)


def make_step(
    num_heads: int, num_kv_heads: int, head_dim: int, rotary_dim: int, norm: bool, dtype: torch.dtype, device: Any
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Make a projection that is a slice of a wider tensor, and its norm and rotation arguments."""
    rng = torch.Generator().manual_seed(5)
    shape = (NUM_TOKENS, num_heads + 2 * num_kv_heads + 1, head_dim)
    qkv = torch.randn(shape, generator=rng).to(dtype).to(device)[:, :-1]
    turn = {}
    if norm:
        q_norm, k_norm = (torch.rand(2, head_dim, generator=rng) + 0.5).to(dtype).to(device)
        turn |= {"q_norm": q_norm, "k_norm": k_norm, "norm_eps": 1e-5}
    if rotary_dim:
        positions = torch.randint(MAX_POSITION, (NUM_TOKENS,), generator=rng).to(device)
        turn |= {"rotary_table": make_table(rotary_dim, dtype, device), "positions": positions}
    return qkv, turn


def make_cache(dtype: torch.dtype, num_kv_heads: int, head_dim: int, device: Any) -> torch.Tensor:
    rng = torch.Generator().manual_seed(6)
    return torch.randn(2, 4, 8, num_kv_heads, head_dim, generator=rng).to(dtype).to(device)


def make_slots(device: torch.device) -> torch.Tensor:
    return torch.tensor([3, 31, -1, 0, 12, -1, 4], device=device)


def check_step(
    qkv: torch.Tensor, num_heads: int, cache: torch.Tensor, turn: dict[str, Any], tolerance: dict[str, float]
) -> None:
    """Compare the outputs with the reference, and the cache exactly with a write of the kernel's own ``key_out``."""
    num_kv_heads = (qkv.shape[1] - num_heads) // 2
    slots, expected_cache = make_slots(qkv.device), cache.clone()
    key, value, expected_key, expected_value = (
        torch.full((NUM_TOKENS, num_kv_heads, qkv.shape[2]), torch.nan, dtype=qkv.dtype, device=qkv.device)
        for _ in range(4)
    )
    outputs = {"key_out": expected_key, "value_out": expected_value}
    expected = fused_cache_write_reference(CacheWrite(qkv, num_heads, cache.clone(), slots, **turn, **outputs))
    query = fused_cache_write(CacheWrite(qkv, num_heads, cache, slots, **turn, key_out=key, value_out=value))
    torch.testing.assert_close(query, expected, **tolerance)
    torch.testing.assert_close(key, expected_key, **tolerance)
    assert torch.equal(value, expected_value)
    stored = {name: turn[name] for name in ("k_scale", "v_scale") if name in turn}
    write_cache_reference(key, value, expected_cache, slots, **stored)
    assert torch.equal(as_bits(cache), as_bits(expected_cache))


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "rotary_dim", "norm"),
    [
        (4, 2, 32, 32, True),
        (4, 2, 32, 0, False),
        (7, 1, 80, 80, False),
        (7, 1, 80, 32, True),
        (6, 3, 96, 0, True),
        (6, 3, 96, 96, False),
        (1, 1, 16, 4, False),
        (2, 1, 256, 256, True),
        (2, 1, 256, 64, False),
    ],
)
def test_equals_reference(
    num_heads: int, num_kv_heads: int, head_dim: int, rotary_dim: int, norm: bool, dtype, device: torch.device
) -> None:
    qkv, turn = make_step(num_heads, num_kv_heads, head_dim, rotary_dim, norm, dtype, device)
    check_step(qkv, num_heads, make_cache(dtype, num_kv_heads, head_dim, device), turn, TOLERANCES[dtype])


def test_key_and_value_outputs_are_optional(dtype: torch.dtype, device: torch.device) -> None:
    qkv, turn = make_step(4, 2, 32, 16, True, dtype, device)
    cache, same_cache = (make_cache(dtype, 2, 32, device) for _ in range(2))
    key, value = torch.empty(2, NUM_TOKENS, 2, 32, dtype=dtype, device=device)
    query = fused_cache_write(CacheWrite(qkv, 4, cache, make_slots(device), **turn, key_out=key, value_out=value))
    assert torch.equal(fused_cache_write(CacheWrite(qkv, 4, same_cache, make_slots(device), **turn)), query)
    assert torch.equal(same_cache, cache)


@pytest.mark.parametrize("scales", ["none", "tensor", "head"])
@pytest.mark.parametrize("cache_dtype", FP8_DTYPES, ids=str)
def test_fp8_caches(cache_dtype: torch.dtype, scales: str, dtype: torch.dtype, device: torch.device) -> None:
    qkv, turn = make_step(3, 2, 24, 16, False, dtype, device)
    if scales != "none":
        k_scale, v_scale = (torch.linspace(a, 0.7, 1 + (scales == "head"), device=device) for a in (0.03, 0.3))
        turn |= {"k_scale": k_scale, "v_scale": v_scale}
    check_step(qkv, 3, make_cache(cache_dtype, 2, 24, device), turn, TOLERANCES[dtype])


def test_cache_of_another_dtype_and_mixed_scales(dtype: torch.dtype, device: torch.device) -> None:
    qkv, turn = make_step(4, 2, 32, 32, True, dtype, device)
    check_step(qkv, 4, make_cache(torch.float16, 2, 32, device), turn, TOLERANCES[dtype])
    scales = {"v_scale": torch.tensor([0.5, 0.25], device=device)}
    check_step(qkv, 4, make_cache(torch.float8_e4m3fn, 2, 32, device), turn | scales, TOLERANCES[dtype])


def test_float32_table_with_half_precision_activations(dtype: torch.dtype, device: torch.device) -> None:
    qkv, turn = make_step(4, 2, 32, 32, False, dtype, device)
    turn["rotary_table"] = make_table(32, torch.float32, device)
    check_step(qkv, 4, make_cache(dtype, 2, 32, device), turn, TOLERANCES[dtype])


def test_queries_alone(dtype: torch.dtype, device: torch.device) -> None:
    qkv, turn = make_step(4, 0, 32, 16, True, dtype, device)
    del turn["k_norm"]
    expected = fused_cache_write_reference(CacheWrite(qkv, 4, None, None, **turn))
    torch.testing.assert_close(fused_cache_write(CacheWrite(qkv, 4, None, None, **turn)), expected, **TOLERANCES[dtype])


def test_nan_token_does_not_affect_other_tokens(device: torch.device) -> None:
    qkv, turn = make_step(3, 2, 32, 32, True, torch.float32, device)
    qkv[5] = torch.nan  # padding: it has no slot
    cache = make_cache(torch.float32, 2, 32, device)
    query = fused_cache_write(CacheWrite(qkv, 3, cache, make_slots(device), **turn))
    assert query[[0, 1, 2, 3, 4, 6]].isfinite().all()
    assert cache.isfinite().all()


def test_tokens_outside_the_table_or_the_cache_are_skipped(device: torch.device) -> None:
    qkv, turn = make_step(3, 2, 32, 32, False, torch.float32, device)
    memory = torch.zeros(2, 3, 8, 2, 32, device=device)
    turn["positions"] = torch.tensor([MAX_POSITION, -1, 2**40, 1, 1, 1, 1], device=device)
    slots = torch.tensor([16, 2**40, -(2**40), -1, -1, -1, -1], device=device)
    query = fused_cache_write(CacheWrite(qkv, 3, memory[:, :2], slots, **turn))
    assert torch.equal(query[:3], qkv[:3, :3])
    assert memory.count_nonzero() == 0


def test_offsets_are_64_bits_wide(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("needs 6 GB of memory")
    cache = torch.zeros(2, 3 * 2**16, 16, 8, 128, dtype=torch.float8_e4m3fn, device=device)
    qkv, _ = make_step(8, 8, 128, 0, False, torch.float16, device)
    slots = cache.shape[1] * 16 - 1 - torch.arange(NUM_TOKENS, device=device)
    fused_cache_write(CacheWrite(qkv, 8, cache, slots))
    for part, tokens in enumerate((qkv[:, 8:16], qkv[:, 16:24])):
        written = as_bits(cache[part]).flatten(0, 1)[slots]
        assert torch.equal(written, as_bits(to_fp8_reference(tokens.float(), cache.dtype)))


def test_cache_of_one_layer_among_many(dtype: torch.dtype, device: torch.device) -> None:
    qkv = torch.ones(2, 3, 16, dtype=dtype, device=device)
    qkv[:, 2] = 2
    layers = torch.zeros(2, 5, 3, 4, 1, 16, dtype=dtype, device=device)
    fused_cache_write(CacheWrite(qkv, 1, layers[:, 2], torch.tensor([0, 11], device=device)))
    assert layers[:, [0, 1, 3, 4]].count_nonzero() == 0
    assert layers[0, 2].sum() == 2 * 16 and layers[1, 2].sum() == 2 * 2 * 16


def test_no_tokens(device: torch.device) -> None:
    qkv, turn = make_step(3, 2, 32, 0, False, torch.float32, device)
    cache = make_cache(torch.float32, 2, 32, device)
    query = fused_cache_write(CacheWrite(qkv[:0], 3, cache, make_slots(device)[:0], **turn))
    assert query.shape == (0, 3, 32)
