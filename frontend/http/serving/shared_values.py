"""Counters that the front ends share: each process adds to its own file, and any of them can sum all files.

A front end that replaces a dead one has its index and continues its file, so no sum ever falls.
"""

import mmap
import os
from array import array
from bisect import bisect_left
from collections.abc import MutableSequence
from pathlib import Path
from typing import Any

FILE_PREFIX = "metrics-"
VALUE_BYTES = 8


class SharedValues:
    """64-bit floats of one front end, all 0 at first. Without a directory they are not shared, for tests.

    ``own`` is written by this process alone. An aligned value is read and written as a whole, so that readers need no
    lock.
    """

    def __init__(self, size: int, directory: Path | None = None, index: int = 0) -> None:
        """Raise OSError if the directory has no room; a later write cannot fail."""
        self._size = size
        self._directory = directory
        self.own: MutableSequence[float] = array("d", bytes(size * VALUE_BYTES))
        if directory is not None:
            fd = os.open(directory / f"{FILE_PREFIX}{index}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, size * VALUE_BYTES)
                mapped: Any = memoryview(mmap.mmap(fd, size * VALUE_BYTES)).cast("d")
                self.own = mapped
            finally:
                os.close(fd)

    def totals(self) -> list[float]:
        """Return the sum of each value over all front ends, those that have died included."""
        if self._directory is None:
            return list(self.own)
        totals = [0.0] * self._size
        for path in self._directory.glob(f"{FILE_PREFIX}*"):
            with path.open("rb") as file:
                if os.fstat(file.fileno()).st_size != self._size * VALUE_BYTES:
                    continue  # another front end is creating it
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            with mapped, memoryview(mapped) as raw, raw.cast("d") as values:
                totals = [total + value for total, value in zip(totals, values.tolist(), strict=True)]
        return totals


class SharedCounter:
    """A counter at index ``at``."""

    def __init__(self, values: SharedValues, at: int) -> None:
        self._values, self._at = values.own, at

    def inc(self, amount: float = 1.0) -> None:
        self._values[self._at] += amount


class SharedGauge:
    """A gauge at index ``at``, of which each front end sets its own part."""

    def __init__(self, values: SharedValues, at: int) -> None:
        self._values, self._at = values.own, at

    def set(self, value: float) -> None:
        self._values[self._at] = value


class SharedHistogram:
    """A histogram from index ``at`` on: a count per bucket, that above the last bound, and the sum of the values."""

    def __init__(self, values: SharedValues, at: int, bounds: tuple[float, ...]) -> None:
        self._values, self._at, self._bounds = values.own, at, bounds
        self._sum = at + len(bounds) + 1

    def observe(self, value: float) -> None:
        values = self._values
        values[self._at + bisect_left(self._bounds, value)] += 1.0
        values[self._sum] += value
