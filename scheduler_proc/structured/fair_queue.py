"""Who is served next where several ask: one of each owner in turn, however many one of them has."""

from collections import OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Items by owner: first come, first served among those of one owner, and owners take turns.

    Args:
        most: of one owner; more are not taken in.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._owners: OrderedDict[int, deque[T]] = OrderedDict()

    def put(self, owner: int, item: T) -> bool:
        """False where its owner has too many."""
        items = self._owners.setdefault(owner, deque())
        if len(items) >= self._most:
            return False
        items.append(item)
        return True

    def pop(self) -> tuple[int, T] | None:
        """(owner, item) whose turn it is; its owner's next turn comes behind all others'."""
        if not self._owners:
            return None
        owner, items = self._owners.popitem(last=False)
        item = items.popleft()
        if items:
            self._owners[owner] = items
        return owner, item

    def __len__(self) -> int:
        return sum(map(len, self._owners.values()))
