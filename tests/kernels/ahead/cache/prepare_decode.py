"""Variants of the prepare decode kernels to compile ahead."""

from collections.abc import Iterator

from kernel_variant import Variant

from quire.kernels.cache.prepare_decode import TILE_ROWS, launch_constants
from quire.kernels.cache.prepare_decode_triton import advance_decode_kernel, prepare_decode_kernel


def variants() -> Iterator[Variant]:
    state = {"row_of": "*i32", "last_sampled": "*i64", "num_computed": "*i32"}
    inputs = dict.fromkeys(("input_ids", "positions", "slot_mapping", "tables"), "*i64")
    inputs |= dict.fromkeys(("seq_lens", "query_start_loc"), "*i32")
    for num_groups in (1, 3):
        yield Variant(
            name=f"prepare_decode groups={num_groups}",
            kernel=prepare_decode_kernel,
            types=state | inputs,
            constants=launch_constants(num_groups),
            options={},
        )
    yield Variant(
        "advance_decode", advance_decode_kernel, state | {"sampled": "*i64"}, {"TILE_ROWS": TILE_ROWS}, options={}
    )
