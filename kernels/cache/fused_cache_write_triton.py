"""Triton kernel of ``fused_cache_write``. Only that launcher may import it, because it imports triton."""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs
# Arguments have no annotations, because Triton compiles annotations too and rejects most of them.

import triton
import triton.language as tl

from quire.kernels.common.fp8_triton import encode_fp8


@triton.jit
def divisor_of(scale, head, PER_HEAD: tl.constexpr):
    """Return the divisor of numbers stored in the cache: one number, or with PER_HEAD one per ``head``.

    ``scale`` is a pointer, or None for 1. It is read for every ``head``, so all of them must exist.
    """
    if scale is None:
        return 1.0
    else:
        return tl.load(scale + head) if PER_HEAD else tl.load(scale)


@triton.jit
def as_stored(x, divisor, FP8: tl.constexpr, SCALED: tl.constexpr, E5M2: tl.constexpr):
    """Return ``x`` as the cache stores it: encoded as bytes if FP8, otherwise unchanged, for ``tl.store`` to cast."""
    if FP8:
        x = x.to(tl.float32)
        if SCALED:
            # Triton's `/` is not rounded as IEEE requires: the content would depend on the kernel that wrote it.
            x = tl.div_rn(x, tl.broadcast_to(divisor, x.shape))
        x = encode_fp8(x, E5M2)
    return x


@triton.jit
def normalise(low, high, rest, weight, eps, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, REST_TILE: tl.constexpr):
    """Return RMS-normalised heads times the weights, in float32. Elements outside a head must be 0."""
    square = tl.sum(low * low, 1) + tl.sum(high * high, 1)
    if REST_TILE > 0:
        square += tl.sum(rest * rest, 1)
    factor = tl.rsqrt(square / HEAD_DIM + eps)[:, None]
    pair = tl.arange(0, low.shape[1])
    in_half = pair < HALF
    low = low * factor * tl.load(weight + pair, mask=in_half, other=0.0)[None, :]
    high = high * factor * tl.load(weight + HALF + pair, mask=in_half, other=0.0)[None, :]
    if REST_TILE > 0:
        dim = 2 * HALF + tl.arange(0, REST_TILE)
        rest = rest * factor * tl.load(weight + dim, mask=dim < HEAD_DIM, other=0.0)[None, :]
    return low, high, rest


@triton.jit
def store_heads(target, low, high, rest, stored, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, REST_TILE: tl.constexpr):
    """Store heads at the pointers ``target`` (one per row) where ``stored``."""
    pair = tl.arange(0, low.shape[1])
    mask = stored[:, None] & (pair < HALF)[None, :]
    pointer = target[:, None] + pair[None, :]
    tl.store(pointer, low, mask=mask)
    tl.store(pointer + HALF, high, mask=mask)
    if REST_TILE > 0:
        dim = 2 * HALF + tl.arange(0, REST_TILE)
        tl.store(target[:, None] + dim[None, :], rest, mask=stored[:, None] & (dim < HEAD_DIM)[None, :])


# This changes from step to step; without do_not_specialize Triton compiles variants for 1 and for multiples of 16.
@triton.jit(do_not_specialize=["num_tokens"])
def fused_cache_write_kernel(
    qkv, query_out, kv_cache, slot_mapping, key_out, value_out, q_norm, k_norm, rotary_table, positions, k_scale,
    v_scale, norm_eps, num_tokens, num_slots, max_position, table_sine_stride, table_position_stride,
    qkv_token_stride, qkv_head_stride, cache_kv_stride, cache_block_stride, cache_slot_stride, cache_head_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    HALF_TILE: tl.constexpr, REST_TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr,
    FP8: tl.constexpr, SCALED: tl.constexpr, E5M2: tl.constexpr, K_SCALE_PER_HEAD: tl.constexpr,
    V_SCALE_PER_HEAD: tl.constexpr,
):  # fmt: skip
    """Process ROWS rows per program, each one head of one token: first all query rows, then keys, then values.

    A row is loaded as ``low`` and ``high``, which rotate with each other, and ``rest``, which does not rotate.
    """
    query_programs = tl.cdiv(num_tokens * NUM_HEADS, ROWS)
    key_programs = tl.cdiv(num_tokens * NUM_KV_HEADS, ROWS)
    program = tl.program_id(0)
    is_query = program < query_programs
    is_value = program >= query_programs + key_programs
    heads = tl.where(is_query, NUM_HEADS, NUM_KV_HEADS)
    first_head = tl.where(is_query, 0, tl.where(is_value, NUM_HEADS + NUM_KV_HEADS, NUM_HEADS))
    first_program = tl.where(is_query, 0, tl.where(is_value, query_programs + key_programs, query_programs))
    row = (program - first_program) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_tokens * heads
    # Rows past the last count as token 0, so that reads for them stay inside the tensors.
    row = tl.where(is_row, row, 0)
    token, head = row // heads, row % heads

    pair = tl.arange(0, HALF_TILE)
    in_row = is_row[:, None] & (pair < HALF)[None, :]
    source = qkv + token.to(tl.int64) * qkv_token_stride + (first_head + head) * qkv_head_stride
    low = tl.load(source[:, None] + pair[None, :], mask=in_row, other=0.0)
    high = tl.load(source[:, None] + HALF + pair[None, :], mask=in_row, other=0.0)
    rest = low
    if REST_TILE > 0:
        rest_dim = 2 * HALF + tl.arange(0, REST_TILE)
        in_rest = is_row[:, None] & (rest_dim < HEAD_DIM)[None, :]
        rest = tl.load(source[:, None] + rest_dim[None, :], mask=in_rest, other=0.0)

    if program < query_programs + key_programs:
        x, y, z = low.to(tl.float32), high.to(tl.float32), rest.to(tl.float32)
        if q_norm is not None:
            weight = tl.where(is_query, q_norm, k_norm)
            x, y, z = normalise(x, y, z, weight, norm_eps, HEAD_DIM, HALF, REST_TILE)
        if rotary_table is not None:
            position = tl.load(positions + token)
            known = in_row & ((position >= 0) & (position < max_position))[:, None]
            angle = rotary_table + (position * table_position_stride)[:, None] + pair[None, :]
            cos = tl.load(angle, mask=known, other=1.0).to(tl.float32)
            # Only the first half of the sines is negated, so the second half is read.
            sin = tl.load(angle + table_sine_stride + HALF, mask=known, other=0.0).to(tl.float32)
            x, y = x * cos - y * sin, y * cos + x * sin
        # Rounded before the cache write, so that attention over key_out sees the same keys as later reads of the cache.
        low, high, rest = x.to(low.dtype), y.to(high.dtype), z.to(rest.dtype)

    if is_query:
        store_heads(query_out + row.to(tl.int64) * HEAD_DIM, low, high, rest, is_row, HEAD_DIM, HALF, REST_TILE)
    elif NUM_KV_HEADS > 0:
        if key_out is not None:
            fresh = tl.where(is_value, value_out, key_out) + row.to(tl.int64) * HEAD_DIM
            store_heads(fresh, low, high, rest, is_row, HEAD_DIM, HALF, REST_TILE)
        divisor = 1.0
        if SCALED:
            k_divisor = divisor_of(k_scale, head, K_SCALE_PER_HEAD)
            divisor = tl.where(is_value, divisor_of(v_scale, head, V_SCALE_PER_HEAD), k_divisor)
            divisor = tl.broadcast_to(divisor, (ROWS,))[:, None]
        kept_low = as_stored(low, divisor, FP8, SCALED, E5M2)
        kept_high = as_stored(high, divisor, FP8, SCALED, E5M2)
        kept_rest = as_stored(rest, divisor, FP8, SCALED, E5M2)
        slot = tl.load(slot_mapping + token)
        place = (slot // BLOCK_SIZE) * cache_block_stride + (slot % BLOCK_SIZE) * cache_slot_stride
        place += head * cache_head_stride
        target = kv_cache + place + tl.where(is_value, cache_kv_stride, 0)
        written = is_row & (slot >= 0) & (slot < num_slots)
        store_heads(target, kept_low, kept_high, kept_rest, written, HEAD_DIM, HALF, REST_TILE)
