"""``Ops`` by our own Triton kernels."""

import torch

from quire.kernels import gated_activation, rms_norm
from quire.kernels.triton_runtime import require_launchable


class TritonOps:
    """``Ops`` on a CUDA device, or on the CPU where Triton's interpreter is on (tests). Holds nothing.

    Each method rounds to the dtype once, where ``TorchOps`` may round between its steps; the kernels' tolerances cover
    that.

    Raises:
        RuntimeError: triton is not installed, or there is neither a CUDA device nor the interpreter.
    """

    def __init__(self) -> None:
        require_launchable("cuda" if torch.cuda.is_available() else "cpu")

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
        return rms_norm.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm.add_rms_norm(x, residual, weight, eps)

    def gate(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        return gated_activation.gate(gate_up, activation)
