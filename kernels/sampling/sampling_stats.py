"""Statistics of each row of logits: the best token, the log-sum-exp, and whether the row can be sampled."""

from dataclasses import dataclass
from typing import Any

import torch

from quire.kernels.common.checks import check_tensor
from quire.kernels.common.logits import MAX_VOCAB
from quire.kernels.common.triton_runtime import require_launchable

LOGITS_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

CHUNK = 4096
"""Logits per program, so that a single row keeps many multiprocessors busy. Fixed, because a row's sums must not depend
on the number of rows."""

TOLERANCE = (2e-6, 2e-6)
"""Relative and absolute tolerance of the kernel's ``log_sum_exp`` against the reference; all else must be equal."""


@dataclass(frozen=True, slots=True)
class RowStatistics:
    """Statistics of logits ``[num_rows, vocab]``; all ``[num_rows]``.

    Attributes:
        tokens: int64, the index of the best logit; of equal ones the lowest.
        best: float32, its value; NaN if the row has a NaN.
        bad: bool, whether ``best`` is not finite: a NaN, an infinity, or a row with only minus infinity.
        log_sum_exp: float32; undefined if ``bad``.
    """

    tokens: torch.Tensor
    best: torch.Tensor
    bad: torch.Tensor
    log_sum_exp: torch.Tensor

    @classmethod
    def empty(cls, num_rows: int, device: torch.device) -> "RowStatistics":
        """Allocate uninitialised statistics."""
        floats = torch.empty(2, num_rows, dtype=torch.float32, device=device)
        tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
        return cls(tokens, floats[0], torch.empty(num_rows, dtype=torch.bool, device=device), floats[1])


def row_statistics_reference(logits: torch.Tensor) -> RowStatistics:
    """Reference of ``row_statistics``."""
    wide = logits.float()
    best = wide.amax(-1)
    # The lowest index of equal values. NaN equals nothing, so it is searched for separately.
    is_best = torch.where(best.isnan()[:, None], wide.isnan(), wide == best[:, None])
    return RowStatistics(
        tokens=is_best.int().argmax(-1),
        best=best,
        bad=~best.isfinite(),
        log_sum_exp=torch.logsumexp(wide.double(), -1).float(),
    )


def row_statistics(logits: torch.Tensor) -> RowStatistics:
    """Compute ``RowStatistics`` by two Triton kernels: one over chunks of the vocabulary, one that merges the chunks.

    Args:
        logits: float32, float16 or bfloat16 ``[num_rows, vocab]``, rows may be strided.

    Raises:
        ValueError: the tensor does not have this shape, dtype or device, or has more than ``MAX_VOCAB`` columns.
        RuntimeError: Triton cannot launch here.
    """
    check_logits(logits)
    device = logits.device
    chunk_kernel, row_kernel = _kernels(device)
    num_rows, vocab = logits.shape
    num_chunks = -(-vocab // CHUNK)
    result = RowStatistics.empty(num_rows, device)
    if num_rows == 0:
        return result
    keys = torch.empty(2, num_rows, num_chunks, dtype=torch.int32, device=device)
    sums = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=device)
    chunk_kernel[(num_rows, num_chunks)](
        logits, keys[0], keys[1], sums, vocab, num_chunks, logits.stride(0), CHUNK=CHUNK, num_warps=8
    )
    row_kernel[(num_rows,)](
        keys[0], keys[1], sums, result.tokens, result.best, result.bad, result.log_sum_exp, num_chunks,
        TILE_CHUNKS=tile_chunks(vocab),
    )  # fmt: skip
    return result


def check_logits(logits: torch.Tensor) -> None:
    """Check that the sampling kernels support these logits.

    Raises:
        ValueError: as ``row_statistics``.
    """
    check_tensor("logits", logits, {"num_rows": None, "vocab": None}, LOGITS_DTYPES, logits.device)
    if not 0 < logits.shape[1] <= MAX_VOCAB:
        raise ValueError(f"logits: dimension 1 (vocab) is {logits.shape[1]}, expected 1 to {MAX_VOCAB}")


def tile_chunks(vocab: int) -> int:
    """Return the number of chunks of a row, rounded up to a power of two (a tile size)."""
    return 1 << (-(-vocab // CHUNK) - 1).bit_length()


def _kernels(device: torch.device) -> tuple[Any, Any]:
    require_launchable(device.type)
    from quire.kernels.sampling.sampling_stats_triton import chunk_statistics_kernel, row_statistics_kernel

    return chunk_statistics_kernel, row_statistics_kernel
