"""A queue in which owners take turns, regardless of how many items each has."""

from collections import OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Items by owner: first come, first served within one owner; owners take turns."""

    def __init__(self) -> None:
        self._owners: OrderedDict[int, deque[T]] = OrderedDict()

    def put(self, owner: int, item: T) -> None:
        """Add an item."""
        self._owners.setdefault(owner, deque()).append(item)

    def pop(self) -> tuple[int, T] | None:
        """Remove and return the next (owner, item), or None. Its owner moves behind all others."""
        if not self._owners:
            return None
        owner, items = self._owners.popitem(last=False)
        item = items.popleft()
        if items:
            self._owners[owner] = items
        return owner, item

    def __len__(self) -> int:
        return sum(map(len, self._owners.values()))
