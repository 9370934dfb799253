"""Moves between blocks, memory and pages of a file: native against NumPy, several threads, and errors of the file."""

import errno
import os
import resource
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from quire.kernels.cpu.native.library import Native
from quire.kernels.cpu.pages.page_file import FileMove, FileScan, FileWork, PageFile
from quire.kernels.cpu.pages.page_moves import OUTCOMES, BlockGroup, Bytes, Moves, PageMoves

NUM_BLOCKS, NUM_PAGES = 6, 9
PAGE_BYTES = 3 * 4096
WIDE, NARROW = 640, 80


class Case:
    """A file, and blocks of two KV groups, whose bytes depend on the seed alone."""

    def __init__(self, folder: Path, library: Native | None, *, seed: int = 1, check_tags: bool = True) -> None:
        rng = np.random.default_rng(seed)
        spans = [[rng.integers(0, 256, (NUM_BLOCKS, size), np.uint8) for _ in range(12)] for size in (WIDE, NARROW)]
        self.groups = [BlockGroup(some, name * 16) for some, name in zip(spans, (b"w", b"n"), strict=True)]
        self.path = folder / f"pages of {library is None}"
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(self.fd, NUM_PAGES * PAGE_BYTES)
        self.memory = np.zeros((NUM_PAGES, PAGE_BYTES), np.uint8)
        self.copies = PageMoves(library, self.groups, check_tags=check_tags)
        self.file = PageFile(library, self.copies, self.fd, PAGE_BYTES)

    def move(self, kind: FileMove, moves: Moves, *, memory: Bytes | None = None, threads: int = 1) -> FileWork:
        work = FileWork(kind, moves)

        def run() -> None:
            staging = np.full(PAGE_BYTES, 7, np.uint8)
            self.file.move(work, staging, memory)

        running = [Thread(target=run) for _ in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        assert not work.claims.left
        return work

    def block(self, block: int, group: int) -> bytes:
        return b"".join(span[block].tobytes() for span in self.groups[group].spans)

    def clear(self) -> None:
        for group in self.groups:
            for span in group.spans:
                span[:] = 0


def moves(blocks: list[int], pages: list[int], groups: list[int] | None = None) -> Moves:
    """Return moves in which generation and key follow from the page."""
    ids = np.array(blocks, np.int32), np.array(pages, np.int32)
    keys = b"".join(bytes([page]) * 40 for page in pages)
    return Moves(*ids, 100 + ids[1].astype(np.int64), np.array(groups or [0] * len(blocks), np.int32), keys)


ALL = moves([1, 2, 3, 4], [8, 3, 5, 1], [0, 1, 0, 1])


@pytest.fixture(params=[True, False], ids=["native", "numpy"])
def case(request: pytest.FixtureRequest, tmp_path: Path, native: Native) -> Case:
    return Case(tmp_path, native if request.param else None)


@pytest.mark.parametrize("threads", [1, 4])
def test_native_files_equal_those_of_numpy(tmp_path: Path, native: Native, threads: int) -> None:
    cases = [Case(tmp_path, library) for library in (native, None)]
    for case in cases:
        assert not case.move(FileMove.STORE, ALL, threads=threads).outcomes.any()
    contents = [case.path.read_bytes() for case in cases]
    assert contents[0] == contents[1] and len(contents[0]) == NUM_PAGES * PAGE_BYTES
    stored = [cases[0].block(block, group) for block, group in zip(ALL.blocks, ALL.groups, strict=True)]
    for case in cases:
        case.clear()
        assert not case.move(FileMove.LOAD, ALL, threads=threads).outcomes.any()
        assert stored == [case.block(block, group) for block, group in zip(ALL.blocks, ALL.groups, strict=True)]


def test_a_demoted_page_is_the_page_of_memory(case: Case) -> None:
    case.copies.move(case.memory, ALL, is_load=False)
    targets = moves([8, 3, 5, 1], [2, 4, 6, 7], [0, 1, 0, 1])
    content = Moves(targets.blocks, targets.pages, ALL.generations, ALL.groups, ALL.keys)
    assert not case.move(FileMove.DEMOTE, content, memory=case.memory).outcomes.any()
    written = np.frombuffer(case.path.read_bytes(), np.uint8).reshape(NUM_PAGES, PAGE_BYTES)
    for source, target, group in zip(targets.blocks, targets.pages, targets.groups, strict=True):
        end = 256 + case.groups[group].num_bytes
        assert np.array_equal(written[target, :end], case.memory[source, :end])
    case.memory[3, 700] ^= 1
    damaged = case.move(FileMove.DEMOTE, content, memory=case.memory[:8])
    assert [OUTCOMES[number] for number in damaged.outcomes] == [
        "host memory was truncated",
        "tag does not match the bytes",
        *[""] * 2,
    ]


def test_headers_alone_are_checked_in_memory_but_never_in_the_file(tmp_path: Path, native: Native) -> None:
    for library in (native, None):
        case = Case(tmp_path, library, check_tags=False)
        case.copies.move(case.memory, ALL, is_load=False)
        case.memory[3, 700] ^= 1
        assert not case.copies.move(case.memory, ALL, is_load=True).any()
        content = Moves(ALL.pages, ALL.pages, ALL.generations, ALL.groups, ALL.keys)
        assert not case.move(FileMove.DEMOTE, content, memory=case.memory).outcomes.any()
        assert case.move(FileMove.LOAD, ALL).outcomes.tolist() == [
            0,
            OUTCOMES.index("tag does not match the bytes"),
            0,
            0,
        ]
        case.memory[3, 100] ^= 1
        assert case.copies.move(case.memory, ALL, is_load=True).tolist() == [
            0,
            OUTCOMES.index("page of another key"),
            0,
            0,
        ]


def test_a_truncated_file_is_neither_read_past_its_end_nor_extended(case: Case) -> None:
    case.move(FileMove.STORE, ALL)
    size = 5 * PAGE_BYTES + 4096
    os.ftruncate(case.fd, size)
    for kind in (FileMove.LOAD, FileMove.STORE):
        outcomes = case.move(kind, ALL).outcomes
        assert [OUTCOMES[number] for number in outcomes] == ["the file was truncated", "", "the file was truncated", ""]
    assert case.path.stat().st_size == size


def test_an_error_of_the_file_is_that_page_s_own(case: Case) -> None:
    """Writes end at the limit of the size of files, within a page and before one, as they do on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5 * PAGE_BYTES + 4096, limits[1]))
    try:
        work = case.move(FileMove.STORE, ALL)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [OUTCOMES[number] for number in work.outcomes] == ["error of the file", "", "error of the file", ""]
    assert work.errors.tolist() == [errno.EFBIG, 0, errno.EFBIG, 0]
    assert case.move(FileMove.LOAD, ALL).outcomes.tolist() == [1, 0, OUTCOMES.index("tag does not match the bytes"), 0]


@pytest.mark.parametrize("threads", [1, 3])
def test_a_scan_finds_what_has_the_layout_and_key_and_is_not_forgotten(case: Case, threads: int) -> None:
    pages = [7, 2, 8, 3, 4, 5]
    case.move(FileMove.STORE, moves([1] * 6, pages, [0, 1, 0, 0, 0, 0]))
    os.pwrite(case.fd, b"QUIREKV2", 3 * PAGE_BYTES)
    os.pwrite(case.fd, b"other layout", 4 * PAGE_BYTES + 8)
    os.pwrite(case.fd, (41).to_bytes(4, "little"), 5 * PAGE_BYTES + 40)
    os.ftruncate(case.fd, 8 * PAGE_BYTES + 100)
    scan = FileScan(NUM_PAGES, 40, 102)
    running = [Thread(target=case.file.scan, args=(scan, np.zeros(4096, np.uint8))) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert np.flatnonzero(scan.groups >= 0).tolist() == [7]
    again = FileScan(NUM_PAGES, 40, 0)
    case.file.scan(again, np.zeros(4096, np.uint8))
    assert again.groups.tolist() == [-1, -1, 1, -1, -1, -1, -1, 0, -1]
    assert again.generations[[2, 7]].tolist() == [102, 107]
    assert again.keys[[2, 7]].tobytes() == b"\2" * 40 + b"\7" * 40


def test_cancelled_and_stopped_work_ends(case: Case) -> None:
    work, cancelled = (FileWork(FileMove.STORE, ALL) for _ in range(2))
    cancelled.claims.cancel()
    case.file.move(cancelled, np.zeros(PAGE_BYTES, np.uint8))
    case.file.move(work, np.zeros(PAGE_BYTES, np.uint8), stop=np.ones(1, np.int64))
    assert not any(case.path.read_bytes()) and work.claims.left
    case.file.move(work, np.zeros(PAGE_BYTES, np.uint8), stop=np.zeros(1, np.int64))
    assert any(case.path.read_bytes()) and not work.claims.left
    stopped = case.copies.move(case.memory, ALL, is_load=False, stop=np.ones(1, np.int64))
    assert len(stopped) == 0 and not case.memory.any()
    assert len(case.copies.move(case.memory, ALL, is_load=False, stop=np.zeros(1, np.int64))) == 4


@pytest.mark.parametrize("kind", FileMove)
def test_no_block_is_accessed_after_the_file_was_abandoned(case: Case, kind: FileMove) -> None:
    assert not case.move(FileMove.STORE, ALL).outcomes.any()
    before, blocks = case.path.read_bytes(), [case.block(block, group) for block in range(6) for group in (0, 1)]
    case.copies.move(case.memory, moves([1, 2], [1, 2]), is_load=False)
    case.file.abandon()
    work = case.move(kind, moves([1, 2], [3, 8] if kind is FileMove.LOAD else [2, 7], [1, 0]), memory=case.memory)
    assert [OUTCOMES[outcome] for outcome in work.outcomes] == ["error of the file"] * 2
    assert case.path.read_bytes() == before
    assert [case.block(block, group) for block in range(6) for group in (0, 1)] == blocks
