"""Handles: small integers that identify requests in messages."""

import heapq


class HandlePool:
    """Allocates the smallest free handle, so that tables indexed by handle stay small."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self._next = 0

    def allocate(self) -> int:
        if self._free:
            return heapq.heappop(self._free)
        self._next += 1
        return self._next - 1

    def free(self, handle: int) -> None:
        heapq.heappush(self._free, handle)

    @property
    def num_taken(self) -> int:
        return self._next - len(self._free)
