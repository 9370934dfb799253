"""The demand for the pool: what it costs to keep cached contents that nothing uses yet."""

WINDOW_S = 10.0
LEAST = 0.1
"""Least demand: load may rise while blocks are kept."""
_MAX_WINDOWS = 32
"""Windows after which what was measured before no longer counts."""


class Demand:
    """Measures the seconds of prefill per second that evicted contents had taken, at most 1.

    That is the price of the whole pool: keeping a tenth of it for ten seconds evicts other contents early, which take
    ``share`` seconds of prefill when they are used again.

    Attributes:
        share: the demand, from LEAST to 1; 1 before the first window has ended.
    """

    def __init__(self) -> None:
        self.share = 1.0
        self._window = self._num_before = 0

    def clock(self, now: float, num_evicted: int, block_seconds: float) -> None:
        """Note the time.

        Args:
            num_evicted: contents evicted since the start.
            block_seconds: seconds of prefill that the content of one block takes.
        """
        window = int(now // WINDOW_S)
        evicted = num_evicted - self._num_before
        for _ in range(min(window - self._window, _MAX_WINDOWS)):
            wanted = min(max(evicted * block_seconds / WINDOW_S, LEAST), 1.0)
            self.share, evicted = (self.share + wanted) / 2.0, 0
        if window > self._window:
            self._window, self._num_before = window, num_evicted
