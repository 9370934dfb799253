"""Choices that follow from the hardware, with a reason for the log."""

from dataclasses import dataclass

import torch

from quire.kernels.cpu.native.library import Native

_PROBES = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}


@dataclass(frozen=True, slots=True)
class ComputeDtypes:
    """Dtypes of a model's weights and activations.

    Attributes:
        weights: dtype of weights and the embedding.
        activations: dtype of hidden states, norms and attention.
        reason: why a dtype differs from the requested one; empty if none does.
    """

    weights: torch.dtype
    activations: torch.dtype
    reason: str = ""


def cpu_compute_dtypes(dtype: torch.dtype, native: Native | None) -> ComputeDtypes:
    """Return the dtypes for a checkpoint of ``dtype`` on this CPU.

    Without 16-bit matrix instructions torch's bfloat16 and float16 linear layers are several times slower than its
    float32 ones (each product is widened in software). The native library reads 16-bit weights and computes in float32;
    without it, weights are widened once when loaded, which doubles their memory.

    Args:
        native: the library of ``quire.kernels.cpu.native.library``, or None if it is not available.
    """
    if dtype not in _PROBES:
        return ComputeDtypes(dtype, dtype)
    name = str(dtype).removeprefix("torch.")
    lacks = f"this CPU has no {name} matrix instructions"
    if native is None:
        if _supported(_PROBES[dtype]):
            return ComputeDtypes(dtype, dtype)
        return ComputeDtypes(torch.float32, torch.float32, f"{lacks}; float32 is faster on it")
    if dtype is torch.bfloat16 and native.has_bfloat16:
        return ComputeDtypes(dtype, dtype)
    if dtype is torch.float16 and not native.has_float16:
        return ComputeDtypes(torch.float32, torch.float32, f"this CPU does not convert {name}; float32 is faster on it")
    if dtype is torch.float16:
        lacks = "products of float16 weights are float32 on a CPU"
    return ComputeDtypes(dtype, torch.float32, f"{lacks}; weights stay {name}, the rest is float32")


def _supported(probe: str) -> bool:
    """Query oneDNN through torch; false for a build without the operator (ARM, no oneDNN)."""
    try:
        return bool(getattr(torch.ops.mkldnn, probe)())
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
