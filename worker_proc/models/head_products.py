"""Products of each head's own inputs by its own matrix."""

from typing import Protocol

import torch

from quire.kernels.cpu.linear.head_products import PackedHeads
from quire.kernels.cpu.native.library import load_native


class HeadProducts(Protocol):
    """``[num_tokens, num_heads, inputs]`` → ``[num_tokens, num_heads, outputs]``; both may be strided.

    Attributes:
        is_packed: it is the native library's.
    """

    is_packed: bool

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class TorchHeads:
    """As a batched product, or in deterministic mode a token at a time, so that its bits ignore the batch."""

    is_packed = False

    def __init__(self, weight: torch.Tensor, *, deterministic: bool) -> None:
        self._weight = weight.transpose(1, 2).contiguous()
        self._deterministic = deterministic

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not self._deterministic:
            return torch.bmm(x.transpose(0, 1), self._weight).transpose(0, 1)
        tokens = [torch.bmm(token.contiguous()[:, None], self._weight)[:, 0] for token in x]
        return torch.stack(tokens) if tokens else x.new_empty(0, len(self._weight), self._weight.shape[2])


def head_products(weight: torch.Tensor, dtype: torch.dtype, *, deterministic: bool) -> HeadProducts:
    """Return the products by ``weight``, ``[num_heads, outputs, inputs]``, of activations in ``dtype``."""
    native = load_native() if weight.device.type == "cpu" else None
    if native is not None and PackedHeads.accepts(native, weight):
        return PackedHeads(native, weight)
    return TorchHeads(weight.to(dtype), deterministic=deterministic)
