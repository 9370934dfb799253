"""The Triton kernels of ``fused_experts_packed``. Imports triton, so only that launcher imports it."""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs
# Arguments have no annotations, because Triton compiles annotations too and rejects most of them.

import triton
import triton.language as tl

from quire.kernels.dense.gated_activation_triton import activate
from quire.kernels.dense.packed_linear_triton import packed_product


@triton.jit
def gate_up_packed_kernel(
    x, codes, scales, zeros, gated, pairs, tile_experts, top_k, width, inputs, groups, x_stride, code_stride,
    ACTIVATION: tl.constexpr, KIND: tl.constexpr, GROUP_SIZE: tl.constexpr, HAS_ZEROS: tl.constexpr,
    MASKED: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, TILE_INPUTS: tl.constexpr,
):  # fmt: skip
    """As ``gate_up_kernel``, with the weights' constants as in ``packed_product``."""
    tile = tl.program_id(1)
    expert = tl.load(tile_experts + tile).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(pairs + tile * TILE_ROWS + tl.arange(0, TILE_ROWS))
    has_pair = pair >= 0
    token = (tl.where(has_pair, pair, 0) // top_k).to(tl.int64)
    column = tl.program_id(0) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    in_width = column < width
    dtype: tl.constexpr = x.dtype.element_ty
    x_rows, row = x + token * x_stride, expert * (2 * width) + column
    gate = packed_product(
        x_rows, has_pair, codes, scales, zeros, row, in_width, inputs, groups, code_stride,
        dtype, KIND, GROUP_SIZE, HAS_ZEROS, MASKED, TILE_ROWS, TILE_COLUMNS, TILE_INPUTS,
    )  # fmt: skip
    up = packed_product(
        x_rows, has_pair, codes, scales, zeros, row + width, in_width, inputs, groups, code_stride,
        dtype, KIND, GROUP_SIZE, HAS_ZEROS, MASKED, TILE_ROWS, TILE_COLUMNS, TILE_INPUTS,
    )  # fmt: skip
    target = gated + (pair.to(tl.int64) * width)[:, None] + column[None, :]
    result = activate(gate, up, ACTIVATION).to(gated.dtype.element_ty)
    tl.store(target, result, mask=has_pair[:, None] & in_width[None, :])


@triton.jit
def down_packed_kernel(
    gated, codes, scales, zeros, weights, results, pairs, tile_experts, hidden_size, inputs, groups, code_stride,
    KIND: tl.constexpr, GROUP_SIZE: tl.constexpr, HAS_ZEROS: tl.constexpr, MASKED: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, TILE_INPUTS: tl.constexpr,
):  # fmt: skip
    """As ``down_kernel``, with the weights' constants as in ``packed_product``."""
    tile = tl.program_id(1)
    expert = tl.load(tile_experts + tile).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(pairs + tile * TILE_ROWS + tl.arange(0, TILE_ROWS))
    has_pair = pair >= 0
    own = tl.where(has_pair, pair, 0).to(tl.int64)
    column = tl.program_id(0) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    in_hidden = column < hidden_size
    acc = packed_product(
        gated + own * inputs, has_pair, codes, scales, zeros, expert * hidden_size + column, in_hidden, inputs, groups,
        code_stride, gated.dtype.element_ty, KIND, GROUP_SIZE, HAS_ZEROS, MASKED, TILE_ROWS, TILE_COLUMNS, TILE_INPUTS,
    )  # fmt: skip
    acc *= tl.load(weights + own, mask=has_pair, other=0.0)[:, None]
    target = results + (own * hidden_size)[:, None] + column[None, :]
    tl.store(target, acc.to(results.dtype.element_ty), mask=has_pair[:, None] & in_hidden[None, :])
