"""EncoderCache: the rows of items that the workers hold."""

from dataclasses import dataclass

from quire.protocol.wire.item_messages import Encode, Encoded, InputItem
from quire.scheduler_proc.requests.step_clock import StepClock


@dataclass(slots=True, eq=False)
class ItemRows:
    """Rows with room in the cache.

    Attributes:
        item: the item whose file is read for them.
        is_ready: the workers have them. Otherwise they are being computed.
        last_step: newest step that uses them.
    """

    item: InputItem
    is_ready: bool = False
    last_step: int = 0


class EncoderCache:
    """Knows which rows have room.

    Invariants (``check``): the rows with room are at most ``capacity``. Room is given up only when nothing is being
    written there, and every step that uses the rows has been answered.

    Attributes:
        rows: by key of their item, the least recently used ones first.
        dropped: keys whose rows the next Encode drops.
    """

    def __init__(self, capacity: int, clock: StepClock) -> None:
        """``capacity``: rows that the workers have room for."""
        self.capacity = capacity
        self._clock = clock
        self.rows: dict[bytes, ItemRows] = {}
        self.dropped: list[bytes] = []

    @property
    def num_used(self) -> int:
        return sum(rows.item.num_rows for rows in self.rows.values())

    @property
    def num_encoding(self) -> int:
        """Rows that are being computed."""
        return sum(rows.item.num_rows for rows in self.rows.values() if not rows.is_ready)

    def ready(self, item: InputItem) -> bool | None:
        """Return whether steps can use the rows of an item; None: they have no room."""
        found = self.rows.get(item.key)
        return None if found is None else found.is_ready

    def may_drop(self, rows: ItemRows) -> bool:
        """Whether the workers may free the rows now."""
        return rows.is_ready and rows.last_step <= self._clock.acknowledged

    def use(self, item: InputItem, step: int = 0) -> None:
        """Move the rows of an item to the end of the order of eviction. ``step``: uses them."""
        rows = self.rows[item.key] = self.rows.pop(item.key)
        rows.last_step = max(rows.last_step, step)

    def encode(self, item: InputItem) -> Encode:
        """Give room to the rows of an item. Returns the message to the workers."""
        self.rows[item.key] = ItemRows(item)
        dropped, self.dropped = self.dropped, []
        # Rows that were dropped and are encoded again before any other have their old ones there until then.
        return Encode(item, dropped)

    def encoded(self, answer: Encoded) -> InputItem | None:
        """End the Encode that ``answer`` answers, and return its item, which has lost its room if that has failed."""
        rows = self.rows.get(answer.key)
        if rows is None or rows.is_ready:
            return None
        rows.is_ready = True
        if answer.problem:
            self.drop(answer.key)
        return rows.item

    def drop(self, key: bytes) -> None:
        """Give up the room of rows that no step uses."""
        del self.rows[key]
        self.dropped.append(key)

    def drop_all(self) -> None:
        """Give up all room, because the workers were replaced."""
        self.rows.clear()
        self.dropped.clear()

    def check(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        assert all(rows.item.key == key for key, rows in self.rows.items()), "rows have another key"
        assert self.num_used <= self.capacity, f"{self.num_used} rows in a cache of {self.capacity}"
        assert not set(self.dropped) & self.rows.keys(), "rows with room are dropped"
