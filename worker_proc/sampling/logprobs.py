"""Log probabilities of given tokens and of the best ones."""

import torch

from quire.kernels.common.logits import TopLogprobs
from quire.kernels.cpu.logits import native_logits
from quire.kernels.sampling.sampling_logprobs import top_logprobs


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, num_best: int) -> TopLogprobs:
    """Of each row of float32 ``logits`` ``[n, vocab]``, for its token of int64 ``tokens`` ``[n]``.

    On a GPU by Triton, on a CPU by the native library, or torch where there is none.
    """
    num_best = min(num_best, logits.shape[-1])
    if not logits.is_cpu:
        return top_logprobs(logits, tokens, num_best)
    native = native_logits()
    return _by_torch(logits, tokens, num_best) if native is None else native.top_logprobs(logits, tokens, num_best)


def _by_torch(logits: torch.Tensor, tokens: torch.Tensor, num_best: int) -> TopLogprobs:
    given = tokens[:, None]
    token_ids = torch.cat([given, best(logits + 0.0, num_best)[1]], dim=-1)  # -0.0 + 0.0 is 0.0: both zeros are equal
    values = torch.log_softmax(logits, dim=-1).gather(-1, token_ids)
    return TopLogprobs(token_ids, values, (logits > logits.gather(-1, given)).sum(dim=-1) + 1)


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
