"""Log probabilities of the sampled token and of the best tokens, without a pass that computes all of them."""

from typing import Any

import torch

from quire.kernels.common.checks import check_tensor
from quire.kernels.common.logits import TopLogprobs
from quire.kernels.common.triton_runtime import require_launchable
from quire.kernels.sampling.sampling_stats import CHUNK, check_logits, row_statistics, tile_chunks

MAX_LOGPROBS = 32

TOLERANCE = (2e-6, 1e-5)
"""Relative and absolute tolerance of the kernel's values against the reference; ids and ranks must be equal."""


def top_logprobs_reference(logits: torch.Tensor, tokens: torch.Tensor, n: int) -> TopLogprobs:
    """Reference of ``top_logprobs``."""
    wide = logits.float()
    own = wide.gather(-1, tokens[:, None])
    # A stable sort, because torch.topk does not define which of several equal values it returns.
    best = wide.sort(dim=-1, descending=True, stable=True).indices[:, :n]
    token_ids = torch.cat((tokens[:, None], best), -1)
    values = torch.log_softmax(wide.double(), -1).gather(-1, token_ids).float()
    return TopLogprobs(token_ids, values, (wide > own).sum(-1) + 1)


def top_logprobs(logits: torch.Tensor, tokens: torch.Tensor, n: int) -> TopLogprobs:
    """Compute the log probabilities of each row's token and of its ``n`` best tokens, by Triton kernels.

    Order and ranks are those of the logits: different logits may round to equal log probabilities.

    Args:
        logits: float32, float16 or bfloat16 ``[num_rows, vocab]``, rows may be strided. A row whose statistics are
            ``bad`` gets valid ids and undefined values.
        tokens: int64 ``[num_rows]`` in [0, vocab); the value of a token out of range is NaN.
        n: 0 to ``MAX_LOGPROBS``, and at most the vocabulary size.

    Raises:
        ValueError: a tensor does not have this shape, dtype or device, or ``n`` is out of range.
        RuntimeError: Triton cannot launch here.
    """
    check_logits(logits)
    num_rows, vocab = logits.shape
    device = logits.device
    check_tensor("tokens", tokens, {"num_rows": num_rows}, (torch.int64,), device)
    if not 0 <= n <= min(vocab, MAX_LOGPROBS):
        raise ValueError(f"n must be between 0 and {min(vocab, MAX_LOGPROBS)} for {vocab} tokens (got {n})")
    chunk_kernel, row_kernel = _kernels(device)
    result = TopLogprobs(
        token_ids=torch.empty(num_rows, 1 + n, dtype=torch.int64, device=device),
        values=torch.empty(num_rows, 1 + n, dtype=torch.float32, device=device),
        ranks=torch.empty(num_rows, dtype=torch.int64, device=device),
    )
    if num_rows == 0:
        return result
    num_chunks = -(-vocab // CHUNK)
    constants = launch_constants(n)
    candidates = torch.empty(2, num_rows, num_chunks, constants["TILE_N"], dtype=torch.int32, device=device)
    above = torch.empty(num_rows, num_chunks, dtype=torch.int32, device=device)
    chunk_kernel[(num_rows, num_chunks)](
        logits, tokens, candidates[0], candidates[1], above, vocab, logits.stride(0), CHUNK=CHUNK, **constants
    )
    row_kernel[(num_rows,)](
        logits, tokens, row_statistics(logits).log_sum_exp, candidates[0], candidates[1], above, result.token_ids,
        result.values, result.ranks, vocab, num_chunks, logits.stride(0),
        TILE_CHUNKS=tile_chunks(vocab), **constants,
    )  # fmt: skip
    return result


def launch_constants(n: int) -> dict[str, int]:
    """Compile-time constants of both kernels; shared with the test that compiles them ahead of time."""
    return {"N": n, "TILE_N": 1 << max(n - 1, 0).bit_length(), "num_warps": 8}


def _kernels(device: torch.device) -> tuple[Any, Any]:
    require_launchable(device.type)
    from quire.kernels.sampling.sampling_logprobs_triton import chunk_candidates_kernel, row_logprobs_kernel

    return chunk_candidates_kernel, row_logprobs_kernel
