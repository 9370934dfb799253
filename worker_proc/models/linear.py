"""A linear layer that may hold its weight in the layout that the CPU's matrix library likes best."""

import torch
import torch.nn.functional as F


class Linear(torch.nn.Module):
    """``x @ weight.T + bias``, ``[tokens, inputs]`` → ``[tokens, outputs]``.

    Args:
        weight: ``[outputs, inputs]``; shared when given to two layers (tied embeddings).
        bias: ``[outputs]`` or None.
    """

    def __init__(self, weight: torch.nn.Parameter, bias: torch.nn.Parameter | None = None) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self._packed: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed is None:
            return F.linear(x, self.weight, self.bias)
        packed: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return packed

    def prepack(self, *, keep: bool = False) -> bool:
        """Reorder the weight for oneDNN; false where this torch or device cannot, and then nothing changed.

        torch's own choice for float32, MKL, is 1.3 to 3 times slower for the 2 to 64 tokens of a decode step, and
        bfloat16 gains about as much. Inductor calls the same private operators.

        Args:
            keep: the plain weight stays, at the price of a second copy: someone else reads it. Otherwise it is gone.
        """
        if self._packed is not None:
            return True
        if self.weight.device.type != "cpu" or self.weight.dtype not in (torch.float32, torch.bfloat16):
            return False
        try:
            packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.data)
            torch.ops.mkldnn._linear_pointwise(self.weight.data[:1], packed, self.bias, "none", [], "")
        except (AttributeError, RuntimeError, NotImplementedError):
            return False
        self._packed = packed
        if not keep:
            self.weight = torch.nn.Parameter(self.weight.new_empty(0), requires_grad=False)
        return True
