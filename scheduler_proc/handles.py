"""Small integers that stand for requests on the wire."""

import heapq


class HandlePool:
    """Gives the smallest free handle, so that tables indexed by handle stay small."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self._next = 0

    def take(self) -> int:
        if self._free:
            return heapq.heappop(self._free)
        self._next += 1
        return self._next - 1

    def give_back(self, handle: int) -> None:
        heapq.heappush(self._free, handle)

    @property
    def num_taken(self) -> int:
        return self._next - len(self._free)
