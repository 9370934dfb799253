"""Definitions shared by all kernels over rows of logits, on every device."""

from dataclasses import dataclass

import torch

MAX_VOCAB = 1 << 20


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """Log probabilities of each row's given token and of its ``n`` best tokens, best first, then by token id.

    Attributes:
        token_ids: int64 ``[num_rows, 1 + n]``: the given token, then the best ones.
        values: float32 ``[num_rows, 1 + n]``, natural logarithms.
        ranks: int64 ``[num_rows]``: rank of the given token: 1 plus the number of higher logits.
    """

    token_ids: torch.Tensor
    values: torch.Tensor
    ranks: torch.Tensor
