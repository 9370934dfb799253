"""Variants of the rotary kernel to compile ahead."""

from collections.abc import Iterator

from kernel_variant import Variant

from quire.kernels.dense import rotary
from quire.kernels.dense.rotary_triton import rotary_kernel


def variants() -> Iterator[Variant]:
    for heads, head_dim, rotary_dim in [(12, 80, 32)]:
        yield Variant(
            name=f"rotary bf16 {heads}x{head_dim} {rotary_dim}",
            kernel=rotary_kernel,
            types={"x": "*bf16", "positions": "*i64", "table": "*fp32", "out": "*bf16"},
            constants=rotary.launch_constants(heads, head_dim, rotary_dim, in_place=False),
            options={},
        )
