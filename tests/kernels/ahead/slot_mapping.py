"""Variants of the slot mapping kernel to compile ahead."""

from collections.abc import Iterator

from kernel_variant import Variant

from quire.kernels import slot_mapping
from quire.kernels.slot_mapping_triton import slot_mapping_kernel


def variants() -> Iterator[Variant]:
    yield Variant(
        name="slot_mapping",
        kernel=slot_mapping_kernel,
        types={"query_start_loc": "*i32", "positions": "*i64", "block_table": "*i32", "slot_mapping": "*i64"},
        constants={"BLOCK_SIZE": 16, "TILE_TOKENS": slot_mapping.TILE_TOKENS, "PAD_SLOT": slot_mapping.PAD_SLOT_ID},
        options={},
    )
