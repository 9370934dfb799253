"""Pages on disk: loads equal what was stored or demoted, and every fault fails its own block."""

import errno
import fcntl
import os
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from host_pages import KEY_BYTES, LAYOUTS, LLAMA, SMALL, Disk, Pool, demote, disk_pages, host_memory, move

from quire.kernels.cpu.native.library import load_native
from quire.kernels.cpu.pages.page_file import FileMove, PageFile
from quire.protocol.model.kv_layout import KVLayout
from quire.protocol.wire.transfer_messages import DiskPages, MoveBlocks
from quire.worker_proc.batch.input_batch import StepRefused
from quire.worker_proc.transfers import disk as disk_tier
from quire.worker_proc.transfers.disk import WRITERS, DiskFile, open_pages

HOST, DISK = 6, 8
"""Numbers of pages; the ids of those on disk are 7 to 13."""


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool(LLAMA, load_native())
    yield pool
    pool.mover.close()


@pytest.fixture
def disk(pool: Pool, tmp_path: Path) -> Disk:
    """The only tier of ``pool``."""
    disk = disk_pages(tmp_path / "pages", DISK, pool.mover.page_bytes, first_page=HOST)
    pool.mover.open(disk.message)
    return disk


@pytest.mark.parametrize("native", [True, False], ids=["native", "numpy"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_blocks_of_all_tiers_are_loaded_by_one_message(layout: KVLayout, native: bool, tmp_path: Path) -> None:
    """Some are stored to host memory, some of these demoted, some stored to disk; then host memory is lost."""
    pool = Pool(layout, load_native() if native else None)
    size, last = pool.mover.page_bytes, len(layout.groups) - 1
    groups = np.array([0, last, last, 0], np.int32)
    stored = [pool.block(block, group) for block, group in zip([1, 2, 3, 4], groups, strict=True)]
    disk = disk_pages(tmp_path / "pages", DISK, size, first_page=HOST, read_contents=True)
    with host_memory(HOST, size) as memory:
        pool.mover.map(memory.message)
        assert len(pool.contents(disk.message).page_ids) == 0
        assert pool.run(move(False, [1, 2], [5, 1], groups=groups[:2])).failed == []
        assert pool.run(demote([5], [12], groups=groups[:1])).failed == []
        assert pool.run(move(False, [3, 4], [9, 8], groups=groups[2:])).failed == []
        pool.fill(1)
        generations, keys = np.array([5, 1, 9, 8]), b"".join(p.to_bytes(KEY_BYTES, "big") for p in (5, 1, 9, 8))
        load = move(True, [8, 7, 6, 5], [12, 1, 9, 8], groups=groups, generations=generations, keys=keys)
        answer = pool.run(load)
        assert (answer.failed, answer.reason) == ([], "") and answer.seconds > answer.disk_seconds > 0
        assert [pool.block(block, group) for block, group in zip([8, 7, 6, 5], groups, strict=True)] == stored
        pool.mover.begin_worker_epoch()
    found = pool.contents(disk.message)
    assert (found.page_ids.tolist(), found.generations.tolist(), found.reason) == ([8, 9, 12], [8, 9, 5], "")
    assert found.keys == b"".join(page.to_bytes(KEY_BYTES, "big") for page in (8, 9, 5))
    assert (found.groups is None) == (last == 0) and (last == 0 or found.groups.tolist() == [0, last, 0])  # type: ignore[union-attr]
    pool.fill(2)
    again = move(True, [1, 2, 3], [8, 9, 12], generations=found.generations, keys=found.keys, groups=found.groups)
    assert pool.run(again).failed == []
    assert [pool.block(block, group) for block, group in ((1, 0), (2, last), (3, 0))] == [
        stored[3],
        stored[2],
        stored[0],
    ]
    pool.mover.close()


def flip(disk: Disk) -> None:
    disk.overwrite(8, 5000, bytes([disk.page(8)[5000] ^ 4]))


def tear(disk: Disk) -> None:
    """The header and the first half are those of an older content, as after an interrupted write."""
    disk.overwrite(8, 4096, disk.page(9)[4096:])


def tear_the_header(disk: Disk) -> None:
    disk.overwrite(8, 0, disk.page(9)[:4096])


def clear(disk: Disk) -> None:
    disk.overwrite(8, 0, bytes(4096))


def truncate(disk: Disk) -> None:
    os.truncate(disk.path, (9 - HOST) * disk.message.page_bytes - 4096)


@pytest.mark.parametrize(
    ("damage", "failed", "reason"),
    [
        (flip, [1], "tag does not match"),
        (tear, [1], "tag does not match"),
        (tear_the_header, [1], "page of another generation"),
        (clear, [1], "not a page"),
        (truncate, [1, 2], "the file was truncated"),
    ],
)
def test_a_damaged_page_fails_its_own_block(
    pool: Pool, disk: Disk, damage: Callable[[Disk], None], failed: list[int], reason: str
) -> None:
    pool.run(move(False, [1, 2, 3], [7, 8, 9]))
    before = pool.block(1)
    damage(disk)
    answer = pool.run(move(True, [4, 5, 6], [7, 8, 9]))
    assert answer.failed == failed and f"page 8 for block 5: {reason}" in answer.reason
    assert pool.block(4) == before
    assert pool.run(move(False, [1, 2, 3], [7, 8, 9])).failed == ([1, 2] if damage is truncate else [])


def test_another_key_or_generation_fails(pool: Pool, disk: Disk) -> None:
    pool.run(move(False, [1, 2], [7, 8]))
    keys = (7).to_bytes(KEY_BYTES, "big") + (1).to_bytes(KEY_BYTES, "big")
    assert pool.run(move(True, [3, 4], [7, 8], keys=keys)).failed == [1]
    assert pool.run(move(True, [3, 4], [7, 8], generations=np.array([1, 8]))).failed == [0]


def test_a_file_serves_only_the_layout_that_wrote_it(pool: Pool, disk: Disk) -> None:
    pool.run(move(False, [1], [7]))
    other = Pool(LLAMA, load_native(), meaning=["rank 1"])
    message = msgspec.structs.replace(disk.message, read_contents=True)
    assert len(other.contents(message).page_ids) == 0
    assert "another layout" in other.run(move(True, [1], [7])).reason
    other.mover.close()


@pytest.mark.parametrize(("key_bytes", "forgotten", "found"), [(KEY_BYTES, 8, [9]), (KEY_BYTES, 9, []), (35, 0, [])])
def test_forgotten_pages_and_keys_of_another_length_are_left_out(
    pool: Pool, disk: Disk, key_bytes: int, forgotten: int, found: list[int]
) -> None:
    pool.run(move(False, [1, 2, 3], [9, 8, 7]))
    pool.mover.begin_worker_epoch()
    changed = {"read_contents": True, "key_bytes": key_bytes, "forgotten": forgotten}
    assert pool.contents(msgspec.structs.replace(disk.message, **changed)).page_ids.tolist() == found


def missing(path: Path) -> str:
    path.unlink()
    return "No such file"


def short(path: Path) -> str:
    os.truncate(path, 5000)
    return "has 5000 bytes instead of"


def folder(path: Path) -> str:
    path.unlink()
    path.mkdir()
    return "Is a directory"


def pipe(path: Path) -> str:
    path.unlink()
    os.mkfifo(path)
    return "is not a file"


@pytest.mark.parametrize("broken", [missing, short, folder, pipe])
def test_a_file_that_cannot_be_used_fails_every_transfer(tmp_path: Path, broken: Callable[[Path], str]) -> None:
    pool = Pool(SMALL, load_native())
    disk = disk_pages(tmp_path / "pages", DISK, pool.mover.page_bytes, read_contents=True)
    reason = broken(disk.path)
    answer = pool.contents(disk.message)
    assert (len(answer.page_ids), len(answer.generations), answer.keys) == (0, 0, b"") and reason in answer.reason
    for is_load in (False, True):
        moved = pool.run(move(is_load, [1, 2], [3, 4]))
        assert moved.failed == [0, 1] and reason in moved.reason
    pool.mover.close()


def test_a_file_that_cannot_be_written_is_still_read(tmp_path: Path) -> None:
    """A sealed file of memory."""
    pool = Pool(SMALL, load_native())
    fd = os.memfd_create("pages", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, DISK * pool.mover.page_bytes)
    message = DiskPages(f"/proc/self/fd/{fd}", 0, DISK, pool.mover.page_bytes, False, KEY_BYTES)
    pool.mover.open(message)
    assert pool.run(move(False, [1], [1])).failed == []
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    answer = pool.run(move(False, [1, 2], [2, 1]))
    reason = f"page 2 for block 1: Operation not permitted (errno 1) in {message.path}"
    assert (answer.failed, answer.reason) == ([0, 1], reason)
    assert pool.run(move(True, [5], [1])).failed == [] and pool.block(5) == pool.block(1)
    pool.mover.close()
    os.close(fd)


def test_a_file_system_without_direct_reads_is_used_through_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_flags = fcntl.fcntl

    def refuse(fd: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return set_flags(fd, command, argument)

    path = tmp_path / "pages"
    path.write_bytes(bytes(8192))
    for supported in (True, False):
        fd, direct = open_pages(str(path), 8192)
        assert direct == bool(set_flags(fd, fcntl.F_GETFL) & os.O_DIRECT) and direct <= supported
        os.close(fd)
        monkeypatch.setattr(fcntl, "fcntl", refuse)
    pool = Pool(SMALL, load_native())
    pool.mover.open(disk_pages(tmp_path / "more", DISK, pool.mover.page_bytes).message)
    assert pool.run(move(False, [1], [1])).failed == [] and pool.run(move(True, [2], [1])).failed == []
    assert pool.block(2) == pool.block(1)
    pool.mover.close()


def test_a_full_disk_fails_the_pages_that_it_has_no_room_for(pool: Pool, disk: Disk) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * disk.message.page_bytes + 4096, limits[1]))
    try:
        answer = pool.run(move(False, [1, 2, 3], [7, 8, 9]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert answer.failed == [1, 2] and "page 8 for block 2: File too large (errno 27)" in answer.reason
    assert pool.run(move(True, [4, 5, 6], [7, 8, 9])).failed == [1, 2]


def test_demotions_check_their_source(tmp_path: Path, pool: Pool) -> None:
    size = pool.mover.page_bytes
    disk = disk_pages(tmp_path / "pages", DISK, size, first_page=HOST)
    with host_memory(HOST, size) as memory:
        pool.mover.map(memory.message)
        pool.mover.open(disk.message)
        pool.run(move(False, [1, 2, 3, 4], [1, 2, 3, 5]))
        memory.data(2)[700] ^= 1
        os.ftruncate(memory.fd, 5 * size)
        answer = pool.run(demote([1, 2, 3, 5], [7, 8, 9, 10], generations=np.array([1, 2, 4, 5])))
        assert answer.failed == [1, 2, 3] and answer.reason == "page 8 for page 2: tag does not match the bytes"
        assert disk.page(7) == memory.pages[1].tobytes() and not any(disk.page(9) + disk.page(10))
        pool.mover.close()


def test_demotions_without_host_memory_fail(tmp_path: Path, pool: Pool) -> None:
    with host_memory(HOST - 1, pool.mover.page_bytes) as memory:
        pool.mover.map(msgspec.structs.replace(memory.message, num_pages=HOST))
    pool.mover.open(disk_pages(tmp_path / "pages", DISK, pool.mover.page_bytes, first_page=HOST).message)
    answer = pool.run(demote([1, 2], [7, 8]))
    assert answer.failed == [0, 1] and "instead of" in answer.reason


@pytest.mark.parametrize(
    "message",
    [
        move(False, [1], [HOST]),
        move(False, [1], [HOST + DISK]),
        move(True, [0], [7]),
        move(False, [1, 2], [1, 7]),
        demote([0], [7]),
        demote([HOST], [7]),
        demote([1], [2]),
    ],
)
def test_wrong_messages_are_refused(tmp_path: Path, pool: Pool, message: MoveBlocks) -> None:
    with host_memory(HOST, pool.mover.page_bytes) as memory:
        pool.mover.map(memory.message)
        pool.mover.open(disk_pages(tmp_path / "pages", DISK, pool.mover.page_bytes, first_page=HOST).message)
        with pytest.raises(StepRefused, match="MoveBlocks 1"):
            pool.mover.submit(message)
        pool.mover.close()


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"page_bytes": 4096}, "a page of this worker has"),
        ({"num_pages": 1}, "at least 2"),
        ({"first_page": HOST - 1}, f"from page {HOST - 1} on"),
        ({"key_bytes": 197}, "keys of 197 bytes"),
        ({}, "second time"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, pool: Pool, changed: dict[str, Any], match: str) -> None:
    with host_memory(HOST, pool.mover.page_bytes) as memory:
        pool.mover.map(memory.message)
        message = disk_pages(tmp_path / "pages", DISK, pool.mover.page_bytes, first_page=HOST).message
        if not changed:
            pool.mover.open(message)
        with pytest.raises(StepRefused, match=match):
            pool.mover.open(msgspec.structs.replace(message, **changed))
        with pytest.raises(StepRefused, match="after DiskPages") if not changed else pytest.raises(StepRefused):
            pool.mover.map(memory.message)
        pool.mover.close()


def test_a_doubled_message_is_done_twice(pool: Pool, disk: Disk) -> None:
    for message in (move(False, [1, 2], [7, 8]), move(True, [3, 4], [7, 8], 2)):
        for _ in range(2):
            pool.mover.submit(message)
        assert [(moved.transfer, moved.failed) for moved in pool.answers(2)] == [(message.transfer, [])] * 2
    assert (pool.block(3), pool.block(4)) == (pool.block(1), pool.block(2))


class Gate:
    """Stops the threads of the disk before each call until the test lets them continue; notes what they do."""

    def __init__(self, pool: Pool) -> None:
        assert isinstance(pool.mover._disk, DiskFile)
        self.done: list[str] = []
        self.arrived, self.opened = threading.Semaphore(0), threading.Semaphore(0)
        self._file = pool.mover._disk._opened()
        self._move, self._file.move = self._file.move, self  # type: ignore[method-assign,assignment]

    def __call__(self, work: Any, *arguments: Any, **flags: Any) -> None:
        self.done.append(work.kind.name)
        self.arrived.release()
        assert self.opened.acquire(timeout=30)
        self._move(work, *arguments, **flags)


def test_loads_overtake_queued_writes_and_the_rest_of_running_ones(pool: Pool, disk: Disk) -> None:
    pool.run(move(False, [1], [9]))
    gate = Gate(pool)
    pool.mover.submit(move(False, [1, 2], [7, 8], 1))
    assert gate.arrived.acquire(timeout=30)
    pool.mover.submit(move(True, [5], [9], 3))
    pool.mover.submit(move(True, [6], [9], 4))
    pool.mover.submit(move(False, [4], [10], 2))
    gate.opened.release(30)
    answers = pool.answers(4)
    assert [moved.failed for moved in answers] == [[]] * 4 and {moved.transfer for moved in answers[:2]} == {3, 4}
    assert pool.block(5) == pool.block(6) == pool.block(1)
    assert disk.page(7)[256:] != disk.page(8)[256:]


def test_all_writers_continue_after_a_load(pool: Pool, disk: Disk) -> None:
    pool.run(move(False, [1], [9]))
    assert isinstance(pool.mover._disk, DiskFile)
    file, opened, together = pool.mover._disk._opened(), threading.Event(), threading.Barrier(WRITERS)
    plain = file.move

    def gated(work: Any, *arguments: Any, **flags: Any) -> None:
        assert opened.wait(30) if work.kind is FileMove.LOAD else together.wait(30) >= 0
        plain(work, *arguments, **flags)

    file.move = gated  # type: ignore[method-assign]
    pool.mover.submit(move(True, [4], [9], 1))
    pool.mover.submit(move(False, [1, 2, 3], [7, 8, 10], 2))
    opened.set()
    assert [(moved.transfer, moved.failed) for moved in pool.answers(2)] == [(1, []), (2, [])]


def test_a_new_epoch_waits_for_pages_in_flight_and_drops_the_rest(pool: Pool, disk: Disk) -> None:
    gate = Gate(pool)
    pool.mover.submit(move(False, [1, 2, 3], [7, 8, 9], 1))
    pool.mover.submit(move(True, [4], [7], 2))
    for _ in range(2):
        assert gate.arrived.acquire(timeout=30)
    began = threading.Thread(target=pool.mover.begin_worker_epoch)
    began.start()
    began.join(0.05)
    assert began.is_alive()
    gate.opened.release(30)
    began.join(30)
    assert not began.is_alive() and pool.mover.take_answers() == []
    assert not any(thread.name == "disk" for thread in threading.enumerate())
    with pytest.raises(StepRefused, match="before"):
        pool.mover.submit(move(False, [1], [7]))
    pool.mover.open(disk.message)
    assert pool.run(move(False, [1], [7], 1)).failed == []


class HungDisk:
    """Stops reads, writes and opening of the file of pages in the middle, until ``answer``; then they continue."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.arrived, self._opened = threading.Semaphore(0), threading.Event()
        monkeypatch.setattr(disk_tier, "CLOSE_S", 0.05)
        self._monkeypatch = monkeypatch

    def hang(self, owner: Any, name: str) -> None:
        plain = getattr(owner, name)

        def hung(*given: Any) -> Any:
            if threading.current_thread().name == "disk" and not self._opened.is_set():
                self.arrived.release()
                assert self._opened.wait(30)
            return plain(*given)

        self._monkeypatch.setattr(owner, name, hung)

    def answer(self) -> None:
        """Answer, and wait for the threads of the disk."""
        self._opened.set()
        for thread in threading.enumerate():
            if thread.name == "disk":
                thread.join(30)
                assert not thread.is_alive()


@pytest.mark.parametrize("hung", ["preadv", "pwritev", "open_pages"])
def test_a_new_epoch_leaves_a_disk_behind_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, hung: str
) -> None:
    """What it answers later changes neither blocks nor the next file. NumPy, because its reads can be stopped."""
    pool, disk = Pool(LLAMA, None), HungDisk(monkeypatch)
    size = pool.mover.page_bytes
    first = disk_pages(tmp_path / "pages", DISK, size, first_page=HOST)
    with host_memory(HOST, size) as memory:
        pool.mover.map(memory.message)
        pool.mover.open(first.message)
        if hung != "open_pages":
            assert pool.run(move(False, [1, 2], [9, 10])).failed == []
        assert pool.run(move(False, [1, 2], [1, 2])).failed == []
        disk.hang(*((disk_tier, hung) if hung == "open_pages" else (os, hung)))
        for number, message in enumerate((move(False, [3], [7]), demote([1], [8]), move(True, [4, 5], [9, 10]))):
            if (hung, message.is_load) not in (("preadv", False), ("pwritev", True)):
                pool.mover.submit(msgspec.structs.replace(message, transfer=number))
        for _ in range(1 if hung == "open_pages" else 2):
            assert disk.arrived.acquire(timeout=30)
        pool.mover.begin_worker_epoch()
        assert "the disk does not answer" in caplog.text and pool.mover.take_answers() == []
    second = disk_pages(tmp_path / "second", DISK, size)
    pool.mover.open(second.message)
    written, unchanged = second.path.read_bytes(), [pool.block(block) for block in range(6)]
    disk.answer()
    assert second.path.read_bytes() == written and [pool.block(block) for block in range(6)] == unchanged
    assert pool.mover.take_answers() == []
    assert pool.run(move(False, [1], [1])).failed == [] and pool.run(move(True, [2], [1])).failed == []
    pool.mover.close()


def test_an_error_of_a_copy_is_an_answer(pool: Pool, disk: Disk) -> None:
    def broken(*_: object, **__: object) -> None:
        raise MemoryError("no\nmemory")

    assert isinstance(pool.mover._disk, DiskFile)
    pool.mover._disk._opened().move = broken  # type: ignore[method-assign]
    answer = pool.run(move(True, [1, 2], [7, 8]))
    assert answer.failed == [0, 1] and answer.reason == "MemoryError: no memory"


def test_an_error_of_the_scan_is_an_answer(tmp_path: Path, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise MemoryError("no memory")

    monkeypatch.setattr(PageFile, "scan", broken)
    disk = disk_pages(tmp_path / "pages", DISK, pool.mover.page_bytes, first_page=HOST, read_contents=True)
    contents = pool.contents(disk.message)
    assert contents.reason == "cannot read the headers: MemoryError: no memory" and not len(contents.page_ids)


def test_no_thread_without_work(pool: Pool, disk: Disk) -> None:
    assert not any(thread.name == "disk" for thread in threading.enumerate())
