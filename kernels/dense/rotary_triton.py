"""The Triton kernel behind ``rotary.rotary``; imports triton, so only that launcher imports it."""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs
# Arguments have no annotations, because Triton compiles annotations too and refuses most.

import triton
import triton.language as tl


@triton.jit
def rotary_kernel(
    x,
    positions,
    table,
    out,
    heads,
    max_position,
    x_token_stride,
    x_head_stride,
    out_token_stride,
    out_head_stride,
    table_kind_stride,
    table_position_stride,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    TILE_HALF: tl.constexpr,
    TILE_KEPT: tl.constexpr,
):
    """Program ``(t, i)`` rotates the ``i``-th TILE_HEADS heads of token ``t``."""
    HALF: tl.constexpr = ROTARY_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS)
    in_heads = head < heads
    dim = tl.arange(0, TILE_HALF)
    in_half = dim < HALF
    position = tl.load(positions + token)
    in_table = in_half & (position >= 0) & (position < max_position)
    # The second halves: there the sines are not negated.
    angle = table + position * table_position_stride + HALF + dim
    cos = tl.load(angle, mask=in_table, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(angle + table_kind_stride, mask=in_table, other=0.0).to(tl.float32)[None, :]

    mask = in_heads[:, None] & in_half[None, :]
    source = x + token * x_token_stride + (head * x_head_stride)[:, None] + dim[None, :]
    target = out + token * out_token_stride + (head * out_head_stride)[:, None] + dim[None, :]
    # Both halves are read before either is written, by the thread that writes them: out may be x.
    first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(target, (first * cos - second * sin).to(out.dtype.element_ty), mask=mask)
    tl.store(target + HALF, (second * cos + first * sin).to(out.dtype.element_ty), mask=mask)

    if TILE_KEPT > 0:
        kept = ROTARY_DIM + tl.arange(0, TILE_KEPT)
        mask = in_heads[:, None] & (kept < HEAD_DIM)[None, :]
        source = x + token * x_token_stride + (head * x_head_stride)[:, None] + kept[None, :]
        target = out + token * out_token_stride + (head * out_head_stride)[:, None] + kept[None, :]
        tl.store(target, tl.load(source, mask=mask, other=0.0), mask=mask)
