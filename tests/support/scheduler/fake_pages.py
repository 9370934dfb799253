"""Host memory, disk and the copies of a fake worker: pages with headers, and faults in them.

Pages outlive the worker. A test decides when a copy runs, which may be long after later steps: a scheduler that gives
its blocks to others meanwhile is found out, because then a page holds, or a block gets, other content.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from quire.protocol.wire.transfer_messages import BlocksMoved, DiskContents, MoveBlocks, MoveKind

FAULTS = ("flipped", "torn", "lost", "misplaced", "refused")


@dataclass(frozen=True)
class Page:
    """A page as a worker finds it. ``is_whole``: whether its tag fits its data."""

    key: bytes
    group: int
    generation: int
    slots: tuple[int, ...]
    is_whole: bool = True


class FakePages:
    """Pages, and copies that were received and have not run.

    Attributes:
        pages: by id, those on disk too.
        disk: ids of the pages on disk; the first one describes the file.
        pending: received copies in order.
        num_detected: pages that a load refused because they were not what they should be.
        num_damaged: pages with a fault that was made on purpose.
        fault: called for each stored page; returns one of FAULTS, or an empty string.
        seconds: pages → the reported duration of a copy.
    """

    def __init__(self, slots: Callable[[int, int], list[int]]) -> None:
        """``slots``: block and its group → its slots."""
        self._slots = slots
        self.pages: dict[int, Page] = {}
        self.disk = range(0)
        self.pending: list[MoveBlocks] = []
        self.num_detected = self.num_damaged = 0
        self.fault: Callable[[], str] = lambda: ""
        self.seconds: Callable[[int], float] = lambda num_pages: 0.001

    def receive(self, move: MoveBlocks) -> None:
        count = len(move.block_ids)
        assert count == len(move.page_ids) == len(move.generations) and len(move.keys) % count == 0
        groups = [0] * count if move.groups is None else move.groups.tolist()
        blocks = set(zip(move.block_ids.tolist(), groups, strict=True))
        assert len(blocks) == len(set(move.page_ids.tolist())) == count, "copied twice"
        assert 0 not in move.block_ids and not {0, *self.disk[:1]} & set(move.page_ids.tolist()), (
            "the null block or the first page of a tier is copied"
        )
        for other in self.pending:
            for one, two in ((move, other), (other, move)):
                shared = _written(one) & (_written(two) | _read(two))
                assert not shared, f"pages {shared} are written while they are copied"
        self.pending.append(move)

    def run(self, index: int = 0) -> BlocksMoved:
        """Run a pending copy, and return its answer."""
        move = self.pending.pop(index)
        copy = {MoveKind.LOAD: self._load, MoveKind.STORE: self._store, MoveKind.DEMOTE: self._demote}[move.kind]
        count = len(move.block_ids)
        size = len(move.keys) // count
        failed = []
        for at, (block, page, generation) in enumerate(
            zip(move.block_ids.tolist(), move.page_ids.tolist(), move.generations.tolist(), strict=True)
        ):
            group = 0 if move.groups is None else int(move.groups[at])
            key = move.keys[at * size : (at + 1) * size]
            if not copy(block, page, Page(key, group, generation, ())):
                failed.append(at)
        return BlocksMoved(
            move.transfer, failed, self.seconds(count), "a page is not what it should be" if failed else ""
        )

    def disk_contents(self, forgotten: int) -> DiskContents:
        """Return what the headers on disk name."""
        on_disk = [(at, self.pages[at]) for at in self.disk[1:] if at in self.pages]
        found = [(at, page) for at, page in on_disk if page.generation > forgotten]
        return DiskContents(
            np.array([at for at, _ in found], np.int32),
            np.array([page.generation for _, page in found], np.int64),
            b"".join(page.key for _, page in found),
            np.array([page.group for _, page in found], np.int32),
        )

    def _load(self, block: int, page: int, expected: Page) -> bool:
        found = self.pages.get(page)
        slots = self._slots(block, expected.group)
        if found is None or not found.is_whole or replace(found, slots=()) != expected:
            self.num_detected += 1
            slots[:] = [-2] * len(slots)  # what was copied before the check failed
            return False
        slots[:] = found.slots
        return True

    def _demote(self, source: int, page: int, expected: Page) -> bool:
        found = self.pages.get(source)
        if found is None or not found.is_whole or replace(found, slots=()) != expected:
            self.num_detected += 1
            return False
        return self._write(page, found)

    def _store(self, block: int, page: int, header: Page) -> bool:
        return self._write(page, replace(header, slots=tuple(self._slots(block, header.group))))

    def _write(self, page: int, stored: Page) -> bool:
        fault = self.fault()
        self.num_damaged += bool(fault)
        match fault:
            case "flipped":
                stored = replace(stored, slots=(stored.slots[0] ^ 1, *stored.slots[1:]), is_whole=False)
            case "torn":
                stored = replace(stored, slots=(*stored.slots[:-1], -3), is_whole=False)
            case "lost":
                return True
            case "misplaced":
                self.pages[page + 1] = stored
                return True
            case "refused":
                return False
        self.pages[page] = stored
        return True


def _written(move: MoveBlocks) -> set[int]:
    return set() if move.is_load else set(move.page_ids.tolist())


def _read(move: MoveBlocks) -> set[int]:
    """Return the pages that a copy reads."""
    if move.kind is MoveKind.DEMOTE:
        return set(move.block_ids.tolist())
    return set(move.page_ids.tolist()) if move.is_load else set()


def random_faults(rng: random.Random, rate: float) -> Callable[[], str]:
    """Return a ``fault`` that damages this part of the pages."""
    return lambda: rng.choice(FAULTS) if rng.random() < rate else ""
