"""Variants of the norm kernel to compile ahead of time."""

from collections.abc import Iterator

from kernel_variant import Variant

from quire.kernels.dense import rms_norm
from quire.kernels.dense.rms_norm_triton import rms_norm_kernel


def variants() -> Iterator[Variant]:
    for width, add in [(128, False), (rms_norm.MAX_WIDTH, True)]:
        yield Variant(
            name=f"rms_norm bf16 {width}" + (" with sum" if add else ""),
            kernel=rms_norm_kernel,
            types={"x": "*bf16", "residual": "*bf16", "weight": "*bf16", "out": "*bf16", "eps": "fp32"},
            constants=rms_norm.launch_constants(width, add, True),
            options=rms_norm.launch_options(width),
        )
