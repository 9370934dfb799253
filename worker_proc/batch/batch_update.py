"""Collects the row changes of one step for the BatchUpdate that logits processors receive."""

from quire.protocol.request.logits_processors import AddedRequest, BatchUpdate, MovedRequest


class BatchUpdateBuilder:
    """Collects every removal, addition and move of a row.

    Guarantees: ``removed`` is in descending order; ``pop_removed`` returns the smallest row; a popped row, which a new
    request takes, no longer counts as removed. All removals of a step must be recorded before the first read of them.
    """

    def __init__(self) -> None:
        self._removed: list[int] = []
        self._sorted = False
        self.added: list[AddedRequest] = []
        self.moved: list[MovedRequest] = []

    def removed_append(self, row: int) -> None:
        """Record that ``row`` was freed. Raise RuntimeError after ``removed`` or ``pop_removed`` was used."""
        if self._sorted:
            raise RuntimeError(f"row {row} removed after the removed rows were read")
        self._removed.append(row)

    @property
    def removed(self) -> list[int]:
        """Freed rows that no request has taken yet, in descending order."""
        if not self._sorted:
            self._removed.sort(reverse=True)
            self._sorted = True
        return self._removed

    def pop_removed(self) -> int | None:
        """Return the smallest freed row for a new request, or None; the row no longer counts as removed."""
        return self.removed.pop() if self._removed else None

    def reset(self) -> bool:
        """Discard all changes; return whether there were any."""
        return self.get_and_reset(0) is not None

    def get_and_reset(self, batch_size: int) -> BatchUpdate | None:
        """Return the step's immutable update, or None if nothing changed, and empty the builder."""
        update = None
        if self._removed or self.added or self.moved:
            update = BatchUpdate(batch_size, tuple(self.removed), tuple(self.added), tuple(self.moved))
        self._removed, self.added, self.moved = [], [], []
        self._sorted = False
        return update
