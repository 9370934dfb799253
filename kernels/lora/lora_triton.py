"""Triton kernels of ``lora.add_adapters``. Only that launcher imports them, because they import triton."""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs
# Arguments have no annotations, because Triton compiles annotations too and rejects most of them.

import triton
import triton.language as tl


@triton.jit
def rows_of(tiles, order, tile, TILE_ROWS: tl.constexpr):
    """Return a tile's slot, its indices in ``order``, which of them exist, and their rows in 64 bits."""
    slot = tl.load(tiles + tile * 3)
    index = tl.load(tiles + tile * 3 + 1) + tl.arange(0, TILE_ROWS)
    has_row = index < tl.load(tiles + tile * 3 + 2)
    return slot, index, has_row, tl.load(order + index, mask=has_row, other=0).to(tl.int64)


# The number of tokens changes from step to step; Triton would compile variants for 1 and for multiples of 16.
@triton.jit(do_not_specialize=["num_tokens"])
def shrink_kernel(
    x, entries, tiles, order, shrunk, num_tokens, inputs, x_stride,
    MAX_PARTS: tl.constexpr, MAX_RANK: tl.constexpr, SPLITS: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_RANK: tl.constexpr, TILE_INPUTS: tl.constexpr,
):  # fmt: skip
    """Program ``(t, p, s)`` shrinks the rows of tile ``t`` for part ``p``, over every SPLITS-th tile of inputs.

    Few rows make too few programs to read A at full speed, so the inputs are divided. The sums of the splits are added
    by ``expand_kernel``, always in ascending order.

    Args:
        entries: as ``SlotTable.entries``.
        tiles, order: as in ``AdapterRows``.
        shrunk: float32 ``[SPLITS, num_tokens, MAX_PARTS, MAX_RANK]``, by indices in ``order``.
    """
    part, split = tl.program_id(1), tl.program_id(2)
    slot, index, has_row, row = rows_of(tiles, order, tl.program_id(0), TILE_ROWS)
    entry = entries + (slot * MAX_PARTS + part) * 6
    rank = tl.load(entry + 2).to(tl.int32)
    rank = tl.where(tl.max(has_row.to(tl.int32), 0) > 0, rank, 0)
    a = tl.multiple_of(tl.load(entry).to(tl.pointer_type(x.dtype.element_ty)), 16)
    scale = tl.load(entry + 5).to(tl.int32).to(tl.float32, bitcast=True)
    x_rows = x + (row * x_stride)[:, None]
    target = shrunk + ((split * num_tokens + index).to(tl.int64) * MAX_PARTS + part) * MAX_RANK
    for first in range(0, rank, TILE_RANK):
        number = first + tl.arange(0, TILE_RANK)
        has_number = number < rank
        a_rows = a + (number.to(tl.int64) * inputs)[None, :]
        acc = tl.zeros([TILE_ROWS, TILE_RANK], tl.float32)
        for start in range(split * TILE_INPUTS, inputs, SPLITS * TILE_INPUTS):
            inner = start + tl.arange(0, TILE_INPUTS)
            has_input = inner < inputs
            values = tl.load(x_rows + inner[None, :], mask=has_row[:, None] & has_input[None, :], other=0.0)
            weights = tl.load(a_rows + inner[:, None], mask=has_number[None, :] & has_input[:, None], other=0.0)
            acc = tl.dot(values, weights, acc, input_precision="ieee")
        tl.store(target[:, None] + number[None, :], acc * scale, mask=has_row[:, None] & has_number[None, :])


@triton.jit
def add_part(
    acc, b, shrunk, has_row, local, outputs, rank, split_stride,
    PRECISION: tl.constexpr, SPLITS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_RANK: tl.constexpr,
):  # fmt: skip
    """Add a part's addends to ``acc``.

    Args:
        shrunk: pointers to rows.
        local: outputs, counted from the part's first.
    """
    has_output = (local >= 0) & (local < outputs)
    for first in range(0, rank, TILE_RANK):
        number = first + tl.arange(0, TILE_RANK)
        has_number = number < rank
        sums = tl.zeros([TILE_ROWS, TILE_RANK], tl.float32)
        for split in tl.static_range(SPLITS):
            at = shrunk[:, None] + split * split_stride + number[None, :]
            sums += tl.load(at, mask=has_row[:, None] & has_number[None, :], other=0.0)
        at = b + (number.to(tl.int64) * outputs)[:, None] + local[None, :]
        weights = tl.load(at, mask=has_number[:, None] & has_output[None, :], other=0.0)
        acc = tl.dot(sums, weights.to(tl.float32), acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=["num_tokens"])
def expand_kernel(
    y, entries, tiles, order, shrunk, num_tokens, y_stride,
    MAX_PARTS: tl.constexpr, MAX_RANK: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_RANK: tl.constexpr, TILE_OUTPUTS: tl.constexpr,
):  # fmt: skip
    """Program ``(t, c)`` adds to a tile of outputs of the rows of tile ``t``; arguments as in ``shrink_kernel``.

    A row is in one tile, so no other program reads or writes these outputs, which are changed in place. All parts of a
    layer are in one program for the same reason: parts may share a tile of outputs.
    """
    slot, index, has_row, row = rows_of(tiles, order, tl.program_id(0), TILE_ROWS)
    start = tl.program_id(1) * TILE_OUTPUTS
    column = start + tl.arange(0, TILE_OUTPUTS)
    used = tl.max(has_row.to(tl.int32), 0) > 0
    acc = tl.zeros([TILE_ROWS, TILE_OUTPUTS], tl.float32)
    covered = column < 0
    split_stride = num_tokens.to(tl.int64) * MAX_PARTS * MAX_RANK
    for part in range(MAX_PARTS):
        entry = entries + (slot * MAX_PARTS + part) * 6
        rank = tl.load(entry + 2).to(tl.int32)
        first, outputs = tl.load(entry + 3).to(tl.int32), tl.load(entry + 4).to(tl.int32)
        if used & (rank > 0) & (first < start + TILE_OUTPUTS) & (first + outputs > start):
            b = tl.multiple_of(tl.load(entry + 1).to(tl.pointer_type(y.dtype.element_ty)), 16)
            from_rows = shrunk + (index.to(tl.int64) * MAX_PARTS + part) * MAX_RANK
            # With aligned rows of B, Triton reads several numbers at a time.
            if (first % 16 == 0) & (outputs % 16 == 0):
                acc = add_part(
                    acc, b, from_rows, has_row, column - first // 16 * 16, outputs // 16 * 16, rank, split_stride,
                    PRECISION, SPLITS, TILE_ROWS, TILE_RANK,
                )  # fmt: skip
            else:
                acc = add_part(
                    acc, b, from_rows, has_row, column - first, outputs, rank, split_stride,
                    PRECISION, SPLITS, TILE_ROWS, TILE_RANK,
                )  # fmt: skip
            covered |= (column >= first) & (column < first + outputs)
    if used:
        target = y + (row * y_stride)[:, None] + column[None, :]
        mask = has_row[:, None] & covered[None, :]
        before = tl.load(target, mask=mask, other=0.0).to(tl.float32)
        tl.store(target, (before + acc).to(y.dtype.element_ty), mask=mask)
