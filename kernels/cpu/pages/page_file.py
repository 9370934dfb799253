"""Moves of KV blocks, and of pages of memory, to pages of a file, and of pages of a file to blocks.

Several threads may run the same work: each claims pages one by one. A page is read or written as a whole, in memory of
the thread, so that the file can be open for direct I/O.
"""

import ctypes
import os
import time
from enum import IntEnum
from threading import Lock
from typing import Any

import numpy as np

from quire.kernels.cpu.native.library import Native
from quire.kernels.cpu.pages.page_moves import (
    HEADER,
    OUTCOMES,
    BlockGroup,
    Bytes,
    Int32,
    Int64,
    Moves,
    PageMoves,
    difference,
    header_of,
    move_reference,
)

SECTOR = 4096
"""Pages are read and written in multiples of this, in memory that is aligned to it."""

NO_MEMORY, FILE_ENDS, FILE_ERROR = range(len(OUTCOMES) - 3, len(OUTCOMES))

_POINTERS = ("blocks", "pages", "generations", "groups", "keys")
_WORK = np.dtype([(name, "<u8") for name in (*_POINTERS, "key_bytes", "count", "claimed", "outcomes", "errors")])


class FileMove(IntEnum):
    """What is moved: blocks to pages of the file, pages of the file to blocks, or pages of memory, whose ids are in
    place of those of blocks, to pages of the file."""

    STORE = 0
    LOAD = 1
    DEMOTE = 2


class Claims:
    """The numbers from ``start`` to ``end``, each of which one thread claims."""

    def __init__(self, start: int, end: int) -> None:
        self.next = np.array([start], np.int64)
        """The library changes it too, but never in a call for work that is also done without the library."""
        self.end = end
        self._lock = Lock()

    @property
    def left(self) -> bool:
        return bool(self.next[0] < self.end)

    def claim(self) -> int | None:
        """Return a number that no other thread gets, or None."""
        with self._lock:
            number = int(self.next[0])
            self.next[0] = number + 1
        return number if number < self.end else None

    def cancel(self) -> None:
        """Leave nothing to claim."""
        self.next[0] = self.end


class FileWork:
    """Pages to move, and what has become of them.

    Attributes:
        outcomes: index into OUTCOMES of each page that was moved.
        errors: error number of the system where the outcome is FILE_ERROR.
    """

    def __init__(self, kind: FileMove, moves: Moves) -> None:
        count = len(moves.blocks)
        self.kind, self.moves, self.claims = kind, moves, Claims(0, count)
        self.outcomes, self.errors = np.zeros(count, np.uint8), np.zeros(count, np.int32)
        self._arrays = moves.arrays()
        places = [array.ctypes.data for array in (*self._arrays, self.claims.next, self.outcomes, self.errors)]
        self.described = np.array([(*places[:5], moves.key_bytes, count, *places[5:])], _WORK)
        """The same for the library."""


class FileScan:
    """Pages whose headers are read, from page 1 on, and what was found.

    Attributes:
        forgotten: pages with a generation up to this one have no content.
        groups: of each page, its KV group, or -1 if it has no content.
        generations, keys: of each page with a content.
    """

    def __init__(self, num_pages: int, key_bytes: int, forgotten: int) -> None:
        self.claims = Claims(1, num_pages)
        self.key_bytes, self.forgotten = key_bytes, forgotten
        self.groups: Int32 = np.full(num_pages, -1, np.int32)
        self.generations: Int64 = np.zeros(num_pages, np.int64)
        self.keys: Bytes = np.zeros((num_pages, key_bytes), np.uint8)


class PageFile:
    """Moves blocks of ``copies.groups`` to and from an open file. Ids are not checked.

    The tag of a page of the file is always compared: its write may have been interrupted by the end of a process or of
    the machine, of which nothing else is known. That of a page of memory is compared as ``copies`` does.
    """

    def __init__(self, native: Native | None, copies: PageMoves, fd: int, page_bytes: int) -> None:
        self._copies, self._fd, self._page_bytes = copies, fd, page_bytes
        self._guard = np.zeros(2, np.int64)
        """Whether the file was abandoned; the native calls that access blocks or memory now."""
        self._access = Lock()
        """Held by other calls meanwhile."""
        self._move: Any = None
        if native is not None:
            pointer, long = ctypes.c_void_p, ctypes.c_int64
            moving = (long, pointer, pointer, pointer, long, long, pointer, long, long, pointer, pointer)
            self._move = native.function("quire_move_file", *moving)
            scanning = (pointer, long, long, long, long, pointer, long, long, *[pointer] * 4)
            self._scan = native.function("quire_scan_file", *scanning)

    def abandon(self) -> None:
        """Let no thread access blocks or memory any more, and return when none does. Reads and writes may not end."""
        with self._access:
            self._guard[0] = 1
        while self._guard[1]:
            time.sleep(0.001)

    def move(self, work: FileWork, staging: Bytes, memory: Bytes | None = None, *, stop: Int64 | None = None) -> None:
        """Move pages that no thread has claimed, until none is left. They fail if the file was abandoned.

        Args:
            staging: memory for a page, aligned to SECTOR; of this thread alone.
            memory: ``[num_pages, page_bytes]``, contiguous: the pages that exist, of which some are demoted.
            stop: as in ``PageMoves.move``.
        """
        if self._move is None:
            self._move_reference(work, staging, memory, stop)
            return
        copies = self._copies
        source = (0, 0) if memory is None else (memory.ctypes.data, len(memory))
        file = (self._fd, self._page_bytes, *source, copies.check_tags, staging.ctypes.data)
        guard = self._guard.ctypes.data
        flag = None if stop is None else stop.ctypes.data
        self._move(work.kind, copies.described.ctypes.data, work.described.ctypes.data, flag, *file, guard)

    def scan(self, scan: FileScan, staging: Bytes) -> None:
        """Read the headers that no thread has claimed. A header that cannot be read is that of a page without content.

        Args:
            staging: as in ``move``.
        """
        groups, claims = self._copies.described, scan.claims
        if self._move is None:
            self._scan_reference(scan, staging)
            return
        found = (array.ctypes.data for array in (scan.groups, scan.generations, scan.keys, staging))
        pages = (self._fd, self._page_bytes, claims.end, claims.next.ctypes.data)
        self._scan(groups.ctypes.data, len(groups), *pages, scan.key_bytes, scan.forgotten, *found)

    def _move_reference(self, work: FileWork, staging: Bytes, memory: Bytes | None, stop: Int64 | None) -> None:
        while stop is None or not stop[0]:
            index = work.claims.claim()
            if index is None:
                return
            try:
                work.outcomes[index] = self._move_one(work, index, staging, memory)
            except OSError as error:
                work.outcomes[index], work.errors[index] = FILE_ERROR, error.errno or 0

    def _move_one(self, work: FileWork, index: int, staging: Bytes, memory: Bytes | None) -> int:
        one = work.moves.take(slice(index, index + 1))
        group, offset = self._copies.groups[one.groups[0]], int(one.pages[0]) * self._page_bytes
        used = staging[: -(-(HEADER.itemsize + group.num_bytes) // SECTOR) * SECTOR]
        if work.kind is FileMove.LOAD and os.preadv(self._fd, [used.data], offset) < len(used):
            return FILE_ENDS
        with self._access:
            outcome = FILE_ERROR if self._guard[0] else self._copy_one(work.kind, one, group, staging, memory)
        if outcome or work.kind is FileMove.LOAD:
            return outcome
        used[HEADER.itemsize + group.num_bytes :] = 0
        if os.fstat(self._fd).st_size < offset + len(used):
            return FILE_ENDS
        done = os.pwritev(self._fd, [used.data], offset)
        while done < len(used):
            done += os.pwritev(self._fd, [used[done:].data], offset + done)
        return 0

    def _copy_one(self, kind: FileMove, one: Moves, group: BlockGroup, staging: Bytes, memory: Bytes | None) -> int:
        """Copy a block or a page of memory to ``staging``, or ``staging`` to a block. Returns the outcome."""
        block, staged = int(one.blocks[0]), Moves(one.blocks, one.pages * 0, one.generations, one.groups, one.keys)
        pages = staging[None]
        if kind is not FileMove.DEMOTE:
            return int(move_reference(pages, self._copies.groups, staged, is_load=kind is FileMove.LOAD)[0])
        if memory is None or block >= len(memory):
            return NO_MEMORY
        staging[:] = memory[block]
        copied = BlockGroup([np.empty((1, group.num_bytes), np.uint8)], group.layout)
        check = Moves(one.blocks * 0, one.pages * 0, one.generations, one.groups * 0, one.keys)
        return int(move_reference(pages, [copied], check, is_load=True, check_tags=self._copies.check_tags)[0])

    def _scan_reference(self, scan: FileScan, staging: Bytes) -> None:
        sector = staging[:SECTOR]
        while (page := scan.claims.claim()) is not None:
            try:
                if os.preadv(self._fd, [sector.data], page * self._page_bytes) < SECTOR:
                    continue
            except OSError:
                continue
            found = sector[: HEADER.itemsize].view(HEADER)[0]
            if found["generation"] <= scan.forgotten or found["key_bytes"] != scan.key_bytes:
                continue
            key = found["key"][: scan.key_bytes].tobytes()
            for index, group in enumerate(self._copies.groups):
                if not difference(found, header_of(group, int(found["generation"]), key)):
                    scan.groups[page], scan.generations[page] = index, found["generation"]
                    scan.keys[page] = np.frombuffer(key, np.uint8)
                    break
