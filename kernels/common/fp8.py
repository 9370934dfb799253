"""8-bit floats of KV caches, and how they are passed to kernels.

The formats are those of Micikevicius et al., "FP8 formats for deep learning" (arXiv 2209.05433): e4m3fn has no
infinities and one NaN of each sign, e5m2 is the upper half of a float16. Kernels get them as bytes, because Triton does
not support e4m3 below sm_89.
"""

import torch

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


def to_fp8_reference(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round to ``dtype``: to nearest, ties to even; values beyond its range, infinity included, to its largest value.

    NaN stays NaN.

    Args:
        x: float32, so that it is rounded only once.
    """
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype)


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """View 8-bit floats as uint8; return any other tensor unchanged."""
    return tensor.view(torch.uint8) if tensor.dtype in FP8_DTYPES else tensor


def is_e5m2(dtype: torch.dtype) -> bool:
    """The value of the constant ``E5M2`` of ``fp8_triton``'s functions."""
    return dtype == torch.float8_e5m2
