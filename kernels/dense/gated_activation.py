"""Gated activations: ``activation(gate) * up`` of a fused projection, in one pass."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from quire.kernels.common.checks import check_tensor
from quire.kernels.common.launches import Launch, launch_nothing, layout_of, once_per_layout
from quire.kernels.common.triton_runtime import require_launchable

GATE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "swiglu_oai": 3}
"""Number of each activation in the kernels. Only ``swiglu_oai`` has gate and up interleaved: even and odd columns."""

OAI_LIMIT = 7.0
OAI_ALPHA = 1.702
"""Clamp limit and sigmoid slope of ``swiglu_oai`` (source: gpt-oss's reference model)."""

TILE_ELEMENTS = 1024

TOLERANCES = {torch.float32: (5e-6, 1e-5), torch.float16: (2e-3, 1e-3), torch.bfloat16: (1.6e-2, 1e-2)}
"""Relative and absolute tolerance of kernel against reference: float32 arithmetic, one rounding, approximate exp."""


def gate_reference(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """Reference of ``gate``: in float32, rounded once."""
    wide = gate_up.float()
    if activation == "swiglu_oai":
        gate = wide[..., 0::2].clamp(max=OAI_LIMIT)
        up = wide[..., 1::2].clamp(-OAI_LIMIT, OAI_LIMIT)
        return ((up + 1) * gate * torch.sigmoid(OAI_ALPHA * gate)).to(gate_up.dtype)
    gate, up = wide.chunk(2, -1)
    if activation == "silu":
        return (F.silu(gate) * up).to(gate_up.dtype)
    return (F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up).to(gate_up.dtype)


def gate(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """Compute ``activation(gate) * up`` by the Triton kernel. NaN stays NaN, through the clamps too.

    Args:
        gate_up: float32, float16 or bfloat16 ``[num_tokens, 2 * width]``, rows may be strided: gate in the first half
            and up in the second half; in even and odd columns for ``swiglu_oai``.
        activation: silu, gelu (exact), gelu_tanh, or swiglu_oai: gate clamped above at 7, up to [-7, 7], and then
            ``(up + 1) * gate * sigmoid(1.702 * gate)``.

    Returns:
        ``[num_tokens, width]``, contiguous.

    Raises:
        ValueError: the tensor does not have this shape, dtype or device, or the activation is unknown.
        RuntimeError: Triton cannot launch here.
    """
    launch = _prepare((layout_of(gate_up), activation), gate_up, activation)
    num_tokens, columns = gate_up.shape
    out = gate_up.new_empty(num_tokens, columns // 2)
    launch(gate_up, out)
    return out


def launch_constants(width: int, activation: str) -> dict[str, int]:
    """Compile-time constants of the kernel; shared with the test that compiles it ahead of time."""
    return {
        "ACTIVATION": ACTIVATIONS[activation],
        "TILE_ELEMENTS": min(1 << (width - 1).bit_length(), TILE_ELEMENTS),
    }


@once_per_layout
def _prepare(gate_up: torch.Tensor, activation: str) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Check the arguments and return their launch. Its arguments: gate_up, out."""
    check_tensor("gate_up", gate_up, {"num_tokens": None, "2 * width": None}, GATE_DTYPES, gate_up.device)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)} (got {activation!r})")
    num_tokens, columns = gate_up.shape
    if columns % 2 != 0:
        raise ValueError(f"gate_up: dimension 1 (2 * width) is {columns}, expected an even number")
    kernel, width = _kernel(gate_up.device), columns // 2
    if num_tokens == 0 or width == 0:
        return launch_nothing
    constants = launch_constants(width, activation)
    grid = (num_tokens, -(-width // constants["TILE_ELEMENTS"]))
    return Launch(kernel, grid, (width, gate_up.stride(0), width), constants)


def _kernel(device: torch.device) -> Any:
    require_launchable(device.type)
    from quire.kernels.dense.gated_activation_triton import gated_activation_kernel

    return gated_activation_kernel
