"""Root mean square norm (arXiv 1910.07467), with or without the addition of a residual, in one pass over the row."""

from collections.abc import Callable
from typing import Any

import torch

from quire.kernels.common.checks import check_tensor
from quire.kernels.common.launches import Launch, launch_nothing, layout_of, once_per_layout
from quire.kernels.common.triton_runtime import require_launchable

NORM_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

MAX_WIDTH = 16384
"""Maximum elements of a row, which one program holds in registers: 64 in each of 256 threads."""

TILE_ELEMENTS = 1024
"""Minimum elements of a program: several narrow rows (64 or 128 elements of a head) share one program."""

TOLERANCES = {torch.float32: (2e-6, 1e-5), torch.float16: (2e-3, 1e-3), torch.bfloat16: (1.6e-2, 1e-2)}
"""Relative and absolute tolerance of kernel against reference: one rounding to the dtype, another order of sums."""


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Reference of ``rms_norm``: in float32, rounded once."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed if weight is None else normed * weight.float()).to(x.dtype)


def add_rms_norm_reference(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Reference of ``add_rms_norm``: the sum is rounded to the residual's dtype before the norm."""
    residual += x
    return rms_norm_reference(residual, weight, eps)


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Divide ``x`` by its root mean square over the last dimension, in float32, and multiply by ``weight``, by Triton.

    Args:
        x: float32, float16 or bfloat16 ``[num_tokens, width]`` or ``[num_tokens, heads, head_dim]``; all but the last
            dimension may be strided.
        weight: ``[width]`` in any of the three dtypes, or None for 1.

    Returns:
        A contiguous tensor of ``x``'s shape and dtype.

    Raises:
        ValueError: a tensor does not have this shape, dtype or device, or a row is wider than ``MAX_WIDTH``.
        RuntimeError: Triton cannot launch here.
    """
    launch = _prepare((layout_of(x), layout_of(weight), eps), x, None, weight, eps)
    out = x.new_empty(*x.shape)
    launch(x, x, x if weight is None else weight, out)
    return out


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add ``x`` to ``residual`` in place, and return the norm of the sum in ``residual``'s dtype, by the Triton kernel.

    Args:
        x: ``[num_tokens, width]``; rows may be strided.
        residual: ``[num_tokens, width]``, of any of the three dtypes; changed.
        weight: ``[width]``.

    Raises:
        ValueError, RuntimeError: as ``rms_norm``.
    """
    layouts = layout_of(x), layout_of(residual), layout_of(weight), eps
    launch = _prepare(layouts, x, residual, weight, eps)
    out = residual.new_empty(*residual.shape)
    launch(x, residual, weight, out)
    return out


def launch_constants(width: int, add: bool, has_weight: bool) -> dict[str, int]:
    """Compile-time constants of the kernel; shared with the test that compiles it ahead of time."""
    tile_width = 1 << (width - 1).bit_length()
    return {
        "WIDTH": width,
        "TILE_ROWS": max(1, TILE_ELEMENTS // tile_width),
        "TILE_WIDTH": tile_width,
        "ADD": int(add),
        "HAS_WEIGHT": int(has_weight),
    }


def launch_options(width: int) -> dict[str, int]:
    return {"num_warps": 4 if width <= 2048 else 8 if width <= 8192 else 16}


@once_per_layout
def _prepare(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, eps: float
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]:
    """Check the tensors of ``rms_norm``, or with ``residual`` of ``add_rms_norm``, and return their launch.

    Its arguments: x, residual, weight, out.
    """
    dims: dict[str, int | None] = {"num_tokens": None, "heads": None, "width": None}
    if x.dim() == 2 or residual is not None:
        del dims["heads"]
    check_tensor("x", x, dims, NORM_DTYPES, x.device)
    if residual is not None:
        check_tensor("residual", residual, dict(zip(dims, x.shape, strict=True)), NORM_DTYPES, x.device)
    width = x.shape[-1]
    if not 0 < width <= MAX_WIDTH:
        raise ValueError(f"x: the innermost dimension (width) is {width}, expected 1 to {MAX_WIDTH}")
    if weight is not None:
        check_tensor("weight", weight, {"width": width}, NORM_DTYPES, x.device)
    kernel = _kernel(x.device)
    heads = x.shape[1] if x.dim() == 3 else 1
    rows = x.shape[0] * heads
    if rows == 0:
        return launch_nothing
    constants = launch_constants(width, residual is not None, weight is not None)
    head_stride = x.stride(1) if x.dim() == 3 else 0
    last = (eps, rows, heads, x.stride(0), head_stride, (x if residual is None else residual).stride(0))
    return Launch(kernel, (-(-rows // constants["TILE_ROWS"]),), last, constants | launch_options(width))


def _kernel(device: torch.device) -> Any:
    require_launchable(device.type)
    from quire.kernels.dense.rms_norm_triton import rms_norm_kernel

    return rms_norm_kernel
