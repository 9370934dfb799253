"""Variants of the bitmask kernel to compile ahead of time."""

from collections.abc import Iterator

from kernel_variant import Variant

from quire.kernels.sampling.token_bitmask import launch_constants
from quire.kernels.sampling.token_bitmask_triton import token_bitmask_kernel


def variants() -> Iterator[Variant]:
    types = {"logits": "*fp32", "rows": "*i64", "words": "*i32"}
    yield Variant("token bitmask", token_bitmask_kernel, types, launch_constants(), options={})
