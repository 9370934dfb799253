"""Rows that arrive in parts, some of them repeatedly."""

from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

_Number = TypeVar("_Number", np.float32, np.int32)


class NewRows(Generic[_Number]):
    """Collects rows in order. Repeats, which follow a preemption or a scheduler's death, are dropped."""

    def __init__(self) -> None:
        self._num_rows = 0
        self._parts: list[npt.NDArray[_Number]] = []

    def add(self, start: int, rows: npt.NDArray[_Number]) -> None:
        """Add ``rows``, ``[count, width]``, of which the first is row ``start``. Rows after a gap are dropped."""
        new = rows[self._num_rows - start :] if start <= self._num_rows else rows[:0]
        if len(new):
            self._num_rows += len(new)
            self._parts.append(new.copy())  # a view would keep the rows of all requests of the step

    def take(self) -> npt.NDArray[_Number] | None:
        """Return the rows since the last call, ``[rows, width]``, or None without any."""
        parts, self._parts = self._parts, []
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else None
