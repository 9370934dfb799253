"""Pages of a fake worker as bytes, written and checked by the real copies, with faults in these bytes."""

import random
from collections import Counter

import numpy as np
from fake_pages import FakePages, Page

from quire.kernels.cpu.native.library import load_native
from quire.kernels.cpu.pages.page_moves import HEADER, BlockGroup, Moves, PageMoves

PAGE_BYTES = 512
FAULTS = ("flipped", "torn", "short", "lost", "misplaced", "refused", "stale")


class BytePages(FakePages):
    """Takes the place of a FakeWorker's pages.

    Attributes:
        rate: part of the stores with a fault.
        counts: blocks that were moved, faults that were made, and damaged pages that a load has refused.
    """

    def __init__(self, pages: FakePages, rng: random.Random, rate: float) -> None:
        super().__init__(pages._slots)
        self.disk = pages.disk
        self._rng, self.rate = rng, rate
        self.counts: Counter[str] = Counter()
        self._memory = np.zeros((2048, PAGE_BYTES), np.uint8)
        width = len(self._slots(0))
        self._tags = np.zeros((1, width), np.uint64)
        spans = [self._tags.view(np.uint8).reshape(1, -1)]
        self._copies = PageMoves(load_native(), [BlockGroup(spans, bytes(16))])
        self._used = HEADER.itemsize + spans[0].shape[1]

    def wipe(self) -> None:
        """Lose all pages."""
        self._memory[:] = 0

    def _load(self, block: int, page: int, expected: Page) -> bool:
        self.counts["moves"] += 1
        good = not self._move(page, expected, is_load=True)
        slots = self._slots(block)
        slots[:] = self._tags[0].tolist() if good else [-2] * len(slots)
        if not good:
            self.counts["refused pages"] += 1
        return good

    def _store(self, block: int, page: int, header: Page) -> bool:
        self._tags[0] = np.array(self._slots(block), np.uint64)  # a cached block is full: no slot is negative
        return self._put(page, header)

    def _demote(self, source: int, page: int, expected: Page) -> bool:
        if self._move(source, expected, is_load=True):
            self.counts["refused pages"] += 1
            return False
        self.counts["demoted"] += 1
        return self._put(page, expected)

    def _put(self, page: int, header: Page) -> bool:
        """Write ``_tags``, perhaps with a fault."""
        self.counts["moves"] += 1
        fault = self._rng.choice(FAULTS) if self._rng.random() < self.rate else ""
        if fault:
            self.counts[fault] += 1
        if fault == "refused":
            return False
        if fault == "lost":
            return True
        before = self._memory[page].copy()
        at = page + 1 if fault == "misplaced" else page
        self._move(at, header, is_load=False)
        written, cut = self._memory[at], self._rng.randrange(8, self._used)
        match fault:
            case "flipped":
                written[self._rng.randrange(self._used)] ^= 1 << self._rng.randrange(8)
            case "torn":  # the end of what was there before
                written[cut:] = before[cut:]
            case "short":
                written[cut:] = 0
            case "stale":  # an earlier store of the same content arrives last
                old = Page(header.key, header.group, header.generation - 1, ())
                self._move(at, old, is_load=False)
        return True

    def _move(self, page: int, header: Page, *, is_load: bool) -> int:
        ids = (np.zeros(1, np.int32), np.array([page], np.int32), np.array([header.generation], np.int64))
        moves = Moves(*ids, np.zeros(1, np.int32), header.key)
        return int(self._copies.move(self._memory, moves, is_load=is_load)[0])
