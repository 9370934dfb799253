"""``Ops`` by our own Triton kernels."""

import torch

from quire.kernels.common.triton_runtime import require_launchable
from quire.kernels.dense import gated_activation, rms_norm
from quire.kernels.moe import fused_experts, moe_routing
from quire.worker_proc.models.ops import Experts


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

    def route(self, scores: torch.Tensor, top_k: int, *, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
        return moe_routing.route(scores, top_k, renormalise=renormalise)

    def experts(
        self, x: torch.Tensor, experts: Experts, expert_ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """As ``Ops.experts``; sums run in the order of ``expert_ids``.

        Raises:
            ValueError: the experts are packed for the CPU.
        """
        if experts.packed:
            raise ValueError("experts: packed for the CPU, which no kernel here reads")
        return fused_experts.fused_experts(
            x,
            experts.gate_up,
            experts.down,
            expert_ids,
            weights,
            experts.activation,
            bias13=experts.gate_up_bias,
            bias2=experts.down_bias,
        )
