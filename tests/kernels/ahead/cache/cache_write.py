"""Variants of the cache write kernel to compile ahead."""

from collections.abc import Iterator

import torch
from kernel_variant import TRITON_TYPES, Variant

from quire.kernels.cache import cache_write
from quire.kernels.cache.cache_write_triton import cache_write_kernel
from quire.kernels.common.fp8 import FP8_DTYPES


def variants() -> Iterator[Variant]:
    cases = [
        # heads, head dimension, cache, numbers of scales
        (8, 128, torch.bfloat16, 0),
        (3, 80, torch.float16, 0),
        (8, 128, torch.float8_e5m2, 8),
    ]
    for num_kv_heads, head_dim, dtype, num_scales in cases:
        cache = torch.empty(2, 1, 16, num_kv_heads, head_dim, dtype=dtype)
        scale = torch.ones(num_scales) if num_scales else None
        constants = cache_write.launch_constants(num_kv_heads, head_dim, 16)
        constants |= cache_write.stored_constants(cache, scale, scale)
        element = "u8" if dtype in FP8_DTYPES else TRITON_TYPES[dtype]
        types = {"key": "*bf16", "value": "*bf16", "kv_cache": f"*{element}", "slot_mapping": "*i64"}
        if scale is None:
            constants |= {"k_scale": None, "v_scale": None}
        else:
            types |= {"k_scale": "*fp32", "v_scale": "*fp32"}
        yield Variant(
            name=f"cache_write bf16 to {element} {num_kv_heads}x{head_dim}" + " per head" * (num_scales > 1),
            kernel=cache_write_kernel,
            types=types,
            constants=constants,
            options={},
        )
