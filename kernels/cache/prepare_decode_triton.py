"""Triton kernels of ``prepare_decode``. Only its launchers may import it, because it imports triton."""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs
# Arguments have no annotations, because Triton compiles annotations too and rejects most of them.

import triton
import triton.language as tl

from quire.kernels.cache.slot_mapping_triton import slots_of


@triton.jit(do_not_specialize=["num_rows", "max_rows", "slot_group_stride"])
def prepare_decode_kernel(
    row_of, last_sampled, num_computed, tables, input_ids, positions, seq_lens, query_start_loc, slot_mapping,
    num_rows, max_rows, slot_group_stride,
    NUM_GROUPS: tl.constexpr, TILE_ROWS: tl.constexpr, PAD_SLOT: tl.constexpr,
):  # fmt: skip
    """Program ``i`` prepares the ``i``-th tile of rows in all groups; ``tables`` is ``TableSet.descriptions``."""
    lane = tl.arange(0, TILE_ROWS)
    index = tl.program_id(0) * TILE_ROWS + lane
    in_batch = index < num_rows
    # Padding has no tokens. Every program counts the live rows itself: a batch is a few tiles, and programs of a grid
    # cannot wait for each other.
    num_live = 0
    for tile_start in range(0, num_rows, TILE_ROWS):
        other = tl.load(row_of + tile_start + lane, mask=tile_start + lane < num_rows, other=-1)
        num_live += tl.sum(((other >= 0) & (other < max_rows)).to(tl.int32))
    tl.store(query_start_loc + index, tl.minimum(index, num_live), mask=index <= num_rows)

    row = tl.load(row_of + index, mask=in_batch, other=-1).to(tl.int64)
    live = (row >= 0) & (row < max_rows)
    token = tl.load(last_sampled + row, mask=live, other=0)
    position = tl.load(num_computed + row, mask=live, other=0).to(tl.int64)
    tl.store(input_ids + index, token, mask=in_batch)
    tl.store(positions + index, position, mask=in_batch)
    tl.store(seq_lens + index, tl.where(live, position + 1, 0).to(tl.int32), mask=in_batch)
    for group in range(NUM_GROUPS):
        slot = slots_of(tables, group, row, position, live, PAD_SLOT)
        tl.store(slot_mapping + group * slot_group_stride + index, slot, mask=in_batch)


@triton.jit(do_not_specialize=["num_rows", "max_rows"])
def advance_decode_kernel(
    row_of, sampled, last_sampled, num_computed, num_rows, max_rows,
    TILE_ROWS: tl.constexpr,
):  # fmt: skip
    """Program ``i`` advances the ``i``-th tile of rows. No two lanes have the same row, so no increment is lost."""
    index = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    row = tl.load(row_of + index, mask=index < num_rows, other=-1).to(tl.int64)
    live = (row >= 0) & (row < max_rows)
    token = tl.load(sampled + index, mask=live, other=0)
    computed = tl.load(num_computed + row, mask=live, other=0)
    tl.store(last_sampled + row, token, mask=live)
    tl.store(num_computed + row, computed + 1, mask=live)
