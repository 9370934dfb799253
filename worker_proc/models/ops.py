"""The arithmetic between a decoder's matrix products and its attention, so that a device can bring its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from quire.worker_proc.models.linear import Linear


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of one layer, of this rank's width.

    Attributes:
        gate_up: ``[num_experts, 2 * width, hidden_size]``: rows of the gate, then those of what is gated.
        down: ``[num_experts, hidden_size, width]``.
        gate_up_bias: ``[num_experts, 2 * width]`` or None.
        down_bias: ``[num_experts, hidden_size]`` or None.
        packed: each expert's two layers in the CPU's own layout, instead of the four tensors above, which are empty.
        activation: as in ``Ops.gate``, or clamped_swiglu: with the gate ``g`` at most ``limit`` and ``u`` within
            ``±limit``, ``g * sigmoid(alpha * g) * (u + 1)`` (gpt-oss).
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    activation: str = "silu"
    alpha: float = 1.702
    limit: float = 7.0
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
            activation: silu, gelu (exact) or gelu_tanh.
        """
        ...

    def route(
        self, scores: torch.Tensor, num_chosen: int, *, softmax_chosen: bool, renormalise: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose each token's experts: the highest scores.

        Args:
            scores: ``[num_tokens, num_experts]``.
            softmax_chosen: the softmax is over the chosen scores alone; else over all, before the choice.
            renormalise: the chosen shares are divided by their sum.

        Returns:
            Shares, float32, and experts, int64, both ``[num_tokens, num_chosen]``.
        """
        ...

    def experts(self, x: torch.Tensor, experts: Experts, shares: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Sum of the chosen experts' answers times their shares, ``[num_tokens, hidden_size]``, in ``x``'s dtype.

        Args:
            shares, chosen: of ``route``.
        """
        ...


ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


class TorchOps:
    """``Ops`` in torch's own operators: everywhere, and what the others are compared with."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, eps)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        residual += x
        return self.rms_norm(residual, weight, eps)

    def gate(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        gate, up = gate_up.chunk(2, -1)
        if activation == "silu":
            return F.silu(gate).mul_(up)
        return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none").mul_(up)

    def route(
        self, scores: torch.Tensor, num_chosen: int, *, softmax_chosen: bool, renormalise: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores = scores.float()
        if softmax_chosen:
            highest, chosen = scores.topk(num_chosen)
            return highest.softmax(-1), chosen
        shares, chosen = scores.softmax(-1).topk(num_chosen)
        return (shares / shares.sum(-1, keepdim=True) if renormalise else shares), chosen

    def experts(self, x: torch.Tensor, experts: Experts, shares: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """One pair of products per expert that anyone chose. Sums run in the experts' order: neighbours in the batch
        do not change a token's."""
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        flat = chosen.reshape(-1)
        order = flat.argsort(stable=True)
        tokens, shares = order // chosen.shape[1], shares.reshape(-1)[order]
        first = 0
        for expert, count in enumerate(torch.bincount(flat, minlength=experts.count).tolist()):
            if not count:
                continue
            mine = tokens[first : first + count]
            answer = self._expert(x.index_select(0, mine), experts, expert)
            out.index_add_(0, mine, answer.float().mul_(shares[first : first + count, None]))
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
        if experts.activation == "clamped_swiglu":
            return clamped_swiglu(gate_up, experts.alpha, experts.limit)
        return self.gate(gate_up, experts.activation)


def _linear(x: torch.Tensor, weights: torch.Tensor, biases: torch.Tensor | None, expert: int) -> torch.Tensor:
    """As ``Linear``: weights narrower than ``x`` are widened."""
    return F.linear(x, weights[expert].to(x.dtype), None if biases is None else biases[expert].to(x.dtype))


def clamped_swiglu(gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """gpt-oss's gate, ``[rows, 2 * width]`` → ``[rows, width]``, as ``Experts.activation`` says."""
    gate, up = gate_up.chunk(2, -1)
    gate = gate.clamp(max=limit)
    return gate * torch.sigmoid(alpha * gate) * (up.clamp(-limit, limit) + 1)
