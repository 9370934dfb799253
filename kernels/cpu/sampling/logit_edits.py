"""Application of token bitmasks by the native library.

The launcher in ``kernels.sampling.token_bitmask`` checks the tensors and defines the operation.
"""

import ctypes
import functools

import torch

from quire.kernels.cpu.native.library import Native, load_native


class LogitEdits:
    """The library's functions, looked up once. They do not check their arguments."""

    def __init__(self, native: Native) -> None:
        pointer, long = ctypes.c_void_p, ctypes.c_long
        self._bitmask = native.function("quire_bitmask", pointer, long, long, long, pointer, pointer, long, long, long)

    def bitmask(self, logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> None:
        """As ``kernels.sampling.token_bitmask.apply_token_bitmask``."""
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
    """Return the functions, or None without the native library (``find_native`` returns the reason)."""
    native = load_native()
    return None if native is None else _edits_of(native)


@functools.cache
def _edits_of(native: Native) -> LogitEdits:
    return LogitEdits(native)
