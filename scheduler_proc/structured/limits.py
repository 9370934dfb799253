"""Limits on what matching grammars may use: time of a step, CPU time and memory.

All grow while outputs are matched, and libraries bound none of them. With an ambiguous grammar one token can take tens
of milliseconds; lazily built automata can take a hundred megabytes.
"""

OUTPUT_SECONDS = 0.25
"""CPU time that matching one output may take, plus ``token_seconds`` per token; the request fails above it."""
TOKEN_SECONDS = 0.001
VOCAB_UNIT = 10_000
"""Vocabulary with which a token may take twice TOKEN_SECONDS."""
EXPENSIVE_SHARE = 0.08
"""Share of this time above which an output gets a helper of its own: 20 ms plus 90 µs per token, or 470 µs with a
vocabulary of 49,152. A schema's token takes 20 to 100 µs, or 50 to 350 µs."""
SLOW_SECONDS = 0.002
"""CPU time of the bitmasks of a step, beyond that share for each, above which rows are computed one by one."""
NUM_WATCHED = 32

PATIENCE_SECONDS = 0.03
"""Longest wait of a step for masks, which should be ready before its forward pass ends."""
PRIVATE_PATIENCE_SECONDS = 0.002
"""The same for an output with a helper of its own."""
ROW_PATIENCE_SECONDS = 0.0001
"""Time per output by which a step may wait longer for a shared helper."""
LATE_SHARE = 0.1
"""Share of all time for which steps may wait even longer although some of their rows could continue."""

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


def token_seconds(vocab_size: int) -> float:
    """Return the CPU time that matching may take per token; a mask takes longer with a larger vocabulary."""
    return TOKEN_SECONDS * (1 + vocab_size / VOCAB_UNIT)


def exceeds_limit(seconds: float, num_tokens: int, vocab_size: int) -> bool:
    """Return whether an output of ``num_tokens`` tokens has used more than its share of CPU time."""
    return seconds > OUTPUT_SECONDS + num_tokens * token_seconds(vocab_size)


def is_expensive(seconds: float, num_tokens: int, vocab_size: int, num_private: int) -> bool:
    """Return whether an output of ``num_tokens`` tokens needs a helper of its own.

    The more such helpers its tenant has, ``num_private``, the sooner it is so.
    """
    most = OUTPUT_SECONDS / (1 + num_private) + num_tokens * token_seconds(vocab_size)
    return seconds > EXPENSIVE_SHARE * most


class Patience:
    """Decides how long a step waits for a shared helper.

    A long wait comes out of an account, which fills with LATE_SHARE of the time, up to PATIENCE_SECONDS.
    """

    def __init__(self) -> None:
        self._left = PATIENCE_SECONDS
        self._since = 0.0

    def limit(self, num_outputs: int, now: float) -> float:
        """Return the seconds that a step with ``num_outputs`` outputs may wait."""
        self._left = min(PATIENCE_SECONDS, self._left + LATE_SHARE * (now - self._since))
        self._since = now
        return min(PATIENCE_SECONDS, self._free(num_outputs) + self._left)

    def record(self, num_outputs: int, seconds: float) -> None:
        """Record that a step has waited."""
        self._left = max(0.0, self._left - max(0.0, seconds - self._free(num_outputs)))

    def _free(self, num_outputs: int) -> float:
        return PRIVATE_PATIENCE_SECONDS + ROW_PATIENCE_SECONDS * num_outputs


class SlowSteps:
    """Decides whether rows are timed one by one: for NUM_WATCHED steps after a slow one.

    Otherwise rows are filled together, which is faster.
    """

    def __init__(self, vocab_size: int) -> None:
        self._row_seconds = EXPENSIVE_SHARE * token_seconds(vocab_size)
        self._num_watched = 0

    @property
    def are_watched(self) -> bool:
        return self._num_watched > 0

    def record(self, seconds: float, num_rows: int) -> None:
        is_slow = seconds > SLOW_SECONDS + num_rows * self._row_seconds
        self._num_watched = NUM_WATCHED if is_slow else max(0, self._num_watched - 1)
