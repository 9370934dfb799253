"""Rows that arrive in parts, some of them repeatedly."""

import numpy as np

from quire.protocol.wire.side_rows import Rows


class NewRows:
    """Collects rows in order. Repeats, which follow a preemption or a scheduler's death, are dropped."""

    def __init__(self, first: int = 0) -> None:
        """``first``: number of the first row."""
        self._next = first
        self._parts: list[Rows] = []

    def add(self, start: int, rows: Rows) -> None:
        """Add rows of which the first is row ``start``. Rows after a gap are dropped."""
        num_known = self._next - start
        if 0 <= num_known < len(rows[0]):
            self._next += len(rows[0]) - num_known
            # A view would keep the rows of all requests of the step.
            self._parts.append([each[num_known:].copy() for each in rows])

    def take(self) -> Rows | None:
        """Return the rows since the last call, or None without any."""
        parts, self._parts = self._parts, []
        if len(parts) == 1:
            return parts[0]
        return [np.concatenate(each) for each in zip(*parts, strict=True)] if parts else None
