"""Limits on what matching grammars may use: time of a step, CPU time and memory.

All grow while outputs are matched, and libraries bound none of them. With an ambiguous grammar one token can take tens
of milliseconds; lazily built automata can take a hundred megabytes.
"""

import os
import resource
from pathlib import Path

OUTPUT_SECONDS = 0.25
"""CPU time that matching one output may take, plus TOKEN_SECONDS per token; the request fails above it."""
TOKEN_SECONDS = 0.001
"""A schema's token takes 0.02 to 0.1 ms."""
EXPENSIVE_SHARE = 0.08
"""Share of this time above which an output gets a helper of its own: 20 ms plus 80 µs per token."""
SLOW_SECONDS = 0.01
"""Filling the bitmasks of a step is slow above this; rows are then computed one by one."""
NUM_WATCHED = 32

PATIENCE_SECONDS = 0.03
"""Time for which a step waits for masks: they should be ready before its forward pass ends."""
ALONE_SECONDS = 0.01
"""The same for an output that its helper is computing alone at that time."""
PRIVATE_PATIENCE_SECONDS = 0.002
"""The same for an output with a helper of its own."""

EXPENSIVE_BYTES = 8 * 2**20
"""Memory of a compiled grammar above which it gets a helper of its own."""
MAX_PRIVATE_BYTES = 256 * 2**20
"""Growth of a private helper, above which its requests fail."""
MAX_SHARED_BYTES = 256 * 2**20
"""Growth of the shared helper, above which it is replaced."""
MAX_PRIVATE_HELPERS = 16
MAX_PRIVATE_HELPERS_OF_TENANT = 8
MAX_STRIKES = 4
"""Helpers that may die while they compute one output, before its request fails: they may be killed from outside."""

STALLED_SECONDS = 3.0
"""Time without an answer after which a helper is replaced; a private one gets more."""
STARTING_SECONDS = 60.0
"""The same until a helper has started."""
RETRY_SECONDS = 0.5
"""Pause after a helper could not be opened or died at its start."""


def exceeds_limit(seconds: float, num_tokens: int) -> bool:
    """Return whether an output of ``num_tokens`` tokens has used more than its share of CPU time."""
    return seconds > OUTPUT_SECONDS + num_tokens * TOKEN_SECONDS


def is_expensive(seconds: float, num_tokens: int) -> bool:
    """Return whether an output of ``num_tokens`` tokens needs a helper of its own."""
    return exceeds_limit(seconds / EXPENSIVE_SHARE, num_tokens)


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


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path(f"/proc/{os.getpid()}/statm").read_text("ascii").split()[1]) * resource.getpagesize()
