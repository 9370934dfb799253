"""Variants of the block staging kernel to compile ahead."""

from collections.abc import Iterator

from kernel_variant import Variant

from quire.kernels.cache.block_staging import launch_constants
from quire.kernels.cache.block_staging_triton import block_staging_kernel


def variants() -> Iterator[Variant]:
    types = {"pointers": "*i64", "block_ids": "*i64", "staging": "*u8"}
    for into_blocks, word_bytes in ((False, 16), (True, 16), (True, 1)):
        yield Variant(
            name=f"block_staging {'scatter' if into_blocks else 'gather'} word={word_bytes}",
            kernel=block_staging_kernel,
            types=types,
            constants=launch_constants(into_blocks, word_bytes),
            options={},
        )
