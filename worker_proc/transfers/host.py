"""Copies of KV blocks to host memory and back, in a thread beside the steps."""

import time
from collections import deque
from dataclasses import dataclass
from threading import Condition, Thread

import numpy as np

from quire.kernels.cpu.pages.page_moves import OUTCOMES, PageMoves
from quire.protocol.wire.transfer_messages import HostPages, MoveKind
from quire.worker_proc.transfers.pages import MappedPages
from quire.worker_proc.transfers.parts import CopyPart, one_line

NO_MEMORY = OUTCOMES.index("host memory was truncated")


@dataclass(slots=True)
class _Queued:
    """A part in a queue: the first ``done`` blocks are copied."""

    part: CopyPart
    done: int = 0


class HostTier:
    """Owns the map of a rank's host memory, the queues of its loads and stores, and the thread that copies.

    Loads go before stores, even before the rest of a running store. A store is one call without the GIL, which ends
    when a load arrives: a thread that takes the GIL again and again delays others that wait for it, by milliseconds.
    """

    def __init__(self, message: HostPages, copies: PageMoves) -> None:
        """
        Raises:
            MapFailed: the memory cannot be used.
        """
        self.memory = MappedPages(message)
        self._copies = copies
        self._stop = np.zeros(1, np.int64)
        """Ends the store that is running: a load waits, or the tier is closed."""
        # The condition guards everything below.
        self._changed = Condition()
        self._loads: deque[_Queued] = deque()
        self._stores: deque[_Queued] = deque()
        self._closing = False
        self._thread: Thread | None = None

    def submit(self, part: CopyPart) -> None:
        with self._changed:
            if self._closing:
                part.drop()
                return
            is_load = part.kind is MoveKind.LOAD
            (self._loads if is_load else self._stores).append(_Queued(part))
            # Read by the native copy between two pages, without the GIL.
            self._stop[0] |= is_load
            if self._thread is None:
                self._thread = Thread(target=self._run, name="block mover", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def close(self) -> None:
        """Drop what has not ended, wait for the copy that is running, and unmap the memory."""
        with self._changed:
            self._closing = True
            self._stop[0] = 1
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self.memory.close()
        for queued in (*self._loads, *self._stores):
            queued.part.drop()

    # ---- the thread

    def _run(self) -> None:
        while (queue := self._next()) is not None:
            queued = queue[0]
            part = queued.part
            queued.done = self._copy(part, queued.done)
            if queued.done == len(part.moves.blocks):
                queue.popleft()
                part.ended(part)

    def _next(self) -> deque[_Queued] | None:
        """Wait for a part, and return its queue; None when closing."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._loads or self._stores)
            self._stop[0] = self._closing
            # Requests wait for loads. Stores only make room for later, and one that has been interrupted continues with
            # its next page.
            return None if self._closing else self._loads or self._stores

    def _copy(self, part: CopyPart, start: int) -> int:
        """Copy the blocks from ``start`` on, and return where the copy ended."""
        began = time.perf_counter()
        try:
            end = self._copy_backed(part, start)
        except Exception as error:  # an answer in any case: the scheduler keeps the blocks until it has one
            end = len(part.moves.blocks)
            part.fail(range(start, end), one_line(error))
        part.seconds += time.perf_counter() - began
        return end

    def _copy_backed(self, part: CopyPart, start: int) -> int:
        # The size is asked for before each copy: an access behind the end of a file that was truncated meanwhile ends
        # the process with SIGBUS.
        moves, backed = part.moves.take(slice(start, None)), self.memory.backed_pages()
        is_load = part.kind is MoveKind.LOAD
        inside = moves.pages < len(backed)
        count = len(inside) if inside.all() else int(np.argmin(inside))  # before the first whose page is lost
        if not count:
            part.fail_page(start, OUTCOMES[NO_MEMORY])
            return start + 1
        stop = None if is_load else self._stop
        outcomes = self._copies.move(backed, moves.take(slice(count)), is_load=is_load, stop=stop)
        for position in np.flatnonzero(outcomes).tolist():
            part.fail_page(start + position, OUTCOMES[outcomes[position]])
        return start + len(outcomes)
