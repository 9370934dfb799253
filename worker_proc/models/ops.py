"""Element-wise operations and expert layers of a decoder, as an interface with one implementation per device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F

from quire.kernels.common.mxfp4 import dequantise_mxfp4
from quire.kernels.common.scaled_weight import ScaledWeight
from quire.kernels.dense.gated_activation import OAI_ALPHA, OAI_LIMIT
from quire.worker_proc.models.additions import Addition, ExpertAdditions

Product = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of one layer, with this rank's share of their width.

    Attributes:
        gate_up: ``[num_experts, 2 * width, hidden_size]``: gate rows, then up rows; interleaved for swiglu_oai.
            In MXFP4 uint8 ``[num_experts, 2 * width, hidden_size / 32, 16]``.
        down: ``[num_experts, hidden_size, width]``; in MXFP4 uint8 ``[num_experts, hidden_size, width / 32, 16]``.
        gate_up_bias: ``[num_experts, 2 * width]`` or None.
        down_bias: ``[num_experts, hidden_size]`` or None.
        activation: as for ``Ops.gate``.
        packed: each expert's two layers, with their biases, in the CPU's packed layout; if given, the weights above
            are empty.
        stacked: the rows of all experts' two layers (``formats/stacked.py``), if the operations want quantised weights
            in this form; ``packed`` then has the same memory.
        round_inputs: rounds the inputs of both layers of ``stacked``, if the format asks for it.
        gate_up_scales, down_scales: of MXFP4 weights, uint8 and without the last dimension; None for other weights.
        additions: what rows add in the experts; None: nothing.
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    activation: str = "silu"
    packed: Sequence[tuple[Product, Product]] = ()
    stacked: tuple[ScaledWeight, ScaledWeight] | None = None
    round_inputs: Product | None = None
    gate_up_scales: torch.Tensor | None = None
    down_scales: torch.Tensor | None = None
    additions: ExpertAdditions | None = None

    @property
    def count(self) -> int:
        return len(self.packed) or len(self.down)

    def plain_layers(self, expert: int, dtype: torch.dtype) -> tuple[Product, Product]:
        """Return an expert's two layers, if they are not packed; each widens its weight when it is called."""
        return (
            partial(_linear, self.gate_up, self.gate_up_scales, self.gate_up_bias, expert, dtype),
            partial(_linear, self.down, self.down_scales, self.down_bias, expert, dtype),
        )


class Ops(Protocol):
    """Steps of a decoder between matrix products and attention, each of which some device computes in one kernel.

    Attributes:
        stacks_experts: ``experts`` needs quantised experts as one weight (``Experts.stacked``).
    """

    stacks_experts: bool

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
        """Divide ``x`` by its root mean square over the last dimension, in float32, and multiply by ``weight``.

        Formula: arXiv 1910.07467.
        """
        ...

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Add ``x`` to ``residual`` in place, and return the norm of the sum. All ``[num_tokens, hidden_size]``."""
        ...

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
        """Normalise ``x + residual`` to mean 0 and variance 1 in float32, and apply weight and bias.

        Args:
            x: ``[num_tokens, hidden_size]``.
            residual: of the same shape; None: zero.
            keeps_sum: ``residual`` becomes the sum, in place.
        """
        ...

    def gate(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        """Compute ``activation(gate) * up``: ``[num_tokens, 2 * width]`` → ``[num_tokens, width]``.

        Args:
            activation: silu, gelu (exact), gelu_tanh or swiglu_oai. Only swiglu_oai has gate and up interleaved, in
                even and odd columns (``kernels/dense/gated_activation.py``).
        """
        ...

    def join_columns(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the parts side by side: each ``[num_tokens, width]``, of one dtype."""
        ...

    def route(self, scores: torch.Tensor, top_k: int, *, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose each token's experts: the highest scores, best first, and the lower expert id of equal scores.

        Args:
            scores: ``[num_tokens, num_experts]``.
            renormalise: weights are the softmax over the chosen scores, so that they sum to 1. Otherwise they are
                taken from the softmax over all scores.

        Returns:
            Expert ids, int32, and weights, float32, both ``[num_tokens, top_k]``.
        """
        ...

    def experts(
        self, x: torch.Tensor, experts: Experts, expert_ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Compute the weighted sum of the chosen experts' outputs, ``[num_tokens, hidden_size]``, in ``x``'s dtype.

        Args:
            expert_ids, weights: as ``route`` returns them.
        """
        ...


ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "swiglu_oai")


class TorchOps:
    """``Ops`` in torch's operators, for every device: the reference for the other implementations."""

    stacks_experts = False

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, eps)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        residual += x
        return self.rms_norm(residual, weight, eps)

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
        if residual is not None:
            x = residual.add_(x) if keeps_sum else x + residual
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)

    def gate(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        if activation == "swiglu_oai":
            return swiglu_oai(gate_up)
        gate, up = gate_up.chunk(2, -1)
        if activation == "silu":
            return F.silu(gate).mul_(up)
        return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none").mul_(up)

    def join_columns(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(parts), 1)

    def route(self, scores: torch.Tensor, top_k: int, *, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
        scores = scores.float()
        # A stable sort: ``topk`` does not define which of several equal scores it returns.
        chosen = scores.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
        if renormalise:
            return chosen.int(), scores.gather(-1, chosen).softmax(-1)
        return chosen.int(), scores.softmax(-1).gather(-1, chosen)

    def experts(
        self, x: torch.Tensor, experts: Experts, expert_ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """As ``Ops.experts``, with two products per expert in use.

        A token's sum runs in the order of the expert ids, so it does not depend on the other tokens of the batch.
        """
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        flat = expert_ids.reshape(-1)
        order = flat.argsort(stable=True)
        tokens, weights = order // expert_ids.shape[1], weights.reshape(-1)[order]
        first = 0
        for expert, count in enumerate(torch.bincount(flat, minlength=experts.count).tolist()):
            if not count:
                continue
            routed = tokens[first : first + count]
            added = None if experts.additions is None else experts.additions.of(expert, routed)
            result = self._expert(x.index_select(0, routed), experts, expert, added)
            out.index_add_(0, routed, result.float().mul_(weights[first : first + count, None]))
            first += count
        return out.to(x.dtype)

    def _expert(
        self, x: torch.Tensor, experts: Experts, expert: int, added: tuple[Addition, Addition] | None
    ) -> torch.Tensor:
        first, second = experts.packed[expert] if experts.packed else experts.plain_layers(expert, x.dtype)
        gate_up = first(x)
        if added is not None:
            added[0].add(x, gate_up)
        gated = self._gated(gate_up, experts)
        out = second(gated)
        if added is not None:
            added[1].add(gated, out)
        return out

    def _gated(self, gate_up: torch.Tensor, experts: Experts) -> torch.Tensor:
        # Not ``self.gate``: a device's implementation need not support swiglu_oai, which only expert layers use.
        return swiglu_oai(gate_up) if experts.activation == "swiglu_oai" else self.gate(gate_up, experts.activation)


class RowByRowOps(TorchOps):
    """``TorchOps`` whose gates are computed row by row: slower, but a token's bits do not depend on other tokens.

    torch computes the last few elements of a thread's share with another code path than the rest. Its norms and
    softmax already work row by row, its gates do not.
    """

    def gate(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        if len(gate_up) < 2:
            return super().gate(gate_up, activation)
        return torch.cat([super(RowByRowOps, self).gate(row[None], activation) for row in gate_up])


def expert_weight(weights: torch.Tensor, scales: torch.Tensor | None, expert: int, dtype: torch.dtype) -> torch.Tensor:
    """Return one expert's weight, ``[outputs, inputs]``, widened to ``dtype`` as in ``Linear``."""
    return weights[expert].to(dtype) if scales is None else dequantise_mxfp4(weights[expert], scales[expert], dtype)


def _linear(
    weights: torch.Tensor,
    scales: torch.Tensor | None,
    biases: torch.Tensor | None,
    expert: int,
    dtype: torch.dtype,
    x: torch.Tensor,
) -> torch.Tensor:
    bias = None if biases is None else biases[expert].to(dtype)
    return F.linear(x, expert_weight(weights, scales, expert, dtype), bias)


def swiglu_oai(gate_up: torch.Tensor) -> torch.Tensor:
    """gpt-oss's activation of gate ``g`` and up ``u``: ``g * sigmoid(alpha * g) * (u + 1)``, after clamping both."""
    gate = gate_up[..., 0::2].clamp(max=OAI_LIMIT)
    up = gate_up[..., 1::2].clamp(-OAI_LIMIT, OAI_LIMIT)
    return gate * torch.sigmoid(OAI_ALPHA * gate) * (up + 1)
