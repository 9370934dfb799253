"""How the rows of a batch changed in one step, told to whatever keeps state per row."""

from dataclasses import dataclass, field

from quire.protocol.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class AddedRow:
    row: int
    handle: int
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class BatchUpdate:
    """Applied in this order: removed, added, moved. A row that was freed and filled again is an addition alone.

    Attributes:
        batch_size: rows after the update.
        removed: rows that were freed and not filled by an addition, as numbered before any move.
        added: rows that a new request took.
        moved: (source, target): the last row went into a hole; the source row is empty afterwards.
    """

    batch_size: int
    removed: list[int]
    added: list[AddedRow]
    moved: list[tuple[int, int]]


@dataclass(slots=True)
class BatchUpdateBuilder:
    """Gathers one step's changes; every change of a row goes through it."""

    removed: list[int] = field(default_factory=list)
    added: list[AddedRow] = field(default_factory=list)
    moved: list[tuple[int, int]] = field(default_factory=list)

    def take(self, batch_size: int) -> BatchUpdate | None:
        """The update, or None when no row changed; the builder is empty afterwards."""
        if not (self.removed or self.added or self.moved):
            return None
        update = BatchUpdate(batch_size, self.removed, self.added, self.moved)
        self.removed, self.added, self.moved = [], [], []
        return update
