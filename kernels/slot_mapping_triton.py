"""The Triton kernel behind ``slot_mapping.compute_slot_mapping``; imports triton, so only that launcher imports it."""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs
# Arguments have no annotations, because Triton compiles annotations too and refuses most.

import triton
import triton.language as tl


# These change from step to step, and Triton would compile anew for a 1 and for a multiple of 16.
@triton.jit(do_not_specialize=["num_rows", "num_tokens", "max_blocks"])
def slot_mapping_kernel(
    query_start_loc,
    positions,
    block_table,
    slot_mapping,
    num_rows,
    num_tokens,
    max_blocks,
    block_table_stride,
    BLOCK_SIZE: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    PAD_SLOT: tl.constexpr,
):
    """Program ``r`` maps the tokens of row ``r``; program ``num_rows`` fills the padding."""
    row = tl.program_id(0)
    is_row = row < num_rows
    start = tl.load(query_start_loc + row)
    end = tl.load(query_start_loc + row + 1, mask=is_row, other=num_tokens)
    for tile_start in range(start, end, TILE_TOKENS):
        token = tile_start + tl.arange(0, TILE_TOKENS)
        in_tile = token < end
        position = tl.load(positions + token, mask=in_tile & is_row, other=0)
        block_index = position // BLOCK_SIZE
        in_table = in_tile & is_row & (position >= 0) & (block_index < max_blocks)
        block_id = tl.load(block_table + row * block_table_stride + block_index, mask=in_table, other=0)
        # In 64 bits: 2**31 slots are 128 M blocks of 16, which small models on large machines come near.
        slot = block_id.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
        tl.store(slot_mapping + token, tl.where(in_table, slot, PAD_SLOT), mask=in_tile)
