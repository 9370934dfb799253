"""The Triton kernel behind ``paged_attention.paged_attention``; imports triton, so only that launcher imports it."""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs
# Arguments have no annotations, because Triton compiles annotations too and refuses most.

import triton
import triton.language as tl


@triton.jit
def paged_attention_kernel(
    query,
    kv_cache,
    block_table,
    query_start_loc,
    seq_lens,
    tiles,
    out,
    scale_log2,
    query_token_stride,
    query_head_stride,
    cache_kv_stride,
    cache_block_stride,
    cache_slot_stride,
    cache_head_stride,
    block_table_stride,
    out_token_stride,
    out_head_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_LANES: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    TILE_DIMS: tl.constexpr,
):
    """Program ``(i, h, c)``: the ``c``-th chunk of lanes of tile ``i``, for KV head ``h``.

    A lane is one query vector: one token with one of the GROUP query heads that share the KV head. A tile has
    ``TILE_TOKENS * GROUP`` lanes, of which a program takes TILE_LANES. ``scale_log2`` has log2(e) in it, so that the
    softmax can use exp2.
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = tl.load(tiles + 2 * tile)
    tile_start = tl.load(tiles + 2 * tile + 1)
    row_start = tl.load(query_start_loc + row)
    query_len = tl.load(query_start_loc + row + 1) - row_start
    seq_len = tl.load(seq_lens + row)

    lane_start = tl.program_id(2) * TILE_LANES
    if tile_start + lane_start // GROUP >= query_len:
        return
    lane = lane_start + tl.arange(0, TILE_LANES)
    token = tile_start + lane // GROUP
    head = kv_head * GROUP + lane % GROUP
    # Lanes outside the tile or the row are computed along with zeros for a query, and not stored.
    in_tile = (lane < TILE_TOKENS * GROUP) & (token < query_len)
    dim = tl.arange(0, TILE_DIMS)
    in_head = dim < HEAD_DIM
    load_query = in_tile[:, None] & in_head[None, :]
    query_token = (row_start + token).to(tl.int64)
    query_offset = query_token * query_token_stride + head * query_head_stride
    q = tl.load(query + query_offset[:, None] + dim[None, :], mask=load_query, other=0.0)

    # Token i of the query stands at position context_len + i and sees the keys up to itself.
    context_len = seq_len - query_len
    position = context_len + token
    last_in_tile = tl.minimum((lane_start + TILE_LANES - 1) // GROUP, TILE_TOKENS - 1)
    num_keys = context_len + tl.minimum(tile_start + last_in_tile + 1, query_len)

    # Key 0 is in the first tile of keys and every lane sees it, so that the maximum is finite from then on.
    maximum = tl.full([TILE_LANES], float("-inf"), tl.float32)
    total = tl.zeros([TILE_LANES], tl.float32)
    acc = tl.zeros([TILE_LANES, TILE_DIMS], tl.float32)
    row_blocks = block_table + row.to(tl.int64) * block_table_stride
    head_cache = kv_cache + kv_head.to(tl.int64) * cache_head_stride
    for key_start in range(0, num_keys, TILE_KEYS):
        key_position = key_start + tl.arange(0, TILE_KEYS)
        in_row = key_position < num_keys
        block_id = tl.load(row_blocks + key_position // BLOCK_SIZE, mask=in_row, other=0).to(tl.int64)
        slot_offset = block_id * cache_block_stride + (key_position % BLOCK_SIZE) * cache_slot_stride
        key_ptr = head_cache + slot_offset[:, None] + dim[None, :]
        # Zeros and not what the memory holds: 0 times a NaN of an unwritten slot would be a NaN in the sum.
        load_key = in_row[:, None] & in_head[None, :]
        k = tl.load(key_ptr, mask=load_key, other=0.0)
        v = tl.load(key_ptr + cache_kv_stride, mask=load_key, other=0.0)

        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        # A stored lane's position is below num_keys, so that this also hides the keys that were not loaded.
        scores = tl.where(key_position[None, :] <= position[:, None], scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.exp2(scores - new_maximum[:, None])
        shrink = tl.exp2(maximum - new_maximum)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        maximum = new_maximum

    out_offset = query_token * out_token_stride + head * out_head_stride
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + out_offset[:, None] + dim[None, :], result, mask=load_query)
