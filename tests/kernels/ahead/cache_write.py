"""Variants of the cache write kernel to compile ahead."""

from collections.abc import Iterator

from kernel_variant import Variant

from quire.kernels import cache_write
from quire.kernels.cache_write_triton import cache_write_kernel


def variants() -> Iterator[Variant]:
    for num_kv_heads, head_dim in [(8, 128), (3, 80)]:
        yield Variant(
            name=f"cache_write bf16 {num_kv_heads}x{head_dim}",
            kernel=cache_write_kernel,
            types={"key": "*bf16", "value": "*bf16", "kv_cache": "*bf16", "slot_mapping": "*i64"},
            constants=cache_write.launch_constants(num_kv_heads, head_dim, 16),
            options={},
        )
