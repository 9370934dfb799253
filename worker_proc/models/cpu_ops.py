"""``Ops`` implemented by the native CPU library."""

from collections.abc import Sequence

import torch

from quire.kernels.cpu.linear.ops import DTYPES, CpuKernels
from quire.kernels.cpu.native.library import Native
from quire.worker_proc.models.ops import TorchOps


class CpuOps(TorchOps):
    """Norms, gates and joined columns in native calls, for float32 and bfloat16. torch computes the rest.

    Each call rounds to the dtype once, while ``TorchOps`` may round between its steps. A token's bits do not depend on
    the other tokens of the batch. With torch they may: its silu and gelu use another code path for the last elements
    of a thread's share.
    """

    def __init__(self, native: Native) -> None:
        self._kernels = CpuKernels(native)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
        if x.dtype not in DTYPES or x.dim() not in (2, 3) or not _adjacent(x):
            return super().rms_norm(x, weight, eps)
        return self._kernels.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if (
            residual.dtype not in DTYPES
            or x.dtype is not residual.dtype
            or not (_adjacent(x) and residual.is_contiguous())
        ):
            residual += x
            return self.rms_norm(residual, weight, eps)
        return self._kernels.add_rms_norm(x, residual, weight, eps)

    def layer_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        eps: float,
        residual: torch.Tensor | None = None,
        *,
        keeps_sum: bool = False,
    ) -> torch.Tensor:
        if x.dtype not in DTYPES or not _adjacent(x) or (residual is not None and not residual.is_contiguous()):
            return super().layer_norm(x, weight, bias, eps, residual, keeps_sum=keeps_sum)
        return self._kernels.layer_norm(x, weight, bias, eps, residual, keeps_sum=keeps_sum)

    def gate(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        if gate_up.dtype not in DTYPES or not _adjacent(gate_up):
            return super().gate(gate_up, activation)
        return self._kernels.gate(gate_up, activation)

    def join_columns(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        if any(part.dtype not in DTYPES or not _adjacent(part) for part in parts):
            return super().join_columns(parts)
        return self._kernels.join_columns(parts)


def _adjacent(x: torch.Tensor) -> bool:
    """Whether the last dimension is contiguous; torch gives an empty tensor any stride."""
    return x.stride(-1) == 1 or x.numel() == 0
