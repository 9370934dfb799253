"""Whether an answer has begun to repeat itself."""

from collections.abc import Iterable

import numpy as np

from quire.protocol.request.structured_outputs import RepetitionDetection

_NO_TOKEN = -1


class RepetitionWatch:
    """Follows one answer's tokens. A function of them alone, so that a resubmitted request is watched as before.

    The last ``count * size`` tokens are one pattern of ``size`` tokens exactly when each of the last
    ``(count - 1) * size`` equals the one ``size`` before it. So the length of that run is all that is kept per size.
    """

    __slots__ = ("_compared", "_needed", "_newest", "_runs", "found")

    def __init__(self, detection: RepetitionDetection, answer: Iterable[int] = ()) -> None:
        """``answer``: its tokens so far."""
        sizes = np.arange(detection.min_pattern_size, detection.max_pattern_size + 1)
        self._needed = sizes * (detection.min_count - 1)
        self._runs = np.zeros(len(sizes), np.int64)
        self._newest = np.full(detection.max_pattern_size, _NO_TOKEN, np.int64)
        """The last tokens, the newest first."""
        self._compared = self._newest[detection.min_pattern_size - 1 :]
        self.found = False
        """Whether the last tokens are one pattern, often enough."""
        for token in answer:
            self.add(token)

    def add(self, token: int) -> None:
        """One more token."""
        self._runs = (self._runs + 1) * (self._compared == token)
        self._newest[1:] = self._newest[:-1].copy()
        self._newest[0] = token
        self.found = bool((self._runs >= self._needed).any())
