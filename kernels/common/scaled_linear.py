"""Linear layers over packed weights in plain torch, for every device: the reference of faster kernels."""

import torch
import torch.nn.functional as F

from quire.kernels.common.block_weight import BlockWeight
from quire.kernels.common.scaled_weight import ScaledWeight

PackedWeight = ScaledWeight | BlockWeight

FP8_LARGEST = torch.finfo(torch.float8_e4m3fn).max

WIDENED_ELEMENTS = {"cpu": 2**18, "cuda": 2**25}
"""Elements that are dequantised at a time: 1 MiB in float32, a usual L2 cache. On a GPU a part costs launches."""

# Relative to the sum of the magnitudes of the products: one rounding of a float32 sum.
TOLERANCE = 5e-6


def scaled_linear_reference(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute ``x @ weight.T + bias`` in float64, ``[rows, inputs]`` → ``[rows, outputs]``."""
    out = x.double() @ weight.dequantise().double().T
    return out if bias is None else out + bias.double()


def scaled_linear(
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None = None,
    *,
    int8_activations: bool = False,
    float32_output: bool = False,
) -> torch.Tensor:
    """Compute ``x @ weight.T + bias``, ``[rows, inputs]`` → ``[rows, outputs]`` of ``x``'s dtype.

    A part of the weight is dequantised at a time. Products and sums are float32 on a CPU; on a GPU the dequantised
    weight is rounded to ``x``'s dtype.

    Args:
        int8_activations: round ``x`` to int8 first, with a scale for each row.
        float32_output: compute in float32, and do not round the sums.
    """
    dtype = torch.float32 if x.is_cpu or float32_output else x.dtype
    factor = None
    operand = x
    if int8_activations:
        operand, factor = round_to_int8(x)
    operand = operand.to(dtype)
    outputs, inputs = weight.shape
    out = torch.empty(len(x), outputs, dtype=dtype, device=x.device)
    step = max(1, WIDENED_ELEMENTS.get(x.device.type, 2**25) // inputs)
    for start in range(0, outputs, step):
        rows = slice(start, start + step)
        torch.mm(operand, weight.dequantise(rows).to(dtype).T, out=out[:, rows])
    if factor is not None:
        out = out.float().mul_(factor)
    if bias is not None:
        out = out + bias
    return out.to(torch.float32 if float32_output else x.dtype)


def round_to_fp8(x: torch.Tensor, group_size: int = 0, scale: torch.Tensor | None = None) -> torch.Tensor:
    """Round to float8 (e4m3) numbers times a scale, and return these values in ``x``'s dtype.

    Args:
        x: ``[rows, inputs]``.
        group_size: inputs that share a scale, the largest of their magnitudes divided by 448; 0: each row has one.
        scale: float32 ``[1]``: use this one instead.
    """
    rows, inputs = x.shape
    size = group_size or max(inputs, 1)
    padded = F.pad(x, (0, -inputs % size)) if inputs % size else x
    wide = padded.float().reshape(rows, -(-inputs // size), size)
    if scale is None:
        scale = (wide.abs().amax(-1, keepdim=True) / FP8_LARGEST).clamp_(min=torch.finfo(torch.float32).tiny)
    codes = (wide / scale).clamp_(-FP8_LARGEST, FP8_LARGEST).to(torch.float8_e4m3fn)
    return (codes.float() * scale).flatten(1)[:, :inputs].to(x.dtype).contiguous()


def round_to_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round each row to integers from -128 to 127: the integers as float32, and the rows' scales ``[rows, 1]``.

    A scale is the row's largest magnitude divided by 127.5, as in compressed-tensors.
    """
    wide = x.float()
    scales = (wide.abs().amax(-1, keepdim=True) / 127.5).clamp(min=torch.finfo(torch.float32).tiny)
    return (wide / scales).round_().clamp_(-128, 127), scales
