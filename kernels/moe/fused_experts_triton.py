"""The Triton kernels of expert layers, for every form of weights. Imports triton, so only the launchers import it."""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs
# Arguments have no annotations, because Triton compiles annotations too and rejects most of them.

import triton
import triton.language as tl

from quire.kernels.dense.gated_activation_triton import activate
from quire.kernels.dense.packed_linear_triton import packed_product


@triton.jit
def plain_products(
    x_rows, has_row, weights, row, up_step, has_column, row_stride,
    DOWN: tl.constexpr, INPUTS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    TILE_INPUTS: tl.constexpr,
):  # fmt: skip
    """Multiply by weights that are numbers. Two products share one loop, so that activations are loaded once."""
    inner = tl.arange(0, TILE_INPUTS)
    x_ptr = x_rows[:, None] + inner[None, :]
    first_ptr = weights + inner[:, None] + (row * row_stride)[None, :]
    second_ptr = first_ptr + tl.cast(up_step, tl.int64) * row_stride
    first = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    second = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    for start in range(0, INPUTS, TILE_INPUTS):
        in_inner = start + inner < INPUTS
        values = tl.load(x_ptr + start, mask=has_row[:, None] & in_inner[None, :], other=0.0)
        mask = in_inner[:, None] & has_column[None, :]
        w = tl.load(first_ptr + start, mask=mask, other=0.0).to(values.dtype)
        first = tl.dot(values, w, first, input_precision="ieee")
        if not DOWN:
            w = tl.load(second_ptr + start, mask=mask, other=0.0).to(values.dtype)
            second = tl.dot(values, w, second, input_precision="ieee")
    return first, second


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
def load_mxfp4(
    blocks, scales, row, has_row, start,
    dtype: tl.constexpr, ROW_BYTES: tl.constexpr, TILE_BYTES: tl.constexpr, TILE_ROWS: tl.constexpr,
):  # fmt: skip
    """Load the weights of even and odd inputs, ``[TILE_BYTES, TILE_ROWS]`` each, from byte ``start`` of each row on."""
    GROUPS: tl.constexpr = TILE_BYTES // 16
    byte = start + tl.arange(0, TILE_BYTES)
    mask = (byte < ROW_BYTES)[:, None] & has_row[None, :]
    codes = tl.load(blocks + (row * ROW_BYTES)[None, :] + byte[:, None], mask=mask, other=0).to(tl.int32)
    group = start // 16 + tl.arange(0, GROUPS)
    mask = (group < ROW_BYTES // 16)[:, None] & has_row[None, :]
    scale = tl.load(scales + (row * (ROW_BYTES // 16))[None, :] + group[:, None], mask=mask, other=0).to(tl.int32)
    power = tl.broadcast_to(e8m0(scale)[:, None, :], [GROUPS, 16, TILE_ROWS])
    power = tl.reshape(power, [TILE_BYTES, TILE_ROWS])
    return (e2m1(codes) * power).to(dtype), (e2m1(codes >> 4) * power).to(dtype)


@triton.jit
def mxfp4_products(
    x_rows, has_row, blocks, scales, row, up_step, has_column, odd_stride, dtype: tl.constexpr,
    DOWN: tl.constexpr, INPUTS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    TILE_INPUTS: tl.constexpr,
):  # fmt: skip
    """Multiply by MXFP4 weights. A row's odd activations lie ``odd_stride`` after its even ones.

    A byte holds the weights of two neighbouring inputs. Interleaving decoded weights would move them between threads;
    instead, even inputs are multiplied by low halves and odd inputs by high halves, into one accumulator.
    """
    HALF: tl.constexpr = INPUTS // 2
    BYTES: tl.constexpr = TILE_INPUTS // 2
    inner = tl.arange(0, BYTES)
    even_ptr = x_rows[:, None] + inner[None, :]
    odd_ptr = even_ptr + tl.cast(odd_stride, tl.int64)
    first = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    second = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    for start in range(0, HALF, BYTES):
        mask = has_row[:, None] & (start + inner < HALF)[None, :]
        even = tl.load(even_ptr + start, mask=mask, other=0.0)
        odd = tl.load(odd_ptr + start, mask=mask, other=0.0)
        low, high = load_mxfp4(blocks, scales, row, has_column, start, dtype, HALF, BYTES, TILE_COLUMNS)
        first = tl.dot(even, low, first, input_precision="ieee")
        first = tl.dot(odd, high, first, input_precision="ieee")
        if not DOWN:
            low, high = load_mxfp4(blocks, scales, row + up_step, has_column, start, dtype, HALF, BYTES, TILE_COLUMNS)
            second = tl.dot(even, low, second, input_precision="ieee")
            second = tl.dot(odd, high, second, input_precision="ieee")
    return first, second


@triton.jit
def experts_kernel(
    x, codes, scales, zeros, bias, weights, out, pairs, tile_experts,
    x_stride, x_odd_stride, expert_stride, row_stride, groups, bias_stride, out_odd_stride,
    ACTIVATION: tl.constexpr, TOP_K: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr, KIND: tl.constexpr, GROUP_SIZE: tl.constexpr, HAS_ZEROS: tl.constexpr,
    MASKED: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, TILE_INPUTS: tl.constexpr,
):  # fmt: skip
    """Program ``(n, i)`` computes the ``n``-th tile of columns of one product for the pairs of tile ``i``.

    The first product takes the rows of tokens and activates its result; the second (ACTIVATION is negative) takes the
    rows of pairs and multiplies its result by their routing weights. ``out`` is contiguous ``[num_pairs, OUTPUTS]``;
    what the second product over MXFP4 reads has all even columns before the odd ones, ``[2, num_pairs, OUTPUTS / 2]``.

    The tiles of an expert are consecutive, and programs of one tile run at the same time, so that its rows and its
    expert's weights stay in the L2 cache. Every branch is on a constant: each form compiles to a kernel of its own.

    Args:
        x_odd_stride, out_odd_stride: from an even column to its odd neighbour, for MXFP4.
        KIND: as in ``packed_product``, 3 for numbers, or 4 for MXFP4.
    """
    DOWN: tl.constexpr = ACTIVATION < 0
    tile = tl.program_id(1)
    expert = tl.load(tile_experts + tile).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(pairs + tile * TILE_ROWS + tl.arange(0, TILE_ROWS))
    has_pair = pair >= 0
    pair = tl.where(has_pair, pair, 0)
    x_rows = x + (pair if DOWN else pair // TOP_K).to(tl.int64) * x_stride
    column = tl.program_id(0) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    has_column = column < OUTPUTS
    # Row of a column's gate weights. The up weights are OUTPUTS rows further, or in the next row if interleaved.
    own_row = column * 2 if ACTIVATION == 3 else column
    up_step = 1 if ACTIVATION == 3 else OUTPUTS
    row = expert * (OUTPUTS if DOWN else 2 * OUTPUTS) + own_row
    dtype: tl.constexpr = x.dtype.element_ty
    if KIND == 3:
        first, second = plain_products(
            x_rows, has_pair, codes + expert * expert_stride, own_row.to(tl.int64), up_step, has_column, row_stride,
            DOWN, INPUTS, TILE_ROWS, TILE_COLUMNS, TILE_INPUTS,
        )  # fmt: skip
    elif KIND == 4:
        first, second = mxfp4_products(
            x_rows, has_pair, codes, scales, row, up_step, has_column, x_odd_stride, dtype,
            DOWN, INPUTS, TILE_ROWS, TILE_COLUMNS, TILE_INPUTS,
        )  # fmt: skip
    else:
        first = packed_product(
            x_rows, has_pair, codes, scales, zeros, row, has_column, INPUTS, groups, row_stride,
            dtype, KIND, GROUP_SIZE, HAS_ZEROS, MASKED, TILE_ROWS, TILE_COLUMNS, TILE_INPUTS,
        )  # fmt: skip
        second = first
        if not DOWN:
            second = packed_product(
                x_rows, has_pair, codes, scales, zeros, row + up_step, has_column, INPUTS, groups, row_stride,
                dtype, KIND, GROUP_SIZE, HAS_ZEROS, MASKED, TILE_ROWS, TILE_COLUMNS, TILE_INPUTS,
            )  # fmt: skip
    if HAS_BIAS:
        own_bias = bias + expert * bias_stride + own_row
        first += tl.load(own_bias, mask=has_column, other=0.0).to(tl.float32)[None, :]
        if not DOWN:
            second += tl.load(own_bias + up_step, mask=has_column, other=0.0).to(tl.float32)[None, :]
    if DOWN:
        result = first * tl.load(weights + pair, mask=has_pair, other=0.0)[:, None]
    else:
        result = activate(first, second, ACTIVATION)
    place = pair.to(tl.int64)[:, None] * OUTPUTS + column[None, :]
    if KIND == 4 and not DOWN:
        half = column % 2 * tl.cast(out_odd_stride, tl.int64) + column // 2
        place = pair.to(tl.int64)[:, None] * (OUTPUTS // 2) + half[None, :]
    tl.store(out + place, result.to(out.dtype.element_ty), mask=has_pair[:, None] & has_column[None, :])


@triton.jit
def sum_experts_kernel(
    results, expert_ids, out, num_experts, hidden_size,
    TOP_K: tl.constexpr, TILE_ELEMENTS: tl.constexpr,
):  # fmt: skip
    """Program ``(t, i)`` adds up tile ``i`` of token ``t``'s pairs. Pairs of other ranks are not written: skip them.

    The second product could add to ``out`` itself, but only with atomic additions, whose order differs between runs.
    """
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
