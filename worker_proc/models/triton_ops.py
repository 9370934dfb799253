"""``Ops`` implemented by Quire's Triton kernels."""

from collections.abc import Sequence

import torch

from quire.kernels.common.triton_runtime import require_launchable
from quire.kernels.dense.gated_activation import gate
from quire.kernels.dense.rms_norm import add_rms_norm, rms_norm
from quire.kernels.moe import fused_experts, fused_experts_mxfp4, fused_experts_packed
from quire.kernels.moe.moe_routing import route
from quire.worker_proc.models.ops import Experts, TorchOps


class TritonOps:
    """``Ops`` for a CUDA device, or for the CPU with Triton's interpreter (tests).

    Each method rounds to the dtype once, while ``TorchOps`` may round between its steps; the kernels' tolerances cover
    the difference.

    Raises:
        RuntimeError: triton is not installed, or there is neither a CUDA device nor the interpreter.
    """

    stacks_experts = True
    rms_norm = staticmethod(rms_norm)
    add_rms_norm = staticmethod(add_rms_norm)
    gate = staticmethod(gate)
    route = staticmethod(route)

    def __init__(self) -> None:
        require_launchable("cuda" if torch.cuda.is_available() else "cpu")
        self._one_by_one = TorchOps()
        self.layer_norm = self._one_by_one.layer_norm

    def join_columns(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(parts), 1)

    def experts(
        self, x: torch.Tensor, experts: Experts, expert_ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """As ``Ops.experts``; a token's sum runs in the order of ``expert_ids``.

        While additions change experts, these are computed one by one, and the host waits for the device: such a step
        cannot be captured.

        Raises:
            ValueError: the experts are packed for the CPU.
        """
        if experts.additions is not None and experts.additions.in_use:
            return self._one_by_one.experts(x, experts, expert_ids, weights)
        if experts.stacked is not None:
            w13, w2 = experts.stacked
            return fused_experts_packed.fused_experts_packed(
                x, w13, w2, expert_ids, weights, experts.activation, experts.round_inputs
            )
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
