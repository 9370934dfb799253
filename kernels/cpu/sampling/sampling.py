"""Sampling by the native library: the checked launcher. ``kernels.sampling.sampling`` defines the operation.

The results may differ if a cumulative mass is within the rounding of e^x (2 units in the last place of a float32) of
``top_p`` or the noise.
"""

import ctypes
from dataclasses import dataclass

import torch

from quire.kernels.common.checks import check_tensor
from quire.kernels.common.logits import MAX_VOCAB
from quire.kernels.cpu.native.library import Native

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """Sampling parameters of a batch's rows: ``[max_rows]`` on the CPU, read by every call.

    Attributes:
        seed: uint64.
        num_known: int32, the position of the row's next token.
        temperature, top_p, min_p: float32; top_k: int32; as in ``kernels.sampling.sampling.sample``.
    """

    seed: torch.Tensor
    num_known: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor


_DTYPES = {"seed": torch.uint64, "num_known": torch.int32, "top_k": torch.int32}


class _SampleCall(ctypes.Structure):
    """``SampleCall`` of sampling.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in SamplingColumns.__annotations__),
        ("logits", ctypes.c_void_p),
        ("logits_stride", ctypes.c_long),
        ("rows", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("bad", ctypes.c_void_p),
        ("num_positions", ctypes.c_long),
        ("vocab", ctypes.c_long),
    )


class CpuSampling:
    """The library's sampler over one batch's columns. Not thread-safe.

    Raises:
        ValueError: a column does not have the dtype of ``SamplingColumns``, is not on the CPU, or lengths differ.
    """

    def __init__(self, native: Native, columns: SamplingColumns) -> None:
        self._sample = native.function("quire_sample", ctypes.c_void_p)
        self._columns = columns
        self._call = _SampleCall()
        self._call_at = ctypes.addressof(self._call)
        for name in SamplingColumns.__annotations__:
            column: torch.Tensor = getattr(columns, name)
            dims = {"max_rows": len(columns.seed)}
            check_tensor(name, column, dims, (_DTYPES.get(name, torch.float32),), _CPU)
            setattr(self._call, name, column.data_ptr())

    def sample(
        self, logits: torch.Tensor, rows: torch.Tensor, offsets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample one token for each position.

        Args:
            logits: float32 ``[num_positions, vocab]``, rows may be strided; not changed.
            rows: int64 ``[num_positions]``: each position's row of the columns; not checked.
            offsets: int64 ``[num_positions]``: distance of the position after its row's ``num_known``.

        Returns:
            int64 ``[num_positions]`` tokens, and bool ``[num_positions]``: whether the best logit is not finite, in
            which case the token is that of the best logit.

        Raises:
            ValueError: a tensor does not have this shape or dtype, or is not on the CPU.
        """
        num_positions, vocab = check_logits_cpu(logits)
        for name, tensor in (("rows", rows), ("offsets", offsets)):
            if tensor.shape != (num_positions,) or tensor.dtype is not torch.int64 or not tensor.is_contiguous():
                check_tensor(name, tensor, {"num_positions": num_positions}, (torch.int64,), _CPU)
        tokens = torch.empty(num_positions, dtype=torch.int64)
        bad = torch.empty(num_positions, dtype=torch.bool)
        call = self._call
        call.logits, call.logits_stride = logits.data_ptr(), logits.stride(0)
        call.rows, call.offsets = rows.data_ptr(), offsets.data_ptr()
        call.tokens, call.bad = tokens.data_ptr(), bad.data_ptr()
        call.num_positions, call.vocab = num_positions, vocab
        self._sample(self._call_at)
        return tokens, bad


def check_logits_cpu(logits: torch.Tensor) -> tuple[int, int]:
    """Check logits, and return their shape, without ``check_tensor``, which takes longer than a greedy row."""
    good = logits.dim() == 2 and logits.dtype is torch.float32 and logits.is_cpu and logits.stride(1) == 1
    if not good or not 0 < logits.shape[1] <= MAX_VOCAB:
        check_tensor("logits", logits, {"num_positions": None, "vocab": None}, (torch.float32,), _CPU)
        if not 0 < logits.shape[1] <= MAX_VOCAB:
            raise ValueError(f"logits: dimension 1 (vocab) is {logits.shape[1]}, expected 1 to {MAX_VOCAB}")
    return logits.shape[0], logits.shape[1]
