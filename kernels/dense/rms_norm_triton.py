"""The Triton kernel of ``rms_norm``. Imports triton, so only the launchers import it."""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs
# Arguments have no annotations, because Triton compiles annotations too and rejects most of them.

import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(
    x, residual, weight, out, eps, num_rows, heads, x_token_stride, x_head_stride, residual_stride,
    WIDTH: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_WIDTH: tl.constexpr, ADD: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
):  # fmt: skip
    """Program ``i`` normalises the ``i``-th TILE_ROWS rows; row ``r`` is head ``r % heads`` of token ``r // heads``.

    ``out`` is contiguous. With ADD there is one head, and ``x`` is added to ``residual`` first.
    """
    row = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    element = tl.arange(0, TILE_WIDTH)
    in_width = element < WIDTH
    mask = (row < num_rows)[:, None] & in_width[None, :]
    x_row = (row // heads) * x_token_stride + (row % heads) * x_head_stride
    values = tl.load(x + x_row[:, None] + element[None, :], mask=mask, other=0.0).to(tl.float32)
    if ADD:
        sums = residual + (row * residual_stride)[:, None] + element[None, :]
        values += tl.load(sums, mask=mask, other=0.0).to(tl.float32)
        # Normalise the rounded sum, as the residual stores it: so a separate norm of the residual gives the same bits.
        rounded = values.to(residual.dtype.element_ty)
        tl.store(sums, rounded, mask=mask)
        values = rounded.to(tl.float32)
    mean = tl.sum(values * values, 1) / WIDTH
    normed = values * tl.rsqrt(mean + eps)[:, None]
    if HAS_WEIGHT:
        normed *= tl.load(weight + element, mask=in_width, other=0.0).to(tl.float32)[None, :]
    tl.store(out + (row * WIDTH)[:, None] + element[None, :], normed.to(out.dtype.element_ty), mask=mask)
