"""8-bit floats of a cache: what they hold, and how they pass to kernels.

The formats are those of Micikevicius et al., "FP8 formats for deep learning" (arXiv 2209.05433): e4m3fn has no
infinities and one NaN of each sign, e5m2 is the upper half of a float16. Kernels see bytes: Triton refuses e4m3 below
sm_89.
"""

import torch

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


def to_fp8_reference(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round to nearest, ties to even, in ``dtype``; beyond its range, infinity included, to its largest; NaN stays NaN.

    Args:
        x: float32, so that it is rounded once.
    """
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype)


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as uint8 where it holds 8-bit floats, and otherwise the tensor itself."""
    return tensor.view(torch.uint8) if tensor.dtype in FP8_DTYPES else tensor


def is_e5m2(dtype: torch.dtype) -> bool:
    """The constant that ``fp8_triton``'s functions take."""
    return dtype == torch.float8_e5m2
