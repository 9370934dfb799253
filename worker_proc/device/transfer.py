"""Transfer of a step's small arrays from the host to the device, in one copy."""

from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_ALIGNMENT = 16
_BUFFERS = 3
"""Number of pinned buffers: a copy may still read one while the next two steps are prepared."""


class Transfer:
    """Owns pinned host memory. On a CPU nothing is copied: kernels read the arrays themselves."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: deque[tuple[torch.Tensor, torch.cuda.Event | None]] = deque()

    def __call__(self, *arrays: npt.NDArray[Any]) -> list[torch.Tensor]:
        """Return the arrays as device tensors, in order."""
        if self._device.type == "cpu":
            return [torch.from_numpy(array) for array in arrays]
        offsets = np.cumsum([0, *(-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays)])
        pinned = self._buffer(int(offsets[-1]))
        staged = pinned.numpy()
        for start, array in zip(offsets, arrays, strict=False):
            staged[start : start + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).ravel()
        sent = torch.empty(int(offsets[-1]), dtype=torch.uint8, device=self._device)
        sent.copy_(pinned[: len(sent)], non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        self._free.append((pinned, copied))
        parts = [sent[start : start + array.nbytes] for start, array in zip(offsets, arrays, strict=False)]
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
