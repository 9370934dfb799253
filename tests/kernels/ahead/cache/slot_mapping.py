"""Variants of the slot mapping kernel to compile ahead."""

from collections.abc import Iterator

from kernel_variant import Variant

from quire.kernels.cache.slot_mapping import launch_constants
from quire.kernels.cache.slot_mapping_triton import slot_mapping_kernel


def variants() -> Iterator[Variant]:
    pointers = {"query_start_loc": "*i32", "positions": "*i64", "tables": "*i64", "row_of": "*i32"}
    for has_row_of in (False, True):
        yield Variant(
            name=f"slot_mapping row_of={has_row_of}",
            kernel=slot_mapping_kernel,
            types=pointers | {"slot_mapping": "*i64"},
            constants=launch_constants(has_row_of),
            options={},
        )
