"""Simulated time: actions in order of time, with no source of chance but the seed."""

import heapq
from collections.abc import Callable

Action = Callable[[], None]


class Events:
    """Scheduled actions, ordered by time and then by the order in which they were added. Calling it returns the current
    time.
    """

    def __init__(self) -> None:
        self.now = 1000.0
        self._heap: list[tuple[float, int, Action]] = []
        self._count = 0

    def __call__(self) -> float:
        return self.now

    def after(self, seconds: float, action: Action) -> None:
        self._count += 1
        heapq.heappush(self._heap, (self.now + seconds, self._count, action))

    def run_until(self, when: float, is_over: Callable[[], bool] = lambda: False) -> None:
        """Run actions up to time ``when``, or until ``is_over`` is true after one of them."""
        while self._heap and self._heap[0][0] <= when and not is_over():
            self.now, _, action = heapq.heappop(self._heap)
            action()
        if not is_over():
            self.now = max(self.now, when)
