"""Log probabilities of given tokens and of the most likely tokens."""

import torch

from quire.kernels.common.logits import TopLogprobs
from quire.kernels.cpu.sampling.logits import native_logits
from quire.kernels.sampling.sampling_logprobs import MAX_LOGPROBS, top_logprobs


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, num_best: int) -> TopLogprobs:
    """Return the log probabilities of each row's token and of its ``num_best`` most likely tokens.

    Computed by Triton on a GPU, on a CPU by the native library; by torch without it, or for more than the kernel has.

    Args:
        logits: float32 ``[n, vocab]``.
        tokens: int64 ``[n]``.
        num_best: limited to the vocabulary size.
    """
    num_best = min(num_best, logits.shape[-1])
    if not logits.is_cpu:
        by = top_logprobs if num_best <= MAX_LOGPROBS else _by_torch
        return by(logits, tokens, num_best)
    native = native_logits()
    return _by_torch(logits, tokens, num_best) if native is None else native.top_logprobs(logits, tokens, num_best)


def with_given(found: TopLogprobs, logits: torch.Tensor, rows: torch.Tensor, given: torch.Tensor) -> TopLogprobs:
    """Return ``found`` with given tokens in place of the most likely ones in some rows.

    Args:
        logits: float32 ``[n, vocab]``, those of ``found``.
        rows: int64 ``[m]``.
        given: int64 ``[m, k]``: the tokens of each of ``rows``.
    """
    k = given.shape[1]
    more = (0, max(1 + k - found.token_ids.shape[1], 0))
    token_ids, values = (torch.nn.functional.pad(each, more) for each in (found.token_ids, found.values))
    token_ids[rows, 1 : 1 + k] = given
    values[rows, 1 : 1 + k] = torch.log_softmax(logits[rows], dim=-1).gather(-1, given)
    return TopLogprobs(token_ids, values, found.ranks)


def _by_torch(logits: torch.Tensor, tokens: torch.Tensor, num_best: int) -> TopLogprobs:
    given = tokens[:, None]
    # -0.0 + 0.0 is 0.0: both zeros rank equal.
    token_ids = torch.cat([given, best(logits + 0.0, num_best)[1]], dim=-1)
    values = torch.log_softmax(logits, dim=-1).gather(-1, token_ids)
    return TopLogprobs(token_ids, values, (logits > logits.gather(-1, given)).sum(dim=-1) + 1)


def best(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ``k`` highest values of each row of a float32 ``[rows, n]`` and their indices, highest first.

    Of equal values the lower index is first. ``torch.topk`` alone orders equal values (frequent in 16-bit logits) in a
    way that depends on ``k``, and so on the parameters of other rows. Its keys here are unique: value and index packed
    into one integer.
    """
    bits = values.view(torch.int32).to(torch.int64)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # the bits of negative floats are in reverse order
    index = torch.arange(values.shape[-1], device=values.device)
    order = torch.topk((ordered << 32) - index, k, dim=-1).indices
    return values.gather(-1, order), order
