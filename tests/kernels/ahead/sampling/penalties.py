"""Variants of the penalties kernel to compile ahead of time."""

from collections.abc import Iterator

from kernel_variant import Variant

from quire.kernels.sampling.penalties import launch_constants
from quire.kernels.sampling.penalties_triton import penalties_kernel


def variants() -> Iterator[Variant]:
    types = {"logits": "*fp32", "slots": "*i64", "counts": "*i32", "offsets": "*i64", "drafts": "*i64"}
    types |= dict.fromkeys(("repetition", "frequency", "presence"), "*fp32")
    yield Variant("penalties", penalties_kernel, types, launch_constants(), {"enable_fp_fusion": False})
