"""Transfer of a step's small arrays from the host to the device, in one copy."""

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_ALIGNMENT = 16
_BUFFERS = 8
"""Number of pinned buffers: the copies of two steps in flight, up to three each, may still run."""

_FIRST_BYTES = 1 << 16
"""Size of the first buffers. They double until the arrays of a step fit."""


class Transfer:
    """Owns pinned host memory. On a CPU nothing is copied: kernels read the arrays themselves.

    After ``collect`` arrays are gathered: the tensors of ``__call__`` are valid device memory, but their content
    arrives with ``send``, in one copy for all of them. Device work that reads them before that goes through ``then``.
    Without ``collect``, each call copies on its own. No call waits for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()
        self._bytes = _FIRST_BYTES
        self._batch: _Batch | None = None
        self._work: list[Callable[[], object]] = []

    def collect(self) -> None:
        """Gather the arrays of all calls until ``send``; discards those of a step that was not sent."""
        self._work.clear()
        if self._device.type != "cpu":
            self._batch = self._new_batch()

    def __call__(self, *arrays: npt.NDArray[Any]) -> list[torch.Tensor]:
        """Return the arrays as device tensors, in order. Their content must not change before ``send``."""
        if self._device.type == "cpu":
            return [torch.from_numpy(array) for array in arrays]
        size = sum(_aligned(array.nbytes) for array in arrays)
        if self._batch is None:
            own = self._new_batch(size)
            tensors = own.add(arrays)
            self._copy(own)
            return tensors
        if self._batch.room < size:
            self._copy(self._batch)
            self._bytes = max(2 * self._bytes, size)
            self._batch = self._new_batch()
        return self._batch.add(arrays)

    def then(self, work: Callable[[], object]) -> None:
        """Launch device work that reads tensors of this step: after ``send``, or now if nothing is gathered."""
        if self._batch is None:
            work()
        else:
            self._work.append(work)

    def send(self) -> None:
        """Copy what was gathered to the device, and launch the work that was waiting for it."""
        batch, self._batch = self._batch, None
        if batch is not None:
            self._copy(batch)
        work, self._work = self._work, []
        for launch in work:
            launch()

    def _new_batch(self, size: int = 0) -> "_Batch":
        size = max(size, self._bytes)
        return _Batch(self._pinned(size), torch.empty(size, dtype=torch.uint8, device=self._device))

    def _pinned(self, size: int) -> torch.Tensor:
        if len(self._free) < _BUFFERS:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        pinned, copied = self._free.popleft()
        # The CPU must not write to a buffer that a copy may still read. With _BUFFERS of them this never waits in
        # practice.
        copied.synchronize()
        return pinned if len(pinned) >= size else torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def _copy(self, batch: "_Batch") -> None:
        if batch.used:
            batch.sent[: batch.used].copy_(batch.pinned[: batch.used], non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        self._free.append((batch.pinned, copied))


class _Batch:
    """Arrays that are sent in one copy, and the device memory that they are sent to."""

    def __init__(self, pinned: torch.Tensor, sent: torch.Tensor) -> None:
        self.pinned, self.sent, self.used = pinned, sent, 0
        self._staged = pinned.numpy()

    @property
    def room(self) -> int:
        return len(self.sent) - self.used

    def add(self, arrays: tuple[npt.NDArray[Any], ...]) -> list[torch.Tensor]:
        tensors = []
        for array in arrays:
            start, end = self.used, self.used + array.nbytes
            # Copied once on the host: one transfer of pinned memory is faster than several of pageable memory, each of
            # which waits for the device.
            self._staged[start:end] = np.ascontiguousarray(array).view(np.uint8).ravel()
            dtype = torch.from_numpy(array[:0]).dtype
            tensors.append(self.sent[start:end].view(dtype).view(array.shape))
            self.used = start + _aligned(array.nbytes)
        return tensors


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
