"""What a device can do well: choices that follow from the hardware, with the reason in words."""

import torch


def cpu_compute_dtype(dtype: torch.dtype) -> tuple[torch.dtype, str]:
    """The dtype in which to hold and run weights of ``dtype`` on this CPU.

    Without native 16-bit matrix instructions a bfloat16 or float16 linear layer is several times slower than a
    float32 one (each product is widened in software), so such checkpoints are better widened once, when loaded.

    Returns:
        The dtype, and why it is not the one asked for (empty when it is).
    """
    if dtype is torch.bfloat16 and not _supported("_is_mkldnn_bf16_supported"):
        return torch.float32, "this CPU has no bfloat16 matrix instructions; float32 is faster on it"
    if dtype is torch.float16 and not _supported("_is_mkldnn_fp16_supported"):
        return torch.float32, "this CPU has no float16 matrix instructions; float32 is faster on it"
    return dtype, ""


def _supported(probe: str) -> bool:
    """Ask oneDNN through torch; a build without the operator (ARM, no oneDNN) counts as a no."""
    try:
        return bool(getattr(torch.ops.mkldnn, probe)())
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
