"""The Triton kernels of ``fused_experts_mxfp4``. Imports triton, so only that launcher imports it."""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs
# Arguments have no annotations, because Triton compiles annotations too and rejects most of them.

import triton
import triton.language as tl

from quire.kernels.dense.gated_activation_triton import activate


@triton.jit
def e2m1(code):
    """Decode the lowest four bits of each int32 to float32.

    Exponent and mantissa are moved to the lowest bits of a float32's exponent and the highest of its mantissa. The
    result is 2**126 times too small, for subnormal numbers too.
    """
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def e8m0(scale):
    """Decode each int32 in [0, 255] to float32: 2**(scale - 127), and NaN for 255."""
    bits = tl.where(scale == 0, 0x00400000, scale << 23)
    return tl.where(scale == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def load_weights(
    blocks, scales, row, in_rows, start,
    dtype: tl.constexpr, ROW_BYTES: tl.constexpr, TILE_BYTES: tl.constexpr, TILE_ROWS: tl.constexpr,
):  # fmt: skip
    """Load the weights of even and odd inputs, ``[TILE_BYTES, TILE_ROWS]`` each, from byte ``start`` of each row on."""
    GROUPS: tl.constexpr = TILE_BYTES // 16
    byte = start + tl.arange(0, TILE_BYTES)
    mask = (byte < ROW_BYTES)[:, None] & in_rows[None, :]
    codes = tl.load(blocks + (row * ROW_BYTES)[None, :] + byte[:, None], mask=mask, other=0).to(tl.int32)
    group = start // 16 + tl.arange(0, GROUPS)
    mask = (group < ROW_BYTES // 16)[:, None] & in_rows[None, :]
    scale = tl.load(scales + (row * (ROW_BYTES // 16))[None, :] + group[:, None], mask=mask, other=0).to(tl.int32)
    power = tl.broadcast_to(e8m0(scale)[:, None, :], [GROUPS, 16, TILE_ROWS])
    power = tl.reshape(power, [TILE_BYTES, TILE_ROWS])
    return (e2m1(codes) * power).to(dtype), (e2m1(codes >> 4) * power).to(dtype)


@triton.jit
def gate_up_mxfp4_kernel(
    x, blocks, scales, bias13, gated, pairs, tile_experts, num_tokens, num_pairs, top_k, bias13_stride,
    HIDDEN_SIZE: tl.constexpr, WIDTH: tl.constexpr, TILE_PAIRS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    TILE_BYTES: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """As ``gate_up_kernel``, with even and odd columns separated.

    ``x`` is ``[2, num_tokens, HIDDEN_SIZE / 2]`` and ``gated`` ``[2, num_pairs, WIDTH / 2]``.
    """
    HALF: tl.constexpr = HIDDEN_SIZE // 2
    tile = tl.program_id(1)
    expert = tl.load(tile_experts + tile).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(pairs + tile * TILE_PAIRS + tl.arange(0, TILE_PAIRS))
    has_pair = pair >= 0
    token = (tl.where(has_pair, pair, 0) // top_k).to(tl.int64)
    column = tl.program_id(0) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    in_width = column < WIDTH
    gate_row = column * 2 if ACTIVATION == 3 else column
    up_step = 1 if ACTIVATION == 3 else WIDTH
    row = expert * (2 * WIDTH) + gate_row
    inner = tl.arange(0, TILE_BYTES)
    even_ptr = x + (token * HALF)[:, None] + inner[None, :]
    odd_ptr = even_ptr + tl.cast(num_tokens, tl.int64) * HALF
    dtype: tl.constexpr = x.dtype.element_ty
    gate = tl.zeros([TILE_PAIRS, TILE_COLUMNS], tl.float32)
    up = tl.zeros([TILE_PAIRS, TILE_COLUMNS], tl.float32)
    for start in range(0, HALF, TILE_BYTES):
        mask = has_pair[:, None] & (start + inner < HALF)[None, :]
        even = tl.load(even_ptr + start, mask=mask, other=0.0)
        odd = tl.load(odd_ptr + start, mask=mask, other=0.0)
        low, high = load_weights(blocks, scales, row, in_width, start, dtype, HALF, TILE_BYTES, TILE_COLUMNS)
        gate = tl.dot(even, low, gate, input_precision="ieee")
        gate = tl.dot(odd, high, gate, input_precision="ieee")
        low, high = load_weights(blocks, scales, row + up_step, in_width, start, dtype, HALF, TILE_BYTES, TILE_COLUMNS)
        up = tl.dot(even, low, up, input_precision="ieee")
        up = tl.dot(odd, high, up, input_precision="ieee")
    if HAS_BIAS:
        bias = bias13 + expert * bias13_stride + gate_row
        gate += tl.load(bias, mask=in_width, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias + up_step, mask=in_width, other=0.0).to(tl.float32)[None, :]
    result = activate(gate, up, ACTIVATION).to(gated.dtype.element_ty)
    half = (column % 2) * tl.cast(num_pairs, tl.int64) * (WIDTH // 2) + column // 2
    target = gated + (pair.to(tl.int64) * (WIDTH // 2))[:, None] + half[None, :]
    tl.store(target, result, mask=has_pair[:, None] & in_width[None, :])


@triton.jit
def down_mxfp4_kernel(
    gated, blocks, scales, bias2, weights, results, pairs, tile_experts, num_pairs, bias2_stride,
    HIDDEN_SIZE: tl.constexpr, WIDTH: tl.constexpr, TILE_PAIRS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    TILE_BYTES: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """As ``down_kernel``, with ``gated`` ``[2, num_pairs, WIDTH / 2]``: even columns, then odd ones."""
    HALF: tl.constexpr = WIDTH // 2
    tile = tl.program_id(1)
    expert = tl.load(tile_experts + tile).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(pairs + tile * TILE_PAIRS + tl.arange(0, TILE_PAIRS))
    has_pair = pair >= 0
    own = tl.where(has_pair, pair, 0).to(tl.int64)
    column = tl.program_id(0) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    in_hidden = column < HIDDEN_SIZE
    row = expert * HIDDEN_SIZE + column
    inner = tl.arange(0, TILE_BYTES)
    even_ptr = gated + (own * HALF)[:, None] + inner[None, :]
    odd_ptr = even_ptr + tl.cast(num_pairs, tl.int64) * HALF
    dtype: tl.constexpr = gated.dtype.element_ty
    acc = tl.zeros([TILE_PAIRS, TILE_COLUMNS], tl.float32)
    for start in range(0, HALF, TILE_BYTES):
        mask = has_pair[:, None] & (start + inner < HALF)[None, :]
        even = tl.load(even_ptr + start, mask=mask, other=0.0)
        odd = tl.load(odd_ptr + start, mask=mask, other=0.0)
        low, high = load_weights(blocks, scales, row, in_hidden, start, dtype, HALF, TILE_BYTES, TILE_COLUMNS)
        acc = tl.dot(even, low, acc, input_precision="ieee")
        acc = tl.dot(odd, high, acc, input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(bias2 + expert * bias2_stride + column, mask=in_hidden, other=0.0).to(tl.float32)[None, :]
    acc *= tl.load(weights + own, mask=has_pair, other=0.0)[:, None]
    target = results + (own * HIDDEN_SIZE)[:, None] + column[None, :]
    tl.store(target, acc.to(results.dtype.element_ty), mask=has_pair[:, None] & in_hidden[None, :])
