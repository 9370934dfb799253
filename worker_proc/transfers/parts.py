"""The blocks of a MoveBlocks whose pages are in one tier, and its answer."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from threading import Lock

from quire.kernels.cpu.pages.page_moves import Int32, Moves
from quire.protocol.wire.transfer_messages import BlocksMoved, MoveKind


@dataclass(slots=True)
class CopyPart:
    """Blocks to copy, and what has become of them. Belongs to one tier until that has called ``ended``.

    Attributes:
        moves: with the tier's own numbers of its pages.
        pages: ids of the pages.
        indices: of the blocks in the MoveBlocks.
        seconds: duration of the copies.
        failures: reason for each block that failed, by its index in the MoveBlocks.
    """

    kind: MoveKind
    moves: Moves
    pages: Int32
    indices: Sequence[int]
    ended: Callable[["CopyPart"], None]
    on_disk: bool
    seconds: float = 0.0
    failures: dict[int, str] = field(default_factory=dict)

    def fail(self, positions: Iterable[int], reason: str) -> None:
        """Note why the blocks at ``positions`` of ``moves`` have failed."""
        for position in positions:
            self.failures[self.indices[position]] = reason

    def drop(self) -> None:
        """End without copies, because the tier is closed."""
        self.fail(range(len(self.indices)), "the worker epoch has ended")
        self.ended(self)

    def fail_page(self, position: int, reason: str) -> None:
        block, page = self.moves.blocks[position], self.pages[position]
        source = "page" if self.kind is MoveKind.DEMOTE else "block"
        self.fail([position], f"page {page} for {source} {block}: {reason}")


class Pending:
    """A MoveBlocks with parts that have not ended; answered when all have."""

    def __init__(self, transfer: int, num_parts: int, answer: Callable[[BlocksMoved], None]) -> None:
        self._transfer, self._answer = transfer, answer
        self._lock = Lock()
        self._left = num_parts
        self._failures: dict[int, str] = {}
        self._seconds = self._disk_seconds = 0.0

    def ended(self, part: CopyPart) -> None:
        with self._lock:
            self._left -= 1
            self._failures |= part.failures
            self._seconds += part.seconds
            self._disk_seconds += part.seconds if part.on_disk else 0.0
            if self._left:
                return
        failed = sorted(self._failures)
        reason = self._failures[failed[0]] if failed else ""
        self._answer(BlocksMoved(self._transfer, failed, self._seconds, reason, self._disk_seconds))


def one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
