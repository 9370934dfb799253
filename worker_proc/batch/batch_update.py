"""Gathers how the rows of the batch change in one step, for the BatchUpdate that processors are given."""

from quire.protocol.request.logits_processors import AddedRequest, BatchUpdate, MovedRequest


class BatchUpdateBuilder:
    """Every removal, addition and move of a row goes through it.

    Guarantees: ``removed`` falls; ``pop_removed`` gives the smallest; a row that was popped (because a new request
    takes it) is no removal any more. In return all removals of a step come before the first look at them.
    """

    def __init__(self) -> None:
        self._removed: list[int] = []
        self._sorted = False
        self.added: list[AddedRequest] = []
        self.moved: list[MovedRequest] = []

    def removed_append(self, row: int) -> None:
        """``row`` is freed. Raises RuntimeError after ``removed`` or ``pop_removed`` was used."""
        if self._sorted:
            raise RuntimeError("a row is removed after the removed rows were looked at")
        self._removed.append(row)

    @property
    def removed(self) -> list[int]:
        """Freed rows that nobody took yet, in falling order."""
        if not self._sorted:
            self._removed.sort(reverse=True)
            self._sorted = True
        return self._removed

    def pop_removed(self) -> int | None:
        """The smallest freed row, for a new request: it is no removal then. None when there is none."""
        return self.removed.pop() if self._removed else None

    def reset(self) -> bool:
        """Forget everything; true when there was anything."""
        return self.get_and_reset(0) is not None

    def get_and_reset(self, batch_size: int) -> BatchUpdate | None:
        """The update, which nothing changes any more, or None when nothing happened. The builder is empty then."""
        update = None
        if self._removed or self.added or self.moved:
            update = BatchUpdate(batch_size, tuple(self.removed), tuple(self.added), tuple(self.moved))
        self._removed, self.added, self.moved = [], [], []
        self._sorted = False
        return update
