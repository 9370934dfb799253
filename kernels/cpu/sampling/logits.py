"""Checks for finite logits, and log probabilities, by the native library: the checked launchers.

``kernels.sampling.sampling_stats`` and ``kernels.sampling.sampling_logprobs`` define the operations and their
tolerances.
"""

import ctypes
import functools

import torch

from quire.kernels.common.checks import check_tensor
from quire.kernels.common.logits import TopLogprobs
from quire.kernels.cpu.native.library import Native, load_native
from quire.kernels.cpu.sampling.sampling import check_logits_cpu


class CpuLogits:
    """The library's functions over rows of logits, looked up once."""

    def __init__(self, native: Native) -> None:
        pointer, long = ctypes.c_void_p, ctypes.c_long
        rows = (pointer, long, long, long)
        self._bad_rows = native.function("quire_bad_rows", *rows, pointer)
        self._logprobs = native.function("quire_top_logprobs", *rows, pointer, long, pointer, pointer, pointer)

    def bad(self, logits: torch.Tensor) -> torch.Tensor:
        """Return whether each row's best logit is not finite: float32 ``[num_rows, vocab]`` → bool ``[num_rows]``.

        Raises:
            ValueError: ``logits`` does not have this shape or dtype, or is not on the CPU.
        """
        num_rows, vocab = check_logits_cpu(logits)
        bad = torch.empty(num_rows, dtype=torch.bool)
        self._bad_rows(logits.data_ptr(), logits.stride(0), num_rows, vocab, bad.data_ptr())
        return bad

    def top_logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, n: int) -> TopLogprobs:
        """As ``kernels.sampling.sampling_logprobs.top_logprobs``, for float32 and any ``n`` up to the vocabulary size.

        Raises:
            ValueError: a tensor does not have that shape or dtype, or is not on the CPU, or ``n`` is out of range.
        """
        num_rows, vocab = check_logits_cpu(logits)
        check_tensor("tokens", tokens, {"num_rows": num_rows}, (torch.int64,), logits.device)
        if not 0 <= n <= vocab:
            raise ValueError(f"n must be between 0 and {vocab} for {vocab} tokens (got {n})")
        ids = torch.empty(num_rows, 1 + n, dtype=torch.int64)
        values = torch.empty(num_rows, 1 + n, dtype=torch.float32)
        ranks = torch.empty(num_rows, dtype=torch.int64)
        self._logprobs(
            logits.data_ptr(),
            logits.stride(0),
            num_rows,
            vocab,
            tokens.data_ptr(),
            n,
            ids.data_ptr(),
            values.data_ptr(),
            ranks.data_ptr(),
        )
        return TopLogprobs(ids, values, ranks)


def native_logits() -> CpuLogits | None:
    """Return the functions, or None without the native library (``find_native`` returns the reason)."""
    native = load_native()
    return None if native is None else _logits_of(native)


@functools.cache
def _logits_of(native: Native) -> CpuLogits:
    return CpuLogits(native)
