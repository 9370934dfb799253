"""Stop tokens of all requests in one table: one lookup checks all samples of a step."""

from collections import Counter
from collections.abc import Iterable

import numpy as np

from quire.protocol.wire.arrays import Int32


class StopTable:
    """Counts, per token id, the requests that have it as a stop token.

    A hit means that some request stops at this token; the caller must check the request that sampled it.
    """

    def __init__(self, vocab_size: int) -> None:
        self._stops = np.zeros(vocab_size, np.bool_)
        self._counts: Counter[int] = Counter()

    def add(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self._counts[token] += 1
            self._stops[token] = True

    def remove(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self._counts[token] -= 1
            if not self._counts[token]:
                del self._counts[token]
                self._stops[token] = False

    def positions(self, tokens: Int32) -> list[int]:
        """Return the indices of ``tokens`` (valid ids) that are a stop token of some request."""
        if not self._counts:
            return []
        found: list[int] = np.flatnonzero(self._stops[tokens]).tolist()
        return found

    def check(self, live: Iterable[Iterable[int]]) -> None:
        """Raise AssertionError unless exactly the stop tokens of the ``live`` requests are counted."""
        assert Counter(token for tokens in live for token in tokens) == self._counts, "wrong counts of stop tokens"
        assert np.flatnonzero(self._stops).tolist() == sorted(self._counts), "the table and its counts disagree"
