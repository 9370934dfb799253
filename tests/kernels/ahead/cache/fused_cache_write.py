"""Variants of the fused cache write kernel to compile ahead."""

from collections.abc import Iterator

import torch
from kernel_variant import TRITON_TYPES, Variant

from quire.kernels.cache import fused_cache_write
from quire.kernels.cache.fused_cache_write_triton import fused_cache_write_kernel
from quire.kernels.common.fp8 import FP8_DTYPES

POINTERS = ("kv_cache", "slot_mapping", "key_out", "value_out", "q_norm", "k_norm", "rotary_table", "positions")


def variants() -> Iterator[Variant]:
    cases = [
        # heads, head dimension, rotary dimension, cache, scaled, absent arguments
        ((32, 8), 128, 128, torch.bfloat16, False, ("key_out", "value_out")),
        ((32, 32), 80, 32, torch.float16, False, ("q_norm", "k_norm")),
        ((16, 8), 128, 128, torch.float8_e4m3fn, True, ()),
        ((8, 0), 256, 256, torch.bfloat16, False, ("kv_cache", "slot_mapping", "key_out", "value_out")),
    ]
    for (num_heads, num_kv_heads), head_dim, rotary_dim, dtype, scaled, absent in cases:
        cache = torch.empty(2, 1, 16, num_kv_heads, head_dim, dtype=dtype) if num_kv_heads else None
        scale = torch.ones(max(num_kv_heads, 1)) if scaled else None
        constants = fused_cache_write.launch_constants(
            num_heads, num_kv_heads, head_dim, rotary_dim, cache, scale, scale
        )
        element = "u8" if dtype in FP8_DTYPES else TRITON_TYPES[dtype]
        types = dict.fromkeys(("qkv", "query_out", *POINTERS), "*bf16") | {"kv_cache": f"*{element}"}
        types |= {"slot_mapping": "*i64", "positions": "*i64", "norm_eps": "fp32"}
        types |= {"k_scale": "*fp32", "v_scale": "*fp32"}
        absent += () if scaled else ("k_scale", "v_scale")
        yield Variant(
            name=f"fused_cache_write {num_heads}+{num_kv_heads}x{head_dim} rotates {rotary_dim}, {element}",
            kernel=fused_cache_write_kernel,
            types={name: kind for name, kind in types.items() if name not in absent},
            constants=constants | dict.fromkeys(absent),
            options={},
        )
