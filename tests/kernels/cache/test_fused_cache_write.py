"""Fused cache write without triton: the reference against separate operators, and the launcher's argument checks."""

from typing import Any

import pytest
import torch

from quire.kernels.cache.cache_write import write_cache_reference
from quire.kernels.cache.fused_cache_write import TOLERANCES, CacheWrite, fused_cache_write, fused_cache_write_reference
from quire.protocol.model.model_config import RopeConfig
from quire.worker_proc.attention.backend import AttentionSpec, Rotary
from quire.worker_proc.attention.prologue import normalise_and_rotate
from quire.worker_proc.attention.rope import rope_table


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("rotates", [False, True])
def test_reference_equals_separate_operators(rotates: bool, norm: bool, dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(1)
    heads, kv_heads, dim, tokens = 4, 2, 32, 6
    qkv = torch.randn(tokens, heads + 2 * kv_heads, dim, generator=rng).to(dtype)
    spec, turn = AttentionSpec(heads, kv_heads, dim, 1.0), {}
    rotary = None
    if norm:
        q_norm, k_norm = (torch.rand(2, dim, generator=rng) + 0.5).to(dtype)
        spec = AttentionSpec(heads, kv_heads, dim, 1.0, q_norm=q_norm, k_norm=k_norm, norm_eps=1e-5)
        turn |= {"q_norm": q_norm, "k_norm": k_norm, "norm_eps": 1e-5}
    if rotates:
        table = rope_table(RopeConfig(theta=100.0), dim, 40, "cpu").to(dtype)
        positions = torch.randint(40, (tokens,), generator=rng)
        rotary = Rotary(table, positions)
        turn |= {"rotary_table": table, "positions": positions}
    slots = torch.tensor([0, 9, -1, 3, 5, 15])
    cache, expected_cache = torch.zeros(2, 2, 2, 8, kv_heads, dim, dtype=dtype)
    key, value = torch.empty(2, tokens, kv_heads, dim, dtype=dtype)
    query = fused_cache_write_reference(CacheWrite(qkv, heads, cache, slots, **turn, key_out=key, value_out=value))
    qk = normalise_and_rotate(qkv[:, : heads + kv_heads], spec, rotary)
    # The separate operators round after the norm and after each product of the rotation.
    looser = {name: 2 * tolerance for name, tolerance in TOLERANCES[dtype].items()}
    torch.testing.assert_close(torch.cat([query, key], 1), qk, **looser)
    assert torch.equal(value, qkv[:, heads + kv_heads :])
    write_cache_reference(key, value, expected_cache, slots)
    assert torch.equal(cache, expected_cache)


def test_worked_example_of_partial_rotation() -> None:
    quarter_turn = torch.tensor([[[0.0, 0.0]], [[-1.0, 1.0]]])  # cosines, then sines
    qkv = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    query = fused_cache_write_reference(
        CacheWrite(qkv, 1, None, None, rotary_table=quarter_turn, positions=torch.tensor([0]))
    )
    assert query.tolist() == [[[-2.0, 1.0, 3.0, 4.0]]]


TABLE = torch.zeros(2, 9, 16)
KEYS = torch.zeros(5, 2, 16)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"qkv": torch.zeros(5, 7, 16)}, r"qkv: dimension 1 is 7, expected 4 heads and twice a number of KV heads"),
        ({"qkv": torch.zeros(5, 8, 15)}, r"qkv: dimension 2 \(head_dim\) is 15, expected an even number"),
        ({"kv_cache": None}, "expected both, because qkv has keys; got None and a tensor"),
        ({"qkv": torch.zeros(5, 4, 16)}, "expected neither, because qkv has queries alone"),
        ({"kv_cache": torch.zeros(2, 3, 8, 3, 16)}, r"kv_cache: dimension 3 \(num_kv_heads\) is 3, expected 2"),
        ({"slot_mapping": torch.zeros(4).long()}, r"slot_mapping: dimension 0 \(num_tokens\) is 4, expected 5"),
        ({"v_scale": torch.ones(1)}, "v_scale: a cache of torch.float32 is not scaled"),
        ({"q_norm": torch.ones(16)}, "q_norm, k_norm: expected both or neither"),
        ({"q_norm": torch.ones(16), "k_norm": torch.ones(8)}, r"k_norm: dimension 0 \(head_dim\) is 8, expected 16"),
        ({"rotary_table": TABLE}, "rotary_table, positions: expected both or neither"),
        ({"rotary_table": TABLE, "positions": torch.zeros(5)}, r"positions: dtype is torch.float32"),
        (
            {"rotary_table": torch.zeros(2, 9, 18), "positions": torch.zeros(5).long()},
            r"rotary_table: dimension 2 \(rotary_dim\) is 18, expected an even number up to 16",
        ),
        ({"key_out": KEYS}, "key_out, value_out: expected both or neither"),
        ({"key_out": KEYS, "value_out": KEYS.half()}, r"value_out: dtype is torch.float16, expected torch.float32"),
        ({"key_out": KEYS, "value_out": torch.zeros(2, 5, 16).transpose(0, 1)}, r"value_out: strides are .*contiguous"),
    ],
)
def test_launcher_rejects_wrong_tensors(changed: dict[str, Any], message: str) -> None:
    right = {
        "qkv": torch.zeros(5, 8, 16),
        "num_heads": 4,
        "kv_cache": torch.zeros(2, 3, 8, 2, 16),
        "slot_mapping": torch.zeros(5, dtype=torch.int64),
    }
    with pytest.raises(ValueError, match=message):
        fused_cache_write(CacheWrite(**(right | changed)))
