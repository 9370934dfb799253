"""The Triton kernel of ``packed_linear``. Imports triton, so only that launcher imports it."""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs
# Arguments have no annotations, because Triton compiles annotations too and rejects most of them.

import triton
import triton.language as tl


@triton.jit
def decode(octets, zero, dtype: tl.constexpr, KIND: tl.constexpr, HAS_ZEROS: tl.constexpr):
    """Return codes minus their outputs' zero points, exact in ``dtype``; fp8 numbers are divided by 2**8."""
    if KIND == 2:
        # A float16 has the same fields, and its exponent a bias that is larger by 8.
        wide = octets.to(tl.int16)
        half = ((wide & 0x7F) << 7) | ((wide & 0x80) << 8)
        return half.to(tl.float16, bitcast=True).to(tl.float32).to(dtype)
    number = octets.to(tl.int16)
    if HAS_ZEROS:
        number -= zero[None, :]
    elif KIND == 1:
        number -= 8
    return number.to(tl.float32).to(dtype)


@triton.jit
def packed_product(
    x_rows, has_row, codes, scales, zeros, weight_row, has_column, inputs, groups, code_stride,
    dtype: tl.constexpr, KIND: tl.constexpr, GROUP_SIZE: tl.constexpr, HAS_ZEROS: tl.constexpr, MASKED: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, TILE_INPUTS: tl.constexpr,
):  # fmt: skip
    """Multiply rows of activations by rows of a packed weight, float32 ``[TILE_ROWS, TILE_COLUMNS]``.

    Args:
        x_rows: pointers to the first inputs of the activations' rows.
        weight_row: int64 indices of the weight's rows.
        KIND: 0 for int8, 1 for int4, 2 for fp8.
        GROUP_SIZE: a multiple of TILE_INPUTS, or 0 for one group.
        MASKED: the inputs end within a tile.
    """
    PACKED: tl.constexpr = 2 if KIND == 1 else 1
    TILE_CODES: tl.constexpr = TILE_INPUTS // PACKED
    inner, stored = tl.arange(0, TILE_INPUTS), tl.arange(0, TILE_CODES)
    x_ptr = x_rows[:, None] + inner[None, :]
    code_ptr = codes + (weight_row * code_stride)[None, :] + stored[:, None]
    first_group = weight_row * groups
    scale = tl.load(scales + first_group, mask=has_column, other=0.0).to(tl.float32)
    zero = tl.zeros([TILE_COLUMNS], tl.int16)
    if HAS_ZEROS:
        zero = tl.load(zeros + first_group, mask=has_column, other=0).to(tl.int16)
    acc = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    for start in range(0, inputs, TILE_INPUTS):
        x_mask, code_mask = has_row[:, None], has_column[None, :]
        if MASKED:
            x_mask &= (start + inner < inputs)[None, :]
            code_mask &= (start // PACKED + stored < inputs // PACKED)[:, None]
        values = tl.load(x_ptr + start, mask=x_mask, other=0.0)
        octets = tl.load(code_ptr + start // PACKED, mask=code_mask, other=0)
        if GROUP_SIZE > 0:
            group = first_group + start // GROUP_SIZE
            scale = tl.load(scales + group, mask=has_column, other=0.0).to(tl.float32)
            if HAS_ZEROS:
                zero = tl.load(zeros + group, mask=has_column, other=0).to(tl.int16)
        # Codes are multiplied exactly, and a group's sum by its scale: weights are not rounded.
        part = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32) if GROUP_SIZE > 0 else acc
        if KIND == 1:
            even, odd = tl.split(tl.reshape(values, [TILE_ROWS, TILE_CODES, 2]))
            part = tl.dot(even, decode(octets & 15, zero, dtype, KIND, HAS_ZEROS), part, input_precision="ieee")
            part = tl.dot(odd, decode(octets >> 4, zero, dtype, KIND, HAS_ZEROS), part, input_precision="ieee")
        else:
            part = tl.dot(values, decode(octets, zero, dtype, KIND, HAS_ZEROS), part, input_precision="ieee")
        acc = acc + part * scale[None, :] if GROUP_SIZE > 0 else part
    if GROUP_SIZE == 0:
        acc *= scale[None, :]
    if KIND == 2:
        acc *= 256.0
    return acc


@triton.jit(do_not_specialize=["rows"])
def packed_linear_kernel(
    x, codes, scales, zeros, bias, out, rows, outputs, inputs, groups, x_stride, code_stride,
    KIND: tl.constexpr, GROUP_SIZE: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr,
    MASKED: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, TILE_INPUTS: tl.constexpr,
):  # fmt: skip
    """Compute a tile of the product, with constants as in ``packed_product``."""
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    has_row, has_column = row < rows, column < outputs
    own = row.to(tl.int64)
    acc = packed_product(
        x + own * x_stride, has_row, codes, scales, zeros, column.to(tl.int64), has_column, inputs, groups, code_stride,
        x.dtype.element_ty, KIND, GROUP_SIZE, HAS_ZEROS, MASKED, TILE_ROWS, TILE_COLUMNS, TILE_INPUTS,
    )  # fmt: skip
    if HAS_BIAS:
        acc += tl.load(bias + column, mask=has_column, other=0.0).to(tl.float32)[None, :]
    target = out + (own * outputs)[:, None] + column[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=has_row[:, None] & has_column[None, :])
