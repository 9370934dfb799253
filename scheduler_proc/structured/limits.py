"""What grammars may take of the scheduler's process: time of its loop, and memory.

A library says little of either, and both grow while an answer is matched: with an ambiguous grammar a token costs
tens of milliseconds in which nobody is scheduled; automata that are built as they are needed take a hundred megabytes.
"""

import os
import resource
from collections.abc import Callable
from pathlib import Path

ANSWER_SECONDS = 0.25
"""CPU time of the loop's thread that one answer's matching may take, and for each of its tokens ..."""
TOKEN_SECONDS = 0.001
"""... so much more. A schema's token takes 0.02 to 0.1 ms."""
SLOW_SECONDS = 0.01
"""From here on it is worth knowing whose the rows of a step are."""
NUM_WATCHED = 32
MAX_GROWN_BYTES = 128 * 2**20
LOOK_EVERY = 64


def is_over(seconds: float, num_tokens: int) -> bool:
    """Whether an answer of so many tokens has had more than its share."""
    return seconds > ANSWER_SECONDS + num_tokens * TOKEN_SECONDS


class SlowSteps:
    """Masks of a step are made together, for that is fastest; after a slow one, row by row for a while."""

    def __init__(self) -> None:
        self._num_watched = 0

    @property
    def are_watched(self) -> bool:
        return self._num_watched > 0

    def took(self, seconds: float) -> None:
        self._num_watched = NUM_WATCHED if seconds > SLOW_SECONDS else max(0, self._num_watched - 1)


class MemoryWatch:
    """Says when the process has grown so much that what was built for grammars had better go."""

    def __init__(self, resident_bytes: Callable[[], int]) -> None:
        self._resident_bytes = resident_bytes
        self._num_calls = 0
        self._base: int | None = None

    def has_grown(self) -> bool:
        """Looks once in a while. What is let go of is used again by what is built next: the process stays as it is."""
        self._num_calls += 1
        if self._num_calls % LOOK_EVERY:
            return False
        now = self._resident_bytes()
        if self._base is not None and now - self._base <= MAX_GROWN_BYTES:
            return False
        grown, self._base = self._base is not None, now
        return grown


def resident_bytes() -> int:
    """Of this process."""
    return int(Path(f"/proc/{os.getpid()}/statm").read_text("ascii").split()[1]) * resource.getpagesize()
