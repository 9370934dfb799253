"""Limits on what matching grammars may use of the scheduler process: time of its loop, and memory.

Both grow while outputs are matched, and libraries bound neither. With an ambiguous grammar one token can take tens of
milliseconds, during which no request is scheduled; lazily built automata can take a hundred megabytes.
"""

import os
import resource
from collections.abc import Callable
from pathlib import Path

OUTPUT_SECONDS = 0.25
"""CPU time of the loop's thread that matching one output may take, plus TOKEN_SECONDS per token."""
TOKEN_SECONDS = 0.001
"""A schema's token takes 0.02 to 0.1 ms."""
SLOW_SECONDS = 0.01
"""Filling the bitmasks of a step is slow above this; rows are then timed one by one."""
NUM_WATCHED = 32
MAX_GROWN_BYTES = 128 * 2**20
CHECK_EVERY = 64


def exceeds_limit(seconds: float, num_tokens: int) -> bool:
    """Return whether an output of ``num_tokens`` tokens has used more than its share."""
    return seconds > OUTPUT_SECONDS + num_tokens * TOKEN_SECONDS


class SlowSteps:
    """Decides whether rows are timed one by one: for NUM_WATCHED steps after a slow one.

    Otherwise rows are filled together, which is faster.
    """

    def __init__(self) -> None:
        self._num_watched = 0

    @property
    def are_watched(self) -> bool:
        return self._num_watched > 0

    def record(self, seconds: float) -> None:
        self._num_watched = NUM_WATCHED if seconds > SLOW_SECONDS else max(0, self._num_watched - 1)


class MemoryWatch:
    """Detects growth of the process memory, after which compiled grammars should be dropped."""

    def __init__(self, resident_bytes: Callable[[], int]) -> None:
        self._resident_bytes = resident_bytes
        self._num_calls = 0
        self._base: int | None = None

    def has_grown(self) -> bool:
        """Return whether the process has grown too much; only every CHECK_EVERY-th call checks.

        Freed memory is reused by later grammars and not returned to the system, so the current size becomes the new
        base.
        """
        self._num_calls += 1
        if self._num_calls % CHECK_EVERY:
            return False
        now = self._resident_bytes()
        if self._base is not None and now - self._base <= MAX_GROWN_BYTES:
            return False
        grown, self._base = self._base is not None, now
        return grown


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path(f"/proc/{os.getpid()}/statm").read_text("ascii").split()[1]) * resource.getpagesize()
