"""Handles: small integers that identify requests in messages."""

import heapq
from collections.abc import Collection

MAX_HANDLES = 2**22
"""Bound for handles that are read from files; more than requests that can exist at once."""


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

    def restore(self, taken: Collection[int]) -> None:
        """Make ``taken`` the only allocated handles. Raises ValueError if one is invalid or occurs twice."""
        for handle in taken:
            if not 0 <= handle < MAX_HANDLES:
                raise ValueError(f"handles must be between 0 and {MAX_HANDLES - 1} (got {handle})")
        if len(set(taken)) < len(taken):
            raise ValueError(f"{len(taken) - len(set(taken))} duplicate handles among {len(taken)}")
        self._next = max(taken, default=-1) + 1
        self._free = sorted(set(range(self._next)) - set(taken))

    @property
    def num_taken(self) -> int:
        return self._next - len(self._free)
