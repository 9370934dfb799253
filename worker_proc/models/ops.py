"""The arithmetic between a decoder's matrix products and its attention, so that a device can bring its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from quire.kernels.dense.gated_activation import OAI_ALPHA, OAI_LIMIT
from quire.worker_proc.models.linear import Linear


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of one layer, of this rank's width.

    Attributes:
        gate_up: ``[num_experts, 2 * width, hidden_size]``: rows of the gate, then those of what is gated; the two take
            turns for swiglu_oai.
        down: ``[num_experts, hidden_size, width]``.
        gate_up_bias: ``[num_experts, 2 * width]`` or None.
        down_bias: ``[num_experts, hidden_size]`` or None.
        activation: as of ``Ops.gate``.
        packed: each expert's two layers in the CPU's own layout, instead of the four tensors above, which are empty.
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    activation: str = "silu"
    packed: Sequence[tuple[Linear, Linear]] = ()

    @property
    def count(self) -> int:
        return len(self.packed) or len(self.down)


class Ops(Protocol):
    """Element-wise steps of a decoder, each of which some device can do in one kernel."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
        """``x`` over its root mean square along the last dimension, in float32, times ``weight`` (arXiv 1910.07467)."""
        ...

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Add ``x`` to ``residual``, in place, and return the norm of the sum. All ``[num_tokens, hidden_size]``."""
        ...

    def gate(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        """``activation(gate) * up`` of ``[num_tokens, 2 * width]``: ``[num_tokens, width]``.

        Args:
            activation: silu, gelu (exact), gelu_tanh, or swiglu_oai, which alone has gates in even and what is gated in
                odd columns (``kernels/dense/gated_activation.py``).
        """
        ...

    def route(self, scores: torch.Tensor, top_k: int, *, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose each token's experts: the highest scores, best first; of equals the lower expert.

        Args:
            scores: ``[num_tokens, num_experts]``.
            renormalise: a token's weights sum up to 1: the softmax over the chosen scores. Otherwise they are their
                shares of the softmax over all.

        Returns:
            Expert ids, int32, and weights, float32, both ``[num_tokens, top_k]``.
        """
        ...

    def experts(
        self, x: torch.Tensor, experts: Experts, expert_ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Sum of the chosen experts' answers times their weights, ``[num_tokens, hidden_size]``, in ``x``'s dtype.

        Args:
            expert_ids, weights: of ``route``.
        """
        ...


ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "swiglu_oai")


class TorchOps:
    """``Ops`` in torch's own operators: everywhere, and what the others are compared with."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, eps)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        residual += x
        return self.rms_norm(residual, weight, eps)

    def gate(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        if activation == "swiglu_oai":
            return swiglu_oai(gate_up)
        gate, up = gate_up.chunk(2, -1)
        if activation == "silu":
            return F.silu(gate).mul_(up)
        return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none").mul_(up)

    def route(self, scores: torch.Tensor, top_k: int, *, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
        scores = scores.float()
        # A stable sort: ``topk`` leaves open which of equals it takes.
        chosen = scores.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
        if renormalise:
            return chosen.int(), scores.gather(-1, chosen).softmax(-1)
        return chosen.int(), scores.softmax(-1).gather(-1, chosen)

    def experts(
        self, x: torch.Tensor, experts: Experts, expert_ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """One pair of products per expert that anyone chose. Sums run in the experts' order: neighbours in the batch
        do not change a token's."""
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        flat = expert_ids.reshape(-1)
        order = flat.argsort(stable=True)
        tokens, weights = order // expert_ids.shape[1], weights.reshape(-1)[order]
        first = 0
        for expert, count in enumerate(torch.bincount(flat, minlength=experts.count).tolist()):
            if not count:
                continue
            mine = tokens[first : first + count]
            answer = self._expert(x.index_select(0, mine), experts, expert)
            out.index_add_(0, mine, answer.float().mul_(weights[first : first + count, None]))
            first += count
        return out.to(x.dtype)

    def _expert(self, x: torch.Tensor, experts: Experts, expert: int) -> torch.Tensor:
        if experts.packed:
            first, second = experts.packed[expert]
            answer: torch.Tensor = second(self._gated(first(x), experts))
            return answer
        gated = self._gated(_linear(x, experts.gate_up, experts.gate_up_bias, expert), experts)
        return _linear(gated, experts.down, experts.down_bias, expert)

    def _gated(self, gate_up: torch.Tensor, experts: Experts) -> torch.Tensor:
        # Not by ``self.gate``: a device's own need not know this one, which no other layer has.
        return swiglu_oai(gate_up) if experts.activation == "swiglu_oai" else self.gate(gate_up, experts.activation)


class RowByRowOps(TorchOps):
    """As ``TorchOps``, slowly: a token's bits do not depend on its neighbours.

    torch computes the last few numbers of what a thread is given in another way than the others; norms and softmax are
    row by row as they are, gates are not.
    """

    def gate(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        if len(gate_up) < 2:
            return super().gate(gate_up, activation)
        return torch.cat([super(RowByRowOps, self).gate(row[None], activation) for row in gate_up])


def _linear(x: torch.Tensor, weights: torch.Tensor, biases: torch.Tensor | None, expert: int) -> torch.Tensor:
    """As ``Linear``: weights narrower than ``x`` are widened."""
    return F.linear(x, weights[expert].to(x.dtype), None if biases is None else biases[expert].to(x.dtype))


def swiglu_oai(gate_up: torch.Tensor) -> torch.Tensor:
    """gpt-oss's gate ``g`` and gated ``u``: ``g * sigmoid(alpha * g) * (u + 1)``, both clamped before."""
    gate = gate_up[..., 0::2].clamp(max=OAI_LIMIT)
    up = gate_up[..., 1::2].clamp(-OAI_LIMIT, OAI_LIMIT)
    return gate * torch.sigmoid(OAI_ALPHA * gate) * (up + 1)
