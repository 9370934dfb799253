"""Variants of the staged write kernel to compile ahead."""

from collections.abc import Iterator

from kernel_variant import Variant

from quire.kernels.cache.staged_write import launch_constants
from quire.kernels.cache.staged_write_triton import staged_write_kernel


def variants() -> Iterator[Variant]:
    types = {"packed": "*i32", "tables": "*i64"}
    yield Variant("staged_write", staged_write_kernel, types, launch_constants(), options={})
