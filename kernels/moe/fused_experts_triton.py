"""The Triton kernels of ``fused_experts``. Imports triton, so only that launcher imports it."""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs
# Arguments have no annotations, because Triton compiles annotations too and rejects most of them.

import triton
import triton.language as tl

from quire.kernels.dense.gated_activation_triton import activate


@triton.jit
def gate_up_kernel(
    x, w13, bias13, gated, pairs, tile_experts, top_k, x_token_stride, w13_expert_stride, w13_row_stride,
    bias13_stride,
    HIDDEN_SIZE: tl.constexpr, WIDTH: tl.constexpr, TILE_PAIRS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    TILE_INNER: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Program ``(n, i)`` computes the ``n``-th tile of columns of the activated hidden states of tile ``i``'s pairs.

    ``gated`` is contiguous ``[num_pairs, width]``. The tiles of an expert are consecutive, and programs of one tile run
    at the same time, so that its tokens and its expert's weights stay in the L2 cache.
    """
    tile = tl.program_id(1)
    expert = tl.load(tile_experts + tile)
    if expert < 0:
        return
    pair = tl.load(pairs + tile * TILE_PAIRS + tl.arange(0, TILE_PAIRS))
    has_pair = pair >= 0
    token = (tl.where(has_pair, pair, 0) // top_k).to(tl.int64)
    column = tl.program_id(0) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    in_width = column < WIDTH
    # Row of a column's gate weights. The up weights are WIDTH rows further, or in the next row if interleaved.
    gate_row = column * 2 if ACTIVATION == 3 else column
    up_step = 1 if ACTIVATION == 3 else WIDTH
    inner = tl.arange(0, TILE_INNER)
    x_ptr = x + (token * x_token_stride)[:, None] + inner[None, :]
    gate_ptr = w13 + expert.to(tl.int64) * w13_expert_stride + inner[:, None]
    gate_ptr += (gate_row.to(tl.int64) * w13_row_stride)[None, :]
    up_ptr = gate_ptr + tl.cast(up_step, tl.int64) * w13_row_stride
    gate = tl.zeros([TILE_PAIRS, TILE_COLUMNS], tl.float32)
    up = tl.zeros([TILE_PAIRS, TILE_COLUMNS], tl.float32)
    for start in range(0, HIDDEN_SIZE, TILE_INNER):
        in_inner = start + inner < HIDDEN_SIZE
        tokens = tl.load(x_ptr + start, mask=has_pair[:, None] & in_inner[None, :], other=0.0)
        mask = in_inner[:, None] & in_width[None, :]
        w = tl.load(gate_ptr + start, mask=mask, other=0.0).to(tokens.dtype)
        gate = tl.dot(tokens, w, gate, input_precision="ieee")
        w = tl.load(up_ptr + start, mask=mask, other=0.0).to(tokens.dtype)
        up = tl.dot(tokens, w, up, input_precision="ieee")
    if HAS_BIAS:
        bias = bias13 + expert * bias13_stride + gate_row
        gate += tl.load(bias, mask=in_width, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias + up_step, mask=in_width, other=0.0).to(tl.float32)[None, :]
    result = activate(gate, up, ACTIVATION).to(gated.dtype.element_ty)
    target = gated + (pair.to(tl.int64) * WIDTH)[:, None] + column[None, :]
    tl.store(target, result, mask=has_pair[:, None] & in_width[None, :])


@triton.jit
def down_kernel(
    gated, w2, bias2, weights, results, pairs, tile_experts, w2_expert_stride, w2_row_stride, bias2_stride,
    HIDDEN_SIZE: tl.constexpr, WIDTH: tl.constexpr, TILE_PAIRS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    TILE_INNER: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Program ``(n, i)`` computes the ``n``-th tile of columns of tile ``i``'s pairs, times their routing weights."""
    tile = tl.program_id(1)
    expert = tl.load(tile_experts + tile)
    if expert < 0:
        return
    pair = tl.load(pairs + tile * TILE_PAIRS + tl.arange(0, TILE_PAIRS))
    has_pair = pair >= 0
    row = tl.where(has_pair, pair, 0).to(tl.int64)
    column = tl.program_id(0) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    in_hidden = column < HIDDEN_SIZE
    inner = tl.arange(0, TILE_INNER)
    gated_ptr = gated + (row * WIDTH)[:, None] + inner[None, :]
    w2_ptr = w2 + expert.to(tl.int64) * w2_expert_stride + inner[:, None]
    w2_ptr += (column.to(tl.int64) * w2_row_stride)[None, :]
    acc = tl.zeros([TILE_PAIRS, TILE_COLUMNS], tl.float32)
    for start in range(0, WIDTH, TILE_INNER):
        in_inner = start + inner < WIDTH
        values = tl.load(gated_ptr + start, mask=has_pair[:, None] & in_inner[None, :], other=0.0)
        w = tl.load(w2_ptr + start, mask=in_inner[:, None] & in_hidden[None, :], other=0.0).to(values.dtype)
        acc = tl.dot(values, w, acc, input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(bias2 + expert * bias2_stride + column, mask=in_hidden, other=0.0).to(tl.float32)[None, :]
    acc *= tl.load(weights + row, mask=has_pair, other=0.0)[:, None]
    target = results + (row * HIDDEN_SIZE)[:, None] + column[None, :]
    tl.store(target, acc.to(results.dtype.element_ty), mask=has_pair[:, None] & in_hidden[None, :])


@triton.jit
def sum_experts_kernel(
    results, expert_ids, out, num_experts, hidden_size,
    TOP_K: tl.constexpr, TILE_ELEMENTS: tl.constexpr,
):  # fmt: skip
    """Program ``(t, i)`` adds up tile ``i`` of token ``t``'s pairs. Pairs of other ranks are not written: skip them."""
    token = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * TILE_ELEMENTS + tl.arange(0, TILE_ELEMENTS)
    in_hidden = element < hidden_size
    total = tl.zeros([TILE_ELEMENTS], tl.float32)
    for j in tl.static_range(TOP_K):
        expert = tl.load(expert_ids + token * TOP_K + j)
        is_local = (expert >= 0) & (expert < num_experts)
        source = results + (token * TOP_K + j) * hidden_size + element
        total += tl.load(source, mask=in_hidden & is_local, other=0.0).to(tl.float32)
    tl.store(out + token * hidden_size + element, total.to(out.dtype.element_ty), mask=in_hidden)
