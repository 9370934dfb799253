"""Log probabilities of given tokens and of the best ones."""

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class TokenLogprobs:
    """Of some positions: ``[num_positions, width]``, the given token first, then the best ones in falling order.

    ``ranks``: int64 ``[num_positions]`` of the given token, from 1.
    """

    token_ids: torch.Tensor
    values: torch.Tensor
    ranks: torch.Tensor


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, num_best: int) -> TokenLogprobs:
    """Of each row of float32 ``logits`` ``[n, vocab]``, for its token of int64 ``tokens`` ``[n]``."""
    all_values = torch.log_softmax(logits, dim=-1)
    given = tokens[:, None]
    value = all_values.gather(-1, given)
    values, token_ids = best(all_values, min(num_best, all_values.shape[-1]))
    return TokenLogprobs(
        torch.cat([given, token_ids], dim=-1), torch.cat([value, values], dim=-1), (all_values > value).sum(dim=-1) + 1
    )


def best(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``k`` best of each row of a float32 ``[rows, n]`` and their indices, best first; of equals the lower index.

    ``torch.topk`` alone orders equals (frequent in 16-bit logits) in a way that depends on ``k``, and with it on what
    other rows ask for. So it is given keys that are never equal: value and index as one integer.
    """
    bits = values.view(torch.int32).to(torch.int64)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # negative floats count backwards
    index = torch.arange(values.shape[-1], device=values.device)
    order = torch.topk((ordered << 32) - index, k, dim=-1).indices
    return values.gather(-1, order), order
