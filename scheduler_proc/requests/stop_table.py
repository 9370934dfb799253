"""Which token ids end any live request: one look-up for a whole step's samples."""

from collections import Counter
from collections.abc import Iterable

import numpy as np

from quire.protocol.wire.arrays import Int32


class StopTable:
    """Counts, per token id, the live requests that it would end; a hit still has to be asked of its request."""

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
        """Indices of ``tokens``, all of them valid ids, that are a stop token of some request."""
        if not self._counts:
            return []
        found: list[int] = np.flatnonzero(self._stops[tokens]).tolist()
        return found

    def check(self, live: Iterable[Iterable[int]]) -> None:
        """Raise AssertionError unless exactly the stop tokens of the ``live`` requests are counted."""
        assert Counter(token for tokens in live for token in tokens) == self._counts, "stop tokens are miscounted"
        assert np.flatnonzero(self._stops).tolist() == sorted(self._counts), "the table and its counts disagree"
