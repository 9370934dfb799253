"""Triton kernel of ``slot_mapping.compute_slot_mappings``. Only launchers may import it, because it imports triton."""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs
# Arguments have no annotations, because Triton compiles annotations too and rejects most of them.

import triton
import triton.language as tl


@triton.jit
def slots_of(
    tables, group, row, position, valid,
    PAD_SLOT: tl.constexpr,
):  # fmt: skip
    """Return the slots of ``position`` (int64 ``[TILE]``) in a group, or PAD_SLOT where ``valid`` is false.

    ``row`` is int64, a scalar or ``[TILE]``. ``tables`` is ``pointer_table.TableSet.descriptions``.
    """
    description = tables + group * 5
    block_table = tl.load(description).to(tl.pointer_type(tl.int32))
    row_stride = tl.load(description + 1)
    num_rows = tl.load(description + 2)
    max_blocks = tl.load(description + 3)
    block_size = tl.load(description + 4)
    block_index = position // block_size
    written = valid & (position >= 0) & (block_index < max_blocks) & (row >= 0) & (row < num_rows)
    block_id = tl.load(block_table + row * row_stride + block_index, mask=written, other=-1)
    # In 64 bits: 2**31 slots are 128 M blocks of 16, a number that small models on large machines approach.
    slot = block_id.to(tl.int64) * block_size + position % block_size
    return tl.where(written & (block_id >= 0), slot, PAD_SLOT)


# These change from step to step; without do_not_specialize Triton compiles variants for 1 and for multiples of 16.
@triton.jit(do_not_specialize=["num_rows", "num_tokens", "slot_group_stride"])
def slot_mapping_kernel(
    query_start_loc, positions, tables, row_of, slot_mapping, num_rows, num_tokens, slot_group_stride,
    HAS_ROW_OF: tl.constexpr, TILE_TOKENS: tl.constexpr, PAD_SLOT: tl.constexpr,
):  # fmt: skip
    """Program ``(r, g)`` maps the tokens of row ``r`` in group ``g``; program ``r = num_rows`` maps the padding."""
    index = tl.program_id(0)
    group = tl.program_id(1)
    is_row = index < num_rows
    start = tl.load(query_start_loc + index)
    end = tl.load(query_start_loc + index + 1, mask=is_row, other=num_tokens)
    row = index.to(tl.int64)
    if HAS_ROW_OF:
        row = tl.load(row_of + index, mask=is_row, other=-1).to(tl.int64)
    target = slot_mapping + group.to(tl.int64) * slot_group_stride
    for tile_start in range(start, end, TILE_TOKENS):
        token = tile_start + tl.arange(0, TILE_TOKENS)
        in_tile = (token < end) & (token < num_tokens)
        valid = in_tile & is_row
        position = tl.load(positions + token, mask=valid, other=0)
        slot = slots_of(tables, group, row, position, valid, PAD_SLOT)
        tl.store(target + token, slot, mask=in_tile)
