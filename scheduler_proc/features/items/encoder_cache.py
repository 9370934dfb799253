"""EncoderCache: which rows of items the workers hold, and whose room is taken for others."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from quire.protocol.wire.item_messages import Encode, Encoded, InputItem
from quire.scheduler_proc.requests.step_clock import StepClock


@dataclass(slots=True, eq=False, repr=False)
class ItemRows:
    """The rows of one content.

    Attributes:
        number: identifies them in messages to the workers.
        item: one of the items with this content; while it is being encoded, the one whose file is read.
        is_cached: it has room in the cache: its rows are there, or are being computed.
        is_encoding: its Encode is not answered.
        holders: by handle of each request that has asked for it, how many of its items are this one.
        last_step: newest step that uses the rows.
        num_items: items of requests that have not ended.
    """

    number: int
    item: InputItem
    is_cached: bool = False
    is_encoding: bool = False
    holders: dict[int, int] = field(default_factory=dict)
    last_step: int = 0
    num_items: int = 0

    @property
    def is_ready(self) -> bool:
        """Whether steps can use the rows."""
        return self.is_cached and not self.is_encoding

    @property
    def num_rows(self) -> int:
        return self.item.num_rows

    def __repr__(self) -> str:
        state = "encoding" if self.is_encoding else ("ready" if self.is_cached else "absent")
        return f"ItemRows({self.number}, {self.num_rows} rows, {state}, {len(self.holders)} holders)"


class EncoderCache:
    """Knows contents by digest, and which of them have room.

    A content that has neither room nor an item is forgotten, so that the number of known ones is bounded.

    Invariants (``check``): the rows of the contents with room are at most ``capacity``. Room is given up only when
    nothing is being written there, and every step that uses the rows has been answered.

    Attributes:
        known: contents by digest.
        cached: those with room, by number, the least recently used one first.
        used: rows with room. encoding: rows that are being computed.
    """

    def __init__(self, capacity: int, clock: StepClock) -> None:
        """``capacity``: rows that the workers have room for."""
        self.capacity = capacity
        self._clock = clock
        self.known: dict[bytes, ItemRows] = {}
        self.cached: dict[int, ItemRows] = {}
        self.used = self.encoding = 0
        self.last_number = self.num_evicted = 0
        self._dropped: list[int] = []
        """Numbers whose rows the next Encode drops."""

    def find(self, item: InputItem) -> ItemRows:
        """Return the content of an item; a new one if it is not known."""
        found = self.known.get(item.digest)
        if found is None:
            self.last_number += 1
            found = self.known[item.digest] = ItemRows(self.last_number, item)
        return found

    def may_drop(self, rows: ItemRows) -> bool:
        """Whether the workers may free the rows now."""
        return rows.is_ready and rows.last_step <= self._clock.acknowledged

    def use(self, rows: ItemRows) -> None:
        """Move the rows to the end of the order of eviction."""
        self.cached[rows.number] = self.cached.pop(rows.number)

    def make_room(self, num_rows: int, others: Iterable[ItemRows]) -> list[ItemRows] | None:
        """Return the contents to drop for ``num_rows`` more: the least recently used ones without a holder, then those
        of ``others`` in their order, as few as suffice. None if they do not suffice."""
        missing = self.used + num_rows - self.capacity
        found: list[ItemRows] = []
        for rows in (*(each for each in self.cached.values() if not each.holders), *others):
            if missing <= 0:
                break
            if self.may_drop(rows):
                found.append(rows)
                missing -= rows.num_rows
        return None if missing > 0 else found

    def encode(self, rows: ItemRows, item: InputItem) -> Encode:
        """Give room to a content, of which ``item`` has the file. Returns the message to the workers."""
        rows.item, rows.is_cached, rows.is_encoding = item, True, True
        self.cached[rows.number] = rows
        self.used += rows.num_rows
        self.encoding += rows.num_rows
        dropped, self._dropped = self._dropped, []
        # A content that was dropped and is encoded again before any other has its old rows there until then.
        return Encode(rows.number, item.digest, item.path, item.kind, rows.num_rows, dropped)

    def encoded(self, answer: Encoded) -> ItemRows | None:
        """End the Encode that ``answer`` answers. Returns its content, which has lost its room if that has failed."""
        rows = self.cached.get(answer.number)
        if rows is None or not rows.is_encoding:
            return None
        rows.is_encoding = False
        self.encoding -= rows.num_rows
        if answer.problem:
            self.drop(rows)
        return rows

    def drop(self, rows: ItemRows) -> None:
        """Give up the room of rows that no step uses."""
        del self.cached[rows.number]
        rows.is_cached = False
        self.used -= rows.num_rows
        self._dropped.append(rows.number)
        self.forget_unused(rows)

    def evict(self, rows: ItemRows) -> None:
        """Drop rows for others."""
        self.num_evicted += 1
        self.drop(rows)

    def forget_unused(self, rows: ItemRows) -> None:
        if not rows.num_items and not rows.is_cached:
            self.known.pop(rows.item.digest, None)

    def drop_all(self) -> None:
        """Give up all room, because the workers were replaced."""
        for rows in list(self.cached.values()):
            rows.is_encoding = False
            self.drop(rows)
        self.encoding = 0
        self._dropped.clear()

    def reset(self) -> bool:
        """Drop all rows, unless a request has asked for some or a step uses them. Returns whether none is left."""
        if any(rows.holders or not self.may_drop(rows) for rows in self.cached.values()):
            return False
        for rows in list(self.cached.values()):
            self.drop(rows)
        return True

    def check(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        for digest, rows in self.known.items():
            assert rows.item.digest == digest, f"{rows!r} has another digest"
            assert rows.is_cached == (self.cached.get(rows.number) is rows), f"{rows!r} is not counted as cached"
            assert rows.num_items or rows.is_cached, f"{rows!r} was not forgotten"
        assert all(self.known.get(rows.item.digest) is rows for rows in self.cached.values()), "rows are not known"
        assert self.used == sum(rows.num_rows for rows in self.cached.values()) <= self.capacity, "too many rows"
        assert self.encoding == sum(rows.num_rows for rows in self.cached.values() if rows.is_encoding)
        assert not set(self._dropped) & self.cached.keys(), "rows with room are dropped"
