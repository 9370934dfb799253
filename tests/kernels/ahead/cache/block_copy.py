"""Variants of the block copy kernel to compile ahead."""

from collections.abc import Iterator

from kernel_variant import Variant

from quire.kernels.cache.block_copy import launch_constants
from quire.kernels.cache.block_copy_triton import block_copy_kernel


def variants() -> Iterator[Variant]:
    types = {"pointers": "*i64", "work": "*i64"}
    for columns, word_bytes in ((2, 16), (2, 1), (1, 16)):
        yield Variant(
            name=f"block_copy columns={columns} word={word_bytes}",
            kernel=block_copy_kernel,
            types=types,
            constants=launch_constants(columns, word_bytes),
            options={},
        )
