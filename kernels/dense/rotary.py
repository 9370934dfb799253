"""Rotary position embedding (arXiv 2104.09864, section 3.4.2) by a table of cosines and sines."""

from typing import Any

import torch

from quire.kernels.common.checks import check_tensor
from quire.kernels.common.triton_runtime import require_launchable

ROTARY_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

TILE_ELEMENTS = 2048
"""Elements of one token that a program rotates."""

TOLERANCES = {torch.float32: (2e-6, 1e-6), torch.float16: (1e-3, 1e-3), torch.bfloat16: (8e-3, 8e-3)}
"""Relative and absolute distance of kernel and reference: both compute in float32 and round once."""


def rotary_reference(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """What ``rotary`` computes.

    Raises:
        IndexError: a position is outside the table.
    """
    if positions.numel() > 0 and not 0 <= int(positions.min()) <= int(positions.max()) < table.shape[1]:
        raise IndexError(f"positions outside a table of {table.shape[1]}")
    rotary_dim = table.shape[2]
    cos, sin = table[:, positions, None].float()
    turned, kept = x[..., :rotary_dim].float(), x[..., rotary_dim:]
    turned = turned * cos + turned.roll(rotary_dim // 2, -1) * sin
    return torch.cat((turned.to(x.dtype), kept), -1)


def rotary(
    x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Rotate dimension ``i`` with ``i + rotary_dim / 2`` by each token's angle; dimensions from ``rotary_dim`` on stay.

    Args:
        x: float32, float16 or bfloat16 ``[num_tokens, heads, head_dim]``; tokens and heads may be strided.
        positions: int64 ``[num_tokens]``. A device cannot raise: a position outside the table is a caller's mistake,
            and reads as cosine and sine 0, so that the rotated dimensions become 0.
        table: ``[2, max_position, rotary_dim]`` in any of the three dtypes: cosines, and sines whose first half is
            negated. The halves repeat each other, and the kernel reads the second.
        out: as ``x``, and may be ``x`` itself, but not overlap it otherwise; None: a new tensor.

    Returns:
        ``out``.

    Raises:
        ValueError: a tensor does not have the shape, dtype or place above.
        RuntimeError: Triton cannot launch here.
    """
    dims: dict[str, int | None] = {"num_tokens": None, "heads": None, "head_dim": None}
    check_tensor("x", x, dims, ROTARY_DTYPES, x.device)
    num_tokens, heads, head_dim = x.shape
    check_tensor("positions", positions, {"num_tokens": num_tokens}, (torch.int64,), x.device)
    table_dims = {"cosines and sines": 2, "max_position": None, "rotary_dim": None}
    check_tensor("table", table, table_dims, ROTARY_DTYPES, x.device)
    rotary_dim = table.shape[2]
    if rotary_dim % 2 != 0 or not 0 < rotary_dim <= head_dim:
        raise ValueError(f"table: dimension 2 (rotary_dim) is {rotary_dim}, expected an even number to {head_dim}")
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    check_tensor("out", out, dict(zip(dims, x.shape, strict=True)), (x.dtype,), x.device)
    kernel = _kernel(x.device)
    if x.numel() == 0:
        return out
    constants = launch_constants(heads, head_dim, rotary_dim, in_place=out.data_ptr() == x.data_ptr())
    kernel[(num_tokens, -(-heads // constants["TILE_HEADS"]))](
        x,
        positions,
        table,
        out,
        heads,
        table.shape[1],
        *x.stride()[:2],
        *out.stride()[:2],
        *table.stride()[:2],
        **constants,
    )
    return out


def launch_constants(heads: int, head_dim: int, rotary_dim: int, in_place: bool) -> dict[str, int]:
    """What the kernel is compiled for; shared with the test that compiles it ahead.

    TILE_KEPT covers the dimensions that are copied, and is 0 where there are none or they are in place.
    """
    tile_heads = max(1, TILE_ELEMENTS // _next_power_of_two(head_dim))
    return {
        "HEAD_DIM": head_dim,
        "ROTARY_DIM": rotary_dim,
        "TILE_HEADS": min(tile_heads, _next_power_of_two(heads)),
        "TILE_HALF": _next_power_of_two(rotary_dim // 2),
        "TILE_KEPT": 0 if in_place or rotary_dim == head_dim else _next_power_of_two(head_dim - rotary_dim),
    }


def _next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _kernel(device: torch.device) -> Any:
    require_launchable(device.type)
    from quire.kernels.dense.rotary_triton import rotary_kernel

    return rotary_kernel
