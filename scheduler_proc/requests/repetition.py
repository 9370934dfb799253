"""Repetition detection: finds out whether the output of a request repeats one pattern."""

from collections.abc import Iterable

import numpy as np

from quire.protocol.request.structured_outputs import RepetitionDetection

_NO_TOKEN = -1


class RepetitionWatch:
    """Detector for one request. Its state depends on the output tokens only, so a resubmitted request gets the same.

    The last ``count * size`` tokens repeat one pattern of ``size`` tokens exactly when each of the last
    ``(count - 1) * size`` tokens equals the token ``size`` positions before it. So one run length per size is enough.
    """

    __slots__ = ("_needed", "_newest", "_runs", "_smallest", "found")

    def __init__(self, detection: RepetitionDetection, answer: Iterable[int] = ()) -> None:
        """``answer``: the output tokens so far."""
        sizes = np.arange(detection.min_pattern_size, detection.max_pattern_size + 1)
        self._needed = sizes * (detection.min_count - 1)
        self._runs = np.zeros(len(sizes), np.int64)
        self._newest = np.full(detection.max_pattern_size, _NO_TOKEN, np.int64)
        """The last tokens, newest first."""
        self._smallest = detection.min_pattern_size
        self.found = False
        """Whether the last tokens repeat one pattern at least ``min_count`` times."""
        for token in answer:
            self.add(token)

    def add(self, token: int) -> None:
        # Not a view that is kept: a keyframe would hold it as an array of its own, which no longer follows.
        self._runs = (self._runs + 1) * (self._newest[self._smallest - 1 :] == token)
        self._newest[1:] = self._newest[:-1].copy()
        self._newest[0] = token
        self.found = bool((self._runs >= self._needed).any())
