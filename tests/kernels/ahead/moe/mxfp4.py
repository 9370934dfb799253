"""A variant of the MXFP4 kernel to compile ahead."""

from collections.abc import Iterator

from kernel_variant import Variant

from quire.kernels.moe import mxfp4
from quire.kernels.moe.mxfp4_triton import dequantise_mxfp4_kernel


def variants() -> Iterator[Variant]:
    types = {"blocks": "*u8", "scales": "*u8", "out": "*bf16"}
    constants = {"TILE_GROUPS": mxfp4.TILE_GROUPS}
    yield Variant("mxfp4 to bf16", dequantise_mxfp4_kernel, types, constants, {})
