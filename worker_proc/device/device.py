"""What a device can do well: choices that follow from the hardware, with the reason in words."""

from dataclasses import dataclass

import torch

from quire.kernels.cpu.native import Native

_PROBES = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}


@dataclass(frozen=True, slots=True)
class ComputeDtypes:
    """In which dtypes a model is held and run.

    Attributes:
        weights: of weights and the embedding.
        activations: of everything between: hidden states, norms, attention.
        reason: why not all is as was asked; empty when it is.
    """

    weights: torch.dtype
    activations: torch.dtype
    reason: str = ""


def cpu_compute_dtypes(dtype: torch.dtype, native: Native | None) -> ComputeDtypes:
    """The dtypes in which to hold and run a checkpoint of ``dtype`` on this CPU.

    Without 16-bit matrix instructions torch's bfloat16 and float16 linear layers are several times slower than its
    float32 ones (each product is widened in software). The native library reads such weights as they are and computes
    in float32; without it they are better widened once, when loaded, for twice the memory.

    Args:
        native: the library of ``quire.kernels.cpu.native``, or None where there is none.
    """
    if dtype not in _PROBES or has_matrix_instructions(dtype):
        return ComputeDtypes(dtype, dtype)
    name = str(dtype).removeprefix("torch.")
    lacks = f"this CPU has no {name} matrix instructions"
    if native is None or (dtype is torch.float16 and not native.has_float16):
        return ComputeDtypes(torch.float32, torch.float32, f"{lacks}; float32 is faster on it")
    return ComputeDtypes(dtype, torch.float32, f"{lacks}; weights stay {name}, the rest is float32")


def has_matrix_instructions(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies 16-bit ``dtype`` as such, and oneDNN uses it; false for wider dtypes."""
    return dtype in _PROBES and _supported(_PROBES[dtype])


def _supported(probe: str) -> bool:
    """Ask oneDNN through torch; a build without the operator (ARM, no oneDNN) counts as a no."""
    try:
        return bool(getattr(torch.ops.mkldnn, probe)())
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
