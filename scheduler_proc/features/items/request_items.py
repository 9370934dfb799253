"""RequestItems: the items of one request, and how far it has asked for their rows."""

from dataclasses import dataclass

from quire.protocol.wire.item_messages import InputItem
from quire.scheduler_proc.features.items.encoder_cache import ItemRows
from quire.scheduler_proc.requests.request import Request, RequestPart


@dataclass(slots=True, eq=False, repr=False)
class RequestItems:
    """The items of a request, in the order of their positions.

    Attributes:
        rows: the content of each.
        first: the first item with positions that are neither computed nor expected to be in the prefix cache.
        asked: index behind the last item that the request has asked for; it holds those from ``first`` on.
        is_located: the hits of the waiting request were looked up.
    """

    items: list[InputItem]
    rows: list[ItemRows]
    first: int = 0
    asked: int = 0
    is_located: bool = False

    @property
    def is_done(self) -> bool:
        """Whether no position needs rows any more."""
        return self.first == len(self.items)

    def ask(self, request: Request) -> None:
        """Hold the next item."""
        holders = self.rows[self.asked].holders
        holders[request.handle] = holders.get(request.handle, 0) + 1
        self.asked += 1

    def give_back(self, request: Request, index: int) -> None:
        """Hold only the items before ``index``."""
        while self.asked > max(index, self.first):
            self.asked -= 1
            self._let_go(request, self.asked)

    def move_to(self, request: Request, position: int) -> None:
        """Need no rows of items that end at ``position`` or before."""
        first = next((at for at, item in enumerate(self.items) if item.end > position), len(self.items))
        if first < self.first:  # blocks that were found in the prefix cache have left it
            self.give_back(request, self.first)
            self.first = self.asked = first
        for index in range(self.first, min(first, self.asked)):
            self._let_go(request, index)
        self.first, self.asked = first, max(self.asked, first)

    def _let_go(self, request: Request, index: int) -> None:
        holders = self.rows[index].holders
        holders[request.handle] -= 1
        if not holders[request.handle]:
            del holders[request.handle]


ITEMS = RequestPart[RequestItems | None]("items", None)


def items_of(request: Request) -> RequestItems:
    """Return the items of a request that has some."""
    own = ITEMS.of(request)
    assert own is not None, f"{request!r} has no items"
    return own
