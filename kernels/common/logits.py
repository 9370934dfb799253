"""What kernels over rows of logits share, on every device."""

from dataclasses import dataclass

import torch

MAX_VOCAB = 1 << 20


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """``[num_rows, 1 + n]``: the given token, and then the ``n`` best, best first; of equals the lower id.

    Attributes:
        token_ids: int64.
        values: float32, natural logarithms.
        ranks: int64 ``[num_rows]``, of the given token: 1 and how many logits are above its own.
    """

    token_ids: torch.Tensor
    values: torch.Tensor
    ranks: torch.Tensor
