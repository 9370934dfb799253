"""``Ops`` implemented by Quire's Triton kernels."""

import torch

from quire.kernels.common.triton_runtime import require_launchable
from quire.kernels.dense import gated_activation, rms_norm
from quire.kernels.moe import fused_experts, fused_experts_mxfp4, moe_routing
from quire.worker_proc.models.ops import Experts


class TritonOps:
    """Stateless ``Ops`` for a CUDA device, or for the CPU with Triton's interpreter (tests).

    Each method rounds to the dtype once, while ``TorchOps`` may round between its steps; the kernels' tolerances cover
    the difference.

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
        """As ``Ops.experts``; a token's sum runs in the order of ``expert_ids``.

        Raises:
            ValueError: the experts are packed for the CPU.
        """
        if experts.packed:
            raise ValueError("experts: weights are packed for the CPU, expected plain tensors")
        if experts.gate_up_scales is not None and experts.down_scales is not None:
            return fused_experts_mxfp4.fused_experts_mxfp4(
                x,
                experts.gate_up,
                experts.gate_up_scales,
                experts.down,
                experts.down_scales,
                expert_ids,
                weights,
                experts.activation,
                bias13=experts.gate_up_bias,
                bias2=experts.down_bias,
            )
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
