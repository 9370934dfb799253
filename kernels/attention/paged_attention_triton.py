"""Triton kernels of ``paged_attention``: attention over a work list, and the merge of its partial results.

Only the launcher may import this module, because it imports triton. Scores are in units of log2, so that the softmax
can use exp2.
"""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs
# Arguments have no annotations, because Triton compiles annotations too and rejects most of them.

import triton
import triton.language as tl

from quire.kernels.common.fp8_triton import decode_fp8


@triton.jit
def finite_or_zero(maximum):
    """Return the number to subtract from scores: 0 for a maximum of -inf (no scores), because -inf would give NaN."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def load_tile(
    cache, key_start, piece_start, piece_end,
    MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, ROPE_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE_KEYS: tl.constexpr, TILE_DIMS: tl.constexpr, TILE_ROPE: tl.constexpr,
):  # fmt: skip
    """Load the keys and values of the tile at ``key_start``, each ``[TILE_KEYS, TILE_DIMS]`` in the cache's dtype.

    With latents, keys and values are the same numbers, after ROPE_DIM rotated ones, ``[TILE_KEYS, TILE_ROPE]``, which
    are returned too; otherwise the keys are returned once more.

    ``cache`` is a tuple: the row's block table, the head's cache, and the strides between keys and values, between
    blocks and between slots.
    """
    row_blocks, head_cache, kv_stride, block_stride, slot_stride = cache
    dim = tl.arange(0, TILE_DIMS)
    offset = tl.arange(0, TILE_KEYS)
    key = key_start + offset
    in_piece = (key >= piece_start) & (key < piece_end)
    if BLOCK_SIZE % TILE_KEYS == 0:
        # The whole tile is in one block, and at least one of its keys is in the piece.
        block_id = tl.load(row_blocks + key_start // BLOCK_SIZE).to(tl.int64)
        slot_offset = block_id * block_stride + (key_start % BLOCK_SIZE + offset) * slot_stride
    else:
        entry = row_blocks + key // BLOCK_SIZE
        if MASKED:
            block_id = tl.load(entry, mask=in_piece, other=0).to(tl.int64)
        else:
            block_id = tl.load(entry).to(tl.int64)
        slot_offset = block_id * block_stride + (key % BLOCK_SIZE) * slot_stride
    key_ptr = head_cache + slot_offset[:, None] + (ROPE_DIM + dim)[None, :]
    # Masked loads give 0: an unwritten slot may hold NaN, and 0 * NaN would make the sum NaN.
    if ROPE_DIM > 0:
        rope_dim = tl.arange(0, TILE_ROPE)
        load_key = (dim < HEAD_DIM)[None, :]
        load_rope = (rope_dim < ROPE_DIM)[None, :]
        if MASKED:
            load_key = load_key & in_piece[:, None]
            load_rope = load_rope & in_piece[:, None]
        k = tl.load(key_ptr, mask=load_key, other=0)
        v = k
        rope = tl.load(head_cache + slot_offset[:, None] + rope_dim[None, :], mask=load_rope, other=0)
    else:
        if MASKED:
            load_key = in_piece[:, None] & (dim < HEAD_DIM)[None, :]
            k = tl.load(key_ptr, mask=load_key, other=0)
            v = tl.load(key_ptr + kv_stride, mask=load_key, other=0)
        elif HEAD_DIM != TILE_DIMS:
            k = tl.load(key_ptr, mask=(dim < HEAD_DIM)[None, :], other=0)
            v = tl.load(key_ptr + kv_stride, mask=(dim < HEAD_DIM)[None, :], other=0)
        else:
            k = tl.load(key_ptr)
            v = tl.load(key_ptr + kv_stride)
        rope = k
    return k, v, rope


@triton.jit
def load_queries(
    query, query_offset, in_tile,
    HEAD_DIM: tl.constexpr, ROPE_DIM: tl.constexpr, TILE_DIMS: tl.constexpr, TILE_ROPE: tl.constexpr,
):  # fmt: skip
    """Load each lane's query, ``[TILE_LANES, TILE_DIMS]``, and its numbers for the rotated ones of latents."""
    dim = tl.arange(0, TILE_DIMS)
    loaded = in_tile[:, None] & (dim < HEAD_DIM)[None, :]
    q = tl.load(query + query_offset[:, None] + (ROPE_DIM + dim)[None, :], mask=loaded, other=0.0)
    if ROPE_DIM > 0:
        rope_dim = tl.arange(0, TILE_ROPE)
        in_rope = in_tile[:, None] & (rope_dim < ROPE_DIM)[None, :]
        q_rope = tl.load(query + query_offset[:, None] + rope_dim[None, :], mask=in_rope, other=0.0)
    else:
        q_rope = q
    return q, q_rope


@triton.jit
def query_span(query_start_loc, row, num_rows, SHARED: tl.constexpr):
    """Return the index of the row's first token in the step and the number of its tokens; SHARED: of the whole step."""
    if SHARED:
        start = 0
        end = tl.load(query_start_loc + num_rows)
    else:
        start = tl.load(query_start_loc + row)
        end = tl.load(query_start_loc + row + 1)
    return start, end - start


@triton.jit
def lane_positions(positions, seq_lens, row, token, query_len, in_tile, SHARED: tl.constexpr):
    """Return each lane's position. Token i of a query is at ``context_len + i``."""
    if SHARED:
        position = tl.load(positions + token, mask=in_tile, other=0)
    else:
        position = tl.load(seq_lens + row) - query_len + token
    return position


@triton.jit
def first_keys(position, window, WINDOWED: tl.constexpr, CHUNKED: tl.constexpr):
    """Return each lane's first visible key, by ``window``, which is the length of a chunk if CHUNKED."""
    if CHUNKED:
        first = position // window * window
    elif WINDOWED:
        first = tl.maximum(position - (window - 1), 0)
    else:
        first = tl.zeros_like(position)
    return first


@triton.jit
def highest_keys(position, last_keys, query_token, in_tile):
    """Return each lane's last visible key: its own, or that of its token."""
    highest = position
    if last_keys is not None:
        highest = tl.load(last_keys + query_token, mask=in_tile, other=0)
    return highest


@triton.jit
def visible_keys(key_start, key_end, highest, lowest, in_tile, WINDOWED: tl.constexpr, TILE_KEYS: tl.constexpr):
    """Return the piece's first key that any lane sees, and the keys to loop over.

    The range starts at a multiple of TILE_KEYS and is empty if no lane sees a key of the piece.
    """
    end = tl.minimum(key_end, tl.max(tl.where(in_tile, highest, -1)) + 1)
    if WINDOWED:
        # Block table entries left of all that the lanes see are undefined.
        key_start = tl.maximum(key_start, tl.min(tl.where(in_tile, lowest, key_end)))
    begin = key_start // TILE_KEYS * TILE_KEYS
    return key_start, begin, tl.where(key_start < end, end, begin)


@triton.jit
def attend_keys(
    state, queries, begin, end, piece_start, piece_end, highest, lowest, cache, factor, cap,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr, SOFT_CAP: tl.constexpr, CACHE: tl.constexpr,
    HEAD_DIM: tl.constexpr, ROPE_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE_KEYS: tl.constexpr,
    TILE_DIMS: tl.constexpr, TILE_ROPE: tl.constexpr,
):  # fmt: skip
    """Continue the online softmax of ``state`` over the keys ``[begin, end)`` of a row; return the new state.

    ``queries``: those for the keys of ``load_tile``, and for its rotated numbers of latents. ``begin`` is a multiple of
    TILE_KEYS. ``state`` holds per lane: the weighted sum of values, the largest score, and
    the sum of weights. MASKED must be set if some lane does not see all of these keys, or if some of them are outside
    ``[piece_start, piece_end)``, where neither keys nor block table entries are read.
    """
    acc, maximum, total = state
    q, q_rope = queries
    for key_start in range(begin, end, TILE_KEYS):
        k, v, rope = load_tile(
            cache, key_start, piece_start, piece_end,
            MASKED, HEAD_DIM, ROPE_DIM, BLOCK_SIZE, TILE_KEYS, TILE_DIMS, TILE_ROPE,
        )  # fmt: skip
        if CACHE != "same":
            k = decode_fp8(k, CACHE == "e5m2").to(q.dtype)
            v = decode_fp8(v, CACHE == "e5m2").to(q.dtype)
            rope = decode_fp8(rope, CACHE == "e5m2").to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if ROPE_DIM > 0:
            scores = tl.dot(q_rope, tl.trans(rope), scores, input_precision="ieee")
        scores = scores * factor
        if SOFT_CAP:
            # tanh(x) = 1 - 2 / (exp(2x) + 1), and 1 far before exp2 overflows.
            scores = cap - 2 * cap / (tl.exp2(tl.minimum(scores, 100.0)) + 1)
        if MASKED:
            key = key_start + tl.arange(0, TILE_KEYS)
            in_piece = (key >= piece_start) & (key < piece_end)
            visible = in_piece[None, :] & (key[None, :] <= highest[:, None])
            if WINDOWED:
                visible = visible & (key[None, :] >= lowest[:, None])
            scores = tl.where(visible, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        reference = finite_or_zero(new_maximum)
        weights = tl.exp2(scores - reference[:, None])
        shrink = tl.exp2(maximum - reference)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        maximum = new_maximum
    return acc, maximum, total


@triton.jit
def attend_segments(
    state, queries, begin, end, piece_start, highest, lowest, cache, factor, cap,
    SEGMENT: tl.constexpr, WINDOWED: tl.constexpr, SOFT_CAP: tl.constexpr, CACHE: tl.constexpr,
    HEAD_DIM: tl.constexpr, ROPE_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE_KEYS: tl.constexpr,
    TILE_DIMS: tl.constexpr, TILE_ROPE: tl.constexpr,
):  # fmt: skip
    """Attend to the keys ``[begin, end)`` in segments, cut at multiples of SEGMENT, and fold the results in order."""
    acc, maximum, total = state
    # Always with masks. Which tiles need none depends on the other lanes of the program, and the loop without masks may
    # round otherwise, so that a row's bits would depend on the batch.
    for segment in range(begin // SEGMENT * SEGMENT, end, SEGMENT):
        nothing = (tl.zeros_like(acc), tl.full(maximum.shape, float("-inf"), tl.float32), tl.zeros_like(total))
        part, part_maximum, part_total = attend_keys(
            nothing, queries, tl.maximum(begin, segment), tl.minimum(end, segment + SEGMENT), piece_start, end,
            highest, lowest, cache, factor, cap,
            True, WINDOWED, SOFT_CAP, CACHE, HEAD_DIM, ROPE_DIM, BLOCK_SIZE, TILE_KEYS, TILE_DIMS, TILE_ROPE,
        )  # fmt: skip
        acc, maximum, total = fold(acc, maximum, total, part, part_maximum, part_total)
    return acc, maximum, total


@triton.jit
def attend_whole(
    state, queries, begin, end, piece_start, in_tile, highest, lowest, cache, factor, cap,
    WHOLE_TILES: tl.constexpr, LEAD: tl.constexpr, WINDOWED: tl.constexpr, SOFT_CAP: tl.constexpr,
    CACHE: tl.constexpr, HEAD_DIM: tl.constexpr, ROPE_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE_KEYS: tl.constexpr, TILE_DIMS: tl.constexpr, TILE_ROPE: tl.constexpr,
):  # fmt: skip
    """Attend to the keys ``[begin, end)`` without segments.

    With WHOLE_TILES, tiles of keys that all lanes see are computed without masks, and those before and after with
    masks.
    """
    whole_begin, whole_end = begin, begin
    if WHOLE_TILES:
        if LEAD:
            seen_from = tl.maximum(piece_start, tl.max(tl.where(in_tile, lowest, 0)))
            whole_begin = tl.cdiv(seen_from, TILE_KEYS) * TILE_KEYS
        seen_to = tl.minimum(end, tl.min(tl.where(in_tile, highest, end)) + 1)
        whole_end = seen_to // TILE_KEYS * TILE_KEYS
        if whole_end <= whole_begin:
            whole_begin = begin
            whole_end = begin
        if LEAD:
            state = attend_keys(
                state, queries, begin, whole_begin, piece_start, end, highest, lowest, cache, factor, cap,
                True, WINDOWED, SOFT_CAP, CACHE, HEAD_DIM, ROPE_DIM, BLOCK_SIZE, TILE_KEYS, TILE_DIMS, TILE_ROPE,
            )  # fmt: skip
        state = attend_keys(
            state, queries, whole_begin, whole_end, piece_start, end, highest, lowest, cache, factor, cap,
            False, WINDOWED, SOFT_CAP, CACHE, HEAD_DIM, ROPE_DIM, BLOCK_SIZE, TILE_KEYS, TILE_DIMS, TILE_ROPE,
        )  # fmt: skip
    return attend_keys(
        state, queries, whole_end, end, piece_start, end, highest, lowest, cache, factor, cap,
        True, WINDOWED, SOFT_CAP, CACHE, HEAD_DIM, ROPE_DIM, BLOCK_SIZE, TILE_KEYS, TILE_DIMS, TILE_ROPE,
    )  # fmt: skip


@triton.jit
def fold(acc, maximum, total, part, part_maximum, part_total):
    """Add a partial result of the same lanes. Explicit fma makes rounding the same in every caller."""
    new_maximum = tl.maximum(maximum, part_maximum)
    reference = finite_or_zero(new_maximum)
    old, new = tl.exp2(maximum - reference), tl.exp2(part_maximum - reference)
    acc = tl.fma(acc, tl.broadcast_to(old[:, None], acc.shape), part * new[:, None])
    return acc, new_maximum, tl.fma(total, old, part_total * new)


@triton.jit
def finish(acc, maximum, total, sinks, head, in_tile):
    """Divide the weighted sum by the sum of weights (0 without a visible key); a sink is a score without a value."""
    if sinks is not None:
        sink = tl.load(sinks + head, mask=in_tile, other=0.0) * 1.4426950408889634
        new_maximum = tl.maximum(maximum, sink)
        shrink = tl.exp2(maximum - new_maximum)
        total = tl.fma(total, shrink, tl.exp2(sink - new_maximum))
        acc = acc * shrink[:, None]
    return acc / tl.where(total > 0, total, 1.0)[:, None]


@triton.jit(do_not_specialize=["num_rows", "tile_tokens", "lane_chunks"])
def attention_kernel(
    query, kv_cache, out, sinks, k_scale, v_scale,
    block_table, query_start_loc, seq_lens, positions, last_keys, pieces, partial_acc, partial_stats,
    factor, cap, window, num_rows, num_kv_heads, tile_tokens, lane_chunks,
    query_token_stride, query_head_stride,
    cache_kv_stride, cache_block_stride, cache_slot_stride, cache_head_stride,
    block_table_stride, out_token_stride, out_head_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, ROPE_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOWED: tl.constexpr, CHUNKED: tl.constexpr, SOFT_CAP: tl.constexpr, CACHE: tl.constexpr,
    K_SCALE_STRIDE: tl.constexpr, V_SCALE_STRIDE: tl.constexpr,
    SHARED: tl.constexpr, LEAD: tl.constexpr, WHOLE_TILES: tl.constexpr, SEGMENT: tl.constexpr,
    TILE_LANES: tl.constexpr, TILE_KEYS: tl.constexpr, TILE_DIMS: tl.constexpr, TILE_ROPE: tl.constexpr,
):  # fmt: skip
    """Compute one chunk of the lanes of one piece (``attention_work.PIECE_COLUMNS``), for one KV head, per program.

    A lane is one query vector: one token with one of the GROUP query heads that share the KV head. A tile has
    ``tile_tokens * GROUP`` lanes, of which a program computes TILE_LANES.

    SHARED: tokens are counted in the step instead of in a row, and ``positions`` holds their positions. WHOLE_TILES:
    keys that all lanes see are computed in a loop without masks; a masked loop follows and, with LEAD, another precedes
    it. SEGMENT: keys are attended to in segments, cut at its multiples, and folded in order; 0: no segments. ROPE_DIM:
    of latents, the numbers before those that are the value; 0: values are separate.
    """
    kv_head = tl.program_id(0) % num_kv_heads
    chunk = tl.program_id(0) // num_kv_heads % lane_chunks
    piece = pieces + (tl.program_id(0) // num_kv_heads // lane_chunks) * 5
    key_start, key_end = tl.load(piece + 2), tl.load(piece + 3)
    if key_end <= key_start:
        return
    row, tile_start, slot = tl.load(piece), tl.load(piece + 1), tl.load(piece + 4)
    row_start, query_len = query_span(query_start_loc, row, num_rows, SHARED)
    lane_start = chunk * TILE_LANES
    if tile_start + lane_start // GROUP >= query_len:
        return

    lane = lane_start + tl.arange(0, TILE_LANES)
    token, head = tile_start + lane // GROUP, kv_head * GROUP + lane % GROUP
    # Lanes outside the tile or the row are computed with a query of zeros, and not stored.
    in_tile = (lane < tile_tokens * GROUP) & (token < query_len)
    dim = tl.arange(0, TILE_DIMS)
    stored = in_tile[:, None] & (dim < HEAD_DIM)[None, :]
    query_token = (row_start + token).to(tl.int64)
    query_offset = query_token * query_token_stride + head * query_head_stride
    queries = load_queries(query, query_offset, in_tile, HEAD_DIM, ROPE_DIM, TILE_DIMS, TILE_ROPE)

    position = lane_positions(positions, seq_lens, row, token, query_len, in_tile, SHARED)
    lowest = first_keys(position, window, WINDOWED, CHUNKED)
    highest = highest_keys(position, last_keys, query_token, in_tile)
    key_start, begin, end = visible_keys(key_start, key_end, highest, lowest, in_tile, WINDOWED, TILE_KEYS)

    if k_scale is not None:
        factor = factor * tl.load(k_scale + kv_head * K_SCALE_STRIDE)
    row_blocks = block_table + row.to(tl.int64) * block_table_stride
    head_cache = kv_cache + kv_head.to(tl.int64) * cache_head_stride
    cache = (row_blocks, head_cache, cache_kv_stride, cache_block_stride, cache_slot_stride)
    maximum = tl.full([TILE_LANES], float("-inf"), tl.float32)
    nothing = (tl.zeros([TILE_LANES, TILE_DIMS], tl.float32), maximum, tl.zeros([TILE_LANES], tl.float32))
    if SEGMENT > 0:
        acc, maximum, total = attend_segments(
            nothing, queries, begin, end, key_start, highest, lowest, cache, factor, cap,
            SEGMENT, WINDOWED, SOFT_CAP, CACHE, HEAD_DIM, ROPE_DIM, BLOCK_SIZE, TILE_KEYS, TILE_DIMS, TILE_ROPE,
        )  # fmt: skip
    else:
        acc, maximum, total = attend_whole(
            nothing, queries, begin, end, key_start, in_tile, highest, lowest, cache, factor, cap,
            WHOLE_TILES, LEAD, WINDOWED, SOFT_CAP, CACHE,
            HEAD_DIM, ROPE_DIM, BLOCK_SIZE, TILE_KEYS, TILE_DIMS, TILE_ROPE,
        )  # fmt: skip

    if v_scale is not None:
        acc = acc * tl.load(v_scale + kv_head * V_SCALE_STRIDE)
    if slot < 0:
        result = finish(acc, maximum, total, sinks, head, in_tile)
        out_offset = query_token * out_token_stride + head * out_head_stride
        tl.store(out + out_offset[:, None] + dim[None, :], result.to(out.dtype.element_ty), mask=stored)
    else:
        slot_head = (slot + token - tile_start).to(tl.int64) * (num_kv_heads * GROUP) + head
        tl.store(partial_acc + slot_head[:, None] * HEAD_DIM + dim[None, :], acc, mask=stored)
        tl.store(partial_stats + slot_head * 2, maximum, mask=in_tile)
        tl.store(partial_stats + slot_head * 2 + 1, total, mask=in_tile)


@triton.jit(do_not_specialize=["num_prefix", "prefix_stride"])
def merge_kernel(
    out, sinks, partial_acc, partial_stats, merges, num_heads, num_prefix, prefix_stride, out_token_stride,
    out_head_stride,
    HEAD_DIM: tl.constexpr, TILE_PARTIALS: tl.constexpr, TILE_DIMS: tl.constexpr,
):  # fmt: skip
    """Program ``(i, h)`` sums the partials of merge ``i`` (``attention_work.MERGE_COLUMNS``) for head ``h``, in order.

    The first ``num_prefix`` partials of token t are in the slots ``t``, ``t + prefix_stride`` and so on.
    """
    merge = merges + tl.program_id(0) * 4
    num_partials = tl.load(merge + 2)
    if num_partials == 0:
        return
    token = tl.load(merge)
    first_slot = tl.load(merge + 1)
    slot_stride = tl.load(merge + 3)
    head = tl.program_id(1)
    dim = tl.arange(0, TILE_DIMS)
    in_head = (dim < HEAD_DIM)[None, :]
    maximum = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, TILE_DIMS], tl.float32)
    for start in range(0, num_partials, TILE_PARTIALS):
        number = start + tl.arange(0, TILE_PARTIALS)
        exists = number < num_partials
        own = first_slot + (number - num_prefix) * slot_stride
        slot = tl.where(number < num_prefix, token + number * prefix_stride, own)
        slot_head = slot.to(tl.int64) * num_heads + head
        maxima = tl.load(partial_stats + slot_head * 2, mask=exists, other=float("-inf"))
        totals = tl.load(partial_stats + slot_head * 2 + 1, mask=exists, other=0.0)
        load_part = exists[:, None] & in_head
        parts = tl.load(partial_acc + slot_head[:, None] * HEAD_DIM + dim[None, :], mask=load_part, other=0.0)
        if TILE_PARTIALS == 1:
            acc, maximum, total = fold(acc, maximum, total, parts, maxima, totals)
        else:
            part_maximum = tl.max(maxima, 0)
            weights = tl.exp2(maxima - finite_or_zero(part_maximum))
            part = tl.sum(parts * weights[:, None], 0)[None, :]
            part_total = tl.sum(totals * weights, 0)
            acc, maximum, total = fold(acc, maximum, total, part, part_maximum, part_total)
    only = tl.arange(0, 1)
    result = finish(acc, maximum, total, sinks, head + only, only == 0)
    target = out + token.to(tl.int64) * out_token_stride + head * out_head_stride + dim[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=in_head)
