"""Small arrays from the host to the device, all of a step in one copy."""

from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_ALIGNMENT = 16
_BUFFERS = 3
"""Pinned buffers in turn: a copy may still be reading one while the next two steps are prepared."""


class Transfer:
    """Owns pinned host memory. On a CPU there is nothing to copy: the arrays themselves are what kernels read."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: deque[tuple[torch.Tensor, torch.cuda.Event | None]] = deque()

    def __call__(self, *arrays: npt.NDArray[Any]) -> list[torch.Tensor]:
        """The same arrays on the device, in order."""
        if self._device.type == "cpu":
            return [torch.from_numpy(array) for array in arrays]
        offsets = np.cumsum([0, *(-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays)])
        pinned = self._buffer(int(offsets[-1]))
        staged = pinned.numpy()
        for start, array in zip(offsets, arrays, strict=False):
            staged[start : start + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).ravel()
        there = torch.empty(int(offsets[-1]), dtype=torch.uint8, device=self._device)
        there.copy_(pinned[: len(there)], non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        self._free.append((pinned, copied))
        parts = [there[start : start + array.nbytes] for start, array in zip(offsets, arrays, strict=False)]
        return [
            part.view(torch.from_numpy(array[:0]).dtype).view(array.shape)
            for part, array in zip(parts, arrays, strict=True)
        ]

    def _buffer(self, size: int) -> torch.Tensor:
        if len(self._free) < _BUFFERS:
            return torch.empty(max(size, 1 << 16), dtype=torch.uint8, pin_memory=True)
        pinned, copied = self._free.popleft()
        if copied is not None:
            copied.synchronize()
        return pinned if len(pinned) >= size else torch.empty(2 * size, dtype=torch.uint8, pin_memory=True)
