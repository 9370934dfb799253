"""Memory of packed weights, in huge pages: every step reads all of it, and page walks cost bandwidth."""

import mmap
import threading

import torch

HUGE_PAGE = 2 << 20
CHUNK = 128 << 20
"""Bytes that are reserved at a time. Matrices of a small model are smaller than a huge page."""
ALIGNMENT = 64
FEWEST_PAGES = 4
"""Huge pages that memory of its own must fill: at most a fifth of it is not used."""

_lock = threading.Lock()
_rest = torch.empty(0, dtype=torch.uint8)
"""The part of the last chunk that is not allocated yet. Pages that nothing writes to take no memory."""


def allocate(size: int) -> torch.Tensor:
    """Return ``size`` bytes, uint8, aligned to 64, beside those of earlier calls. They are freed with the last tensor
    of their chunk.
    """
    global _rest
    # Not in inference mode, also if the caller is: a tensor that is made in it cannot be written to outside it later.
    with _lock, torch.inference_mode(False):
        if len(_rest) < size:
            _rest = _reserve(max(size, CHUNK))
        found, _rest = _rest[:size], _rest[-(-size // ALIGNMENT) * ALIGNMENT :]
        return found


def allocate_alone(size: int) -> torch.Tensor:
    """As ``allocate``, for memory that is freed alone: in huge pages of its own, if it fills several."""
    if size < FEWEST_PAGES * HUGE_PAGE:
        return torch.empty(size, dtype=torch.uint8)
    with torch.inference_mode(False):
        return _reserve(size)[:size]


def _reserve(size: int) -> torch.Tensor:
    size = -(-size // HUGE_PAGE) * HUGE_PAGE
    memory = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    found = torch.frombuffer(memory, dtype=torch.uint8)
    start = -found.data_ptr() % HUGE_PAGE
    return found[start : start + size]
