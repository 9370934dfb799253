"""RequestItems: the items of one request, and which of them it still needs."""

from dataclasses import dataclass

from quire.protocol.wire.item_messages import InputItem
from quire.scheduler_proc.requests.request import Request, RequestPart


@dataclass(slots=True, eq=False)
class RequestItems:
    """The items of a request, in the order of their positions.

    Attributes:
        first: the first item with positions that are neither computed nor expected to be in the prefix cache: the
            request needs the rows of all from there on.
        asked: index behind the last item for which it has got rows.
        is_located: the hits of the waiting request were looked up.
    """

    items: list[InputItem]
    first: int = 0
    asked: int = 0
    is_located: bool = False

    @property
    def needed(self) -> list[InputItem]:
        return self.items[self.first :]

    def move_to(self, position: int) -> None:
        """Need no rows of items that end at ``position`` or before."""
        self.first = next((at for at, item in enumerate(self.items) if item.end > position), len(self.items))


ITEMS = RequestPart[RequestItems | None]("items", None)


def items_of(request: Request) -> RequestItems:
    """Return the items of a request that has some."""
    own = ITEMS.of(request)
    assert own is not None, f"{request!r} has no items"
    return own
