"""The arithmetic between a decoder's matrix products and its attention, so that a device can bring its own."""

from typing import Protocol

import torch
import torch.nn.functional as F


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
