"""Penalties and bitmasks by the native library. The launchers in ``kernels.penalties`` and ``kernels.token_bitmask``
check the tensors; what is computed is written down there."""

import ctypes
import functools

import torch

from quire.kernels.cpu.native import Native, load_native


class _PenaltyCall(ctypes.Structure):
    """As in logit_edits.cpp."""

    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("logits_stride", ctypes.c_long),
        ("slots", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
        ("counts_stride", ctypes.c_long),
        ("num_slots", ctypes.c_long),
        ("repetition", ctypes.c_void_p),
        ("frequency", ctypes.c_void_p),
        ("presence", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("drafts", ctypes.c_void_p),
        ("num_positions", ctypes.c_long),
        ("vocab", ctypes.c_long),
    )


class LogitEdits:
    """The library's functions, looked up once. They trust their arguments."""

    def __init__(self, native: Native) -> None:
        pointer, long = ctypes.c_void_p, ctypes.c_long
        self._penalties = native.function("quire_penalties", pointer)
        self._bitmask = native.function("quire_bitmask", pointer, long, long, long, pointer, pointer, long, long, long)

    def penalties(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        counts: torch.Tensor,
        repetition: torch.Tensor,
        frequency: torch.Tensor,
        presence: torch.Tensor,
        offsets: torch.Tensor,
        drafts: torch.Tensor,
    ) -> None:
        """As ``kernels.penalties.apply_penalties``."""
        wide_slots = slots.long()
        call = _PenaltyCall(
            logits.data_ptr(),
            logits.stride(0),
            wide_slots.data_ptr(),
            counts.data_ptr(),
            counts.stride(0),
            len(counts),
            repetition.data_ptr(),
            frequency.data_ptr(),
            presence.data_ptr(),
            offsets.data_ptr(),
            drafts.data_ptr(),
            *logits.shape,
        )
        self._penalties(ctypes.addressof(call))

    def bitmask(self, logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> None:
        """As ``kernels.token_bitmask.apply_token_bitmask``."""
        num_masks, num_words = words.shape
        self._bitmask(
            logits.data_ptr(),
            logits.stride(0),
            *logits.shape,
            rows.data_ptr(),
            words.data_ptr(),
            words.stride(0),
            num_words,
            num_masks,
        )


def native_edits() -> LogitEdits | None:
    """None where there is no native library (``load_native`` says why)."""
    native = load_native()
    return None if native is None else _edits_of(native)


@functools.cache
def _edits_of(native: Native) -> LogitEdits:
    return LogitEdits(native)
