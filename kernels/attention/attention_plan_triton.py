"""Triton kernel that plans steps of few queries per row. Only ``attention_decode`` may import it: it imports triton."""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs
# Arguments have no annotations, because Triton compiles annotations too and rejects most of them.

import triton
import triton.language as tl

from quire.kernels.attention.paged_attention_triton import first_keys


@triton.jit(
    do_not_specialize=["num_rows", "max_pieces", "max_merges", "prefix_len", "num_prefix", "first_slot", "capacity"]
)
def plan_kernel(
    query_start_loc, seq_lens, pieces, merges, num_rows, max_pieces, max_merges, tile_tokens, window, prefix_len,
    num_prefix, first_slot, capacity, min_piece,
    WINDOWED: tl.constexpr, CHUNKED: tl.constexpr, KEY_ALIGN: tl.constexpr, TILE_ROWS: tl.constexpr,
):  # fmt: skip
    """Write the pieces and merges that ``attention_work.cut_tiles`` makes of one tile per row; launched as one program.

    Rows without tokens and rows with more than ``tile_tokens`` tokens get no piece.
    """
    row = tl.arange(0, TILE_ROWS)
    in_batch = row < num_rows
    step_token = tl.load(query_start_loc + row, mask=in_batch, other=0)
    query_len = tl.load(query_start_loc + row + 1, mask=in_batch, other=0) - step_token
    seq_len = tl.load(seq_lens + row, mask=in_batch, other=0)
    has_tile = (query_len > 0) & (query_len <= tile_tokens)
    position = seq_len - query_len
    first_key = tl.maximum(first_keys(position, window, WINDOWED, CHUNKED), prefix_len)

    start = first_key // KEY_ALIGN * KEY_ALIGN
    length = tl.where(has_tile & (seq_len > first_key), seq_len - start, 0)
    total = tl.sum(length.to(tl.int64), 0)
    aim = (((total + capacity - 1) // capacity + KEY_ALIGN - 1) // KEY_ALIGN * KEY_ALIGN).to(tl.int32)
    aim = tl.maximum(aim, min_piece)
    even = tl.maximum((2 * length + aim) // (2 * aim), 1)
    size = ((length + even - 1) // even + KEY_ALIGN - 1) // KEY_ALIGN * KEY_ALIGN
    size = tl.maximum(size, KEY_ALIGN)
    count = (length + size - 1) // size

    # Tiles with several pieces come first, because they are the long ones; the others follow in row order.
    partial = has_tile & ((count > 1) | (num_prefix > 0))
    own = tl.where(partial, count, 0)
    first_partial = tl.cumsum(own, 0) - own
    num_partial = tl.sum(own, 0)
    direct = tl.where(partial, 0, count)
    first_direct = num_partial + tl.cumsum(direct, 0) - direct
    first_piece = tl.where(partial, first_partial, first_direct)
    for number in range(tl.max(count, 0)):
        entry = pieces + (first_piece + number) * 5
        exists = (number < count) & (first_piece + number < max_pieces)
        key_start = start + number * size
        slot = tl.where(partial, first_slot + (first_piece + number) * tile_tokens, -1)
        tl.store(entry, row, mask=exists)
        tl.store(entry + 1, tl.zeros_like(row), mask=exists)
        tl.store(entry + 2, tl.maximum(key_start, first_key), mask=exists)
        tl.store(entry + 3, tl.minimum(key_start + size, seq_len), mask=exists)
        tl.store(entry + 4, slot, mask=exists)
    num_pieces = tl.sum(count, 0)
    for rest in range(num_pieces, max_pieces, TILE_ROWS):
        unused = rest + row < max_pieces
        tl.store(pieces + (rest + row) * 5 + 2, tl.zeros_like(row), mask=unused)
        tl.store(pieces + (rest + row) * 5 + 3, tl.zeros_like(row), mask=unused)

    merged = tl.where(partial, query_len, 0)
    first_merge = tl.cumsum(merged, 0) - merged
    for token in range(tile_tokens):
        entry = merges + (first_merge + token) * 4
        exists = (token < merged) & (first_merge + token < max_merges)
        tl.store(entry, step_token + token, mask=exists)
        tl.store(entry + 1, first_slot + first_piece * tile_tokens + token, mask=exists)
        tl.store(entry + 2, count + num_prefix, mask=exists)
        tl.store(entry + 3, tl.zeros_like(row) + tile_tokens, mask=exists)
    for rest in range(tl.sum(merged, 0), max_merges, TILE_ROWS):
        unused = rest + row < max_merges
        tl.store(merges + (rest + row) * 4 + 2, tl.zeros_like(row), mask=unused)
