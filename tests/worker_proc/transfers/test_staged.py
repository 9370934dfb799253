"""Transfers through staging memory, as on a GPU: the pages are those of a CPU, and steps come first."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from host_pages import GEMMA, LAYOUTS, LLAMA, SMALL, Memory, Pool, demote, disk_pages, host_memory, move
from hypothesis import given, settings
from hypothesis import strategies as st
from staged_pool import StagedPool
from tiers import thinned

from quire.kernels.cpu.native.library import load_native
from quire.kernels.cpu.pages.page_file import PageFile
from quire.protocol.model.kv_layout import KVGroup, KVLayout
from quire.protocol.wire.transfer_messages import MoveBlocks
from quire.worker_proc.batch.input_batch import StepRefused
from quire.worker_proc.transfers import disk as disk_tier
from quire.worker_proc.transfers import staging
from quire.worker_proc.transfers.staging import Staging

NUM_PAGES = 40
NUM_BLOCKS = 20
UNEQUAL = KVLayout(
    [
        KVGroup("full_attention", 4, [0, 1], num_kv_heads=1, head_dim=24),
        KVGroup("sliding_window", 4, [2], window=6, num_kv_heads=1, head_dim=5),
        KVGroup("sliding_window", 4, [3], window=6, num_kv_heads=1, head_dim=45),
    ],
    1,
    8,
    "bfloat16",
)
"""Groups whose blocks have 768, 80 and 720 bytes."""


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most messages are copied in several pieces."""
    monkeypatch.setattr(staging, "BUFFER_BYTES", 1600)


@pytest.fixture
def pool() -> Iterator[StagedPool]:
    pool = StagedPool(SMALL, load_native(), NUM_BLOCKS)
    yield pool
    pool.device.end_steps()
    pool.mover.close()


@pytest.fixture
def memory(pool: StagedPool) -> Iterator[Memory]:
    with host_memory(NUM_PAGES, pool.mover.page_bytes) as memory:
        pool.mover.map(memory.message)
        yield memory


@pytest.mark.parametrize("kinds", [(StagedPool, StagedPool), (StagedPool, Pool), (Pool, StagedPool)], ids=str)
@pytest.mark.parametrize("layout", thinned([*LAYOUTS.values(), UNEQUAL], keep=3))
@settings(max_examples=4)
@given(data=st.data())
def test_pages_are_those_of_a_cpu(layout: KVLayout, kinds: tuple[type[Pool], type[Pool]], data: st.DataObject) -> None:
    """What one kind of mover stores, another one loads."""
    writer, reader = (kind(layout, load_native(), NUM_BLOCKS) for kind in kinds)
    blocks = data.draw(st.lists(st.integers(1, NUM_BLOCKS - 1), min_size=1, unique=True))
    pages = data.draw(st.permutations(range(1, NUM_PAGES)))[: len(blocks)]
    targets = data.draw(st.permutations(range(1, NUM_BLOCKS)))[: len(blocks)]
    of = data.draw(st.lists(st.integers(0, len(layout.groups) - 1), min_size=len(blocks), max_size=len(blocks)))
    groups = np.array(of, np.int32)
    with host_memory(NUM_PAGES, writer.mover.page_bytes) as memory:
        for pool in (writer, reader):
            pool.mover.map(memory.message)
        before = [writer.block(block, group) for block, group in zip(blocks, of, strict=True)]
        assert writer.run(move(False, blocks, pages, 7, groups=groups)).failed == []
        assert [writer.block(block, group) for block, group in zip(blocks, of, strict=True)] == before
        reader.fill(1)
        others = [block for block in range(NUM_BLOCKS) if block not in targets]
        unchanged = [reader.block(block) for block in others]
        answer = reader.run(move(True, targets, pages, 8, groups=groups))
        assert (answer.failed, answer.reason) == ([], "") and answer.seconds > 0
        assert [reader.block(block, group) for block, group in zip(targets, of, strict=True)] == before
        assert [reader.block(block) for block in others] == unchanged
        for pool in (writer, reader):
            pool.mover.close()


@pytest.mark.parametrize("layout", [SMALL, GEMMA, UNEQUAL, LLAMA], ids=["small", "gemma", "unequal", "llama"])
@pytest.mark.parametrize("num_bytes", [1, 1600, 5000])
def test_slots_of_different_buffers_do_not_overlap(
    monkeypatch: pytest.MonkeyPatch, layout: KVLayout, num_bytes: int
) -> None:
    monkeypatch.setattr(staging, "BUFFER_BYTES", num_bytes)
    pool = StagedPool(layout, None)
    made, used = Staging(pool.device, 4), set[int]()
    for buffer in range(4):
        own: set[int] = set()
        for group, size in enumerate(pool.device.block_bytes):
            slots = made.slots(buffer, group)
            assert slots.start > 0 and len(slots) * size <= made.buffer_bytes
            assert len(slots) >= max(1, made.buffer_bytes // size - 1)
            own |= set(range(slots.start * size, slots.stop * size))
        assert not own & used
        used |= own
    assert made.num_slots >= max(made.slots(3, group).stop for group in range(len(layout.groups)))


def test_a_damaged_page_does_not_reach_the_device(pool: StagedPool, memory: Memory) -> None:
    blocks = list(range(1, 10))
    assert pool.run(move(False, blocks, blocks)).failed == []
    stored = [pool.block(block) for block in blocks]
    memory.data(6)[5] ^= 1
    memory.pages[8] = 0
    targets = list(range(10, 19))
    pool.fill(3)
    before = [pool.block(target) for target in targets]
    answer = pool.run(move(True, targets, blocks))
    assert answer.failed == [5, 7] and answer.reason == "page 6 for block 15: tag does not match the bytes"
    expected = [before[i] if i in answer.failed else stored[i] for i in range(len(blocks))]
    assert [pool.block(target) for target in targets] == expected


# ---- order


def test_a_store_reads_what_earlier_steps_have_written(pool: StagedPool, memory: Memory) -> None:
    pool.device.launch_step()
    pool.mover.submit(move(False, [1, 2], [1, 2]))
    pool.device.launch_step()
    assert pool.device.waiting.acquire(timeout=30)
    assert pool.device.events == []
    pool.fill(5)
    pool.device.end_steps()
    (answer,) = pool.answers(1)
    assert answer.failed == [] and pool.device.events == ["step 2", ("store", [1, 2])]
    assert memory.data(2)[: pool.groups[0].num_bytes].tobytes() == pool.block(2)


def test_a_load_writes_blocks_after_the_steps_that_may_use_them(pool: StagedPool, memory: Memory) -> None:
    pool.run(move(False, [1], [1]))
    pool.device.events.clear()
    pool.device.launch_step()
    pool.mover.submit(move(True, [5], [1]))
    assert pool.device.waiting.acquire(timeout=30)
    before = pool.block(5)
    assert pool.device.events == [] and before != pool.block(1)
    pool.device.end_steps()
    pool.answers(1)
    assert pool.device.events == ["step 1", ("load", [5])]
    assert pool.block(5) == pool.block(1)


def test_a_transfer_waits_only_for_earlier_steps(pool: StagedPool, memory: Memory) -> None:
    pool.mover.submit(move(False, [1], [1], 1))
    pool.device.launch_step()
    assert [answer.transfer for answer in pool.answers(1)] == [1]
    pool.mover.submit(move(False, [2], [2], 2))
    assert pool.device.waiting.acquire(timeout=30)
    assert pool.mover.take_answers() == []


def test_a_store_that_waits_for_a_step_does_not_delay_a_load(pool: StagedPool, memory: Memory) -> None:
    pool.run(move(False, [1], [1]))
    held = pool.device.steps
    pool.device.launch_step()
    pool.mover.submit(move(False, [2], [2], 2))
    pool.device.steps = lambda: lambda: None  # type: ignore[method-assign]
    pool.mover.submit(move(True, [5], [1], 3))
    assert [answer.transfer for answer in pool.answers(1)] == [3]
    pool.device.steps = held  # type: ignore[method-assign]
    pool.device.end_steps()
    assert [answer.transfer for answer in pool.answers(1)] == [2]


@pytest.mark.parametrize("is_load", [False, True])
def test_a_buffer_is_not_used_again_before_its_copy_has_ended(
    pool: StagedPool, memory: Memory, is_load: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The inner mover is late by a piece: it copies one when it gets the next."""
    pool.run(move(False, list(range(1, 20)), list(range(1, 20))))
    mover, started, flying = pool.mover, threading.Semaphore(0), list[set[int]]()
    inner = mover._inner.submit  # type: ignore[attr-defined]

    def submit(message: MoveBlocks) -> None:
        slots = set(message.block_ids.tolist())
        assert all(not slots & other for other in flying)
        flying.append(slots)
        started.release()
        late.append(message)
        if len(late) == 2:
            finish()

    def finish() -> None:
        message = late.pop(0)
        flying.remove(set(message.block_ids.tolist()))
        inner(message)

    late: list[MoveBlocks] = []
    monkeypatch.setattr(mover._inner, "submit", submit)  # type: ignore[attr-defined]
    mover.submit(move(is_load, list(range(1, 20)), list(range(1, 20))))
    for _ in range(7):
        assert started.acquire(timeout=30)
    while late:
        finish()
    (answer,) = pool.answers(1)
    assert answer.failed == [] and answer.reason == ""


# ---- faults


@pytest.mark.parametrize("is_load", [False, True])
def test_an_error_of_the_device_is_an_answer(pool: StagedPool, memory: Memory, is_load: bool) -> None:
    pool.run(move(False, [1, 2], [1, 2]))
    pool.device.error = RuntimeError("CUDA error:\nno more")
    answer = pool.run(move(is_load, [3, 4], [1, 2]))
    assert answer.failed == [0, 1] and answer.reason == "RuntimeError: CUDA error: no more"
    pool.device.error = None
    assert pool.run(move(is_load, [3, 4], [1, 2])).failed == []


def test_memory_that_cannot_be_mapped_fails_every_transfer(pool: StagedPool) -> None:
    with host_memory(3, pool.mover.page_bytes) as memory:
        path = "/proc/self/fd/99999"
        pool.mover.map(type(memory.message)(path, 4, pool.mover.page_bytes))
        answer = pool.run(move(False, [1, 2], [1, 2]))
        assert answer.failed == [0, 1] and path in answer.reason


@pytest.mark.parametrize(
    "message", [move(False, [0], [1]), move(True, [NUM_BLOCKS], [1]), move(True, [1], [NUM_PAGES]), demote([1], [2])]
)
def test_ids_out_of_range_are_refused(pool: StagedPool, memory: Memory, message: MoveBlocks) -> None:
    with pytest.raises(StepRefused):
        pool.mover.submit(message)
    assert pool.run(move(False, [NUM_BLOCKS - 1], [1])).failed == []


@pytest.mark.parametrize("is_load", [False, True])
def test_a_new_epoch_drops_transfers_and_waits_for_the_running_one(
    pool: StagedPool, memory: Memory, is_load: bool
) -> None:
    pool.run(move(False, list(range(1, 20)), list(range(1, 20))))
    pool.device.events.clear()
    pool.device.launch_step()
    for transfer in range(3):
        pool.mover.submit(move(is_load, list(range(1, 20)), list(range(1, 20)), transfer))
    assert pool.device.waiting.acquire(timeout=30)
    began = threading.Thread(target=pool.mover.begin_worker_epoch)
    began.start()
    began.join(0.05)
    assert began.is_alive()
    pool.device.end_steps()
    began.join(30)
    assert not began.is_alive() and len(pool.device.events) <= 2 + staging.BUFFERS
    assert pool.mover.take_answers() == []
    with pytest.raises(StepRefused, match="before HostPages"):
        pool.mover.submit(move(False, [1], [1]))
    with host_memory(3, pool.mover.page_bytes) as new:
        pool.mover.map(new.message)
        assert pool.run(move(False, [1], [1], 1)).failed == []
        pool.mover.begin_worker_epoch()
    assert not any(thread.name == "device mover" for thread in threading.enumerate())


# ---- disk


@pytest.fixture
def on_disk() -> Iterator[StagedPool]:
    pool = StagedPool(LLAMA, load_native(), NUM_BLOCKS, with_disk=True)
    yield pool
    pool.mover.close()


def test_pages_on_disk(on_disk: StagedPool, tmp_path: Path) -> None:
    """Stores, demotions, and a load from host memory and disk, of which one page is bad."""
    pool = on_disk
    with host_memory(8, pool.mover.page_bytes) as memory:
        pool.mover.map(memory.message)
        disk = disk_pages(tmp_path / "pages", 8, pool.mover.page_bytes, first_page=8, read_contents=True)
        assert len(pool.contents(disk.message).page_ids) == 0
        stored = [pool.block(block) for block in (1, 2, 3, 4)]
        assert pool.run(move(False, [1, 2], [9, 10], 1)).failed == []
        assert pool.run(move(False, [3, 4], [3, 4], 2)).failed == []
        assert pool.run(demote([3], [11], 3)).failed == []
        disk.overwrite(10, 1000, b"other")
        pool.fill(1)
        before = pool.block(6)
        keys = b"".join(move(False, [1], [page]).keys for page in (9, 10, 3, 4))
        generations = np.array([9, 10, 3, 4])
        answer = pool.run(move(True, [5, 6, 7, 8], [9, 10, 11, 4], 4, keys=keys, generations=generations))
        assert answer.failed == [1] and "page 10 for block 6: tag" in answer.reason
        assert 0 < answer.disk_seconds <= answer.seconds
        assert [pool.block(block) for block in (5, 6, 7, 8)] == [stored[0], before, *stored[2:]]
        pool.mover.begin_worker_epoch()
        contents = pool.contents(disk_pages(tmp_path / "pages", 8, pool.mover.page_bytes, read_contents=True).message)
        assert contents.page_ids.tolist() == [1, 2, 3]


def test_no_kind_of_transfer_delays_another(
    on_disk: StagedPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The inner mover answers in the reverse order of the messages; all of them use different slots."""
    mover, arrived, held = on_disk.mover, threading.Semaphore(0), list[MoveBlocks]()
    inner = mover._inner.submit  # type: ignore[attr-defined]

    def hold(message: MoveBlocks) -> None:
        held.append(message)
        arrived.release()

    with host_memory(8, mover.page_bytes) as memory:
        mover.map(memory.message)
        mover.open(disk_pages(tmp_path / "pages", 8, mover.page_bytes, first_page=8).message)
        for page in (1, 9):
            on_disk.run(move(False, [1], [page]))
        monkeypatch.setattr(mover._inner, "submit", hold)  # type: ignore[attr-defined]
        messages = [move(True, [2], [9]), move(False, [3], [10]), move(True, [4], [1]), move(False, [5], [2])]
        try:
            for transfer, message in enumerate(messages):
                mover.submit(msgspec.structs.replace(message, transfer=transfer))
                assert arrived.acquire(timeout=30)
            assert len({slot for message in held for slot in message.block_ids.tolist()}) == 4
            for transfer in (3, 2, 1, 0):
                inner(held.pop())
                assert [(answer.transfer, answer.failed) for answer in on_disk.answers(1)] == [(transfer, [])]
        finally:
            monkeypatch.undo()
            while held:
                inner(held.pop())


@pytest.mark.parametrize("is_load", [True, False])
def test_a_new_epoch_does_not_wait_for_a_disk_that_does_not_answer(
    on_disk: StagedPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_load: bool
) -> None:
    pool, arrived, opened = on_disk, threading.Semaphore(0), threading.Event()
    pool.mover.open(disk_pages(tmp_path / "pages", 8, pool.mover.page_bytes).message)
    assert pool.run(move(False, [1, 2], [1, 2], 1)).failed == []
    plain = PageFile.move

    def hung(*given: Any, **more: Any) -> None:
        arrived.release()
        assert opened.wait(30)
        plain(*given, **more)

    monkeypatch.setattr(PageFile, "move", hung)
    monkeypatch.setattr(disk_tier, "CLOSE_S", 0.05)
    pool.mover.submit(move(is_load, [3, 4], [1, 2], 2))
    assert arrived.acquire(timeout=30)
    before = [pool.block(block) for block in (3, 4)]
    pool.mover.begin_worker_epoch()
    assert not any(thread.name == "device mover" for thread in threading.enumerate())
    opened.set()
    pool.mover.open(disk_pages(tmp_path / "next", 8, pool.mover.page_bytes).message)
    assert pool.run(move(False, [3, 4], [1, 2], 3)).failed == []
    assert pool.run(move(True, [5, 6], [1, 2], 4)).failed == []
    assert [pool.block(block) for block in (3, 4)] == [pool.block(block) for block in (5, 6)] == before


def test_a_file_that_cannot_be_opened_fails_its_transfers(on_disk: StagedPool, tmp_path: Path) -> None:
    disk = disk_pages(tmp_path / "pages", 8, on_disk.mover.page_bytes, first_page=8)
    disk.path.unlink()
    on_disk.mover.open(disk.message)
    answer = on_disk.run(move(False, [1], [9]))
    assert answer.failed == [0] and "cannot open" in answer.reason


def test_the_callable_of_a_wait_is_made_in_the_thread_of_the_steps(pool: StagedPool, memory: Memory) -> None:
    """On a GPU it is an event of the stream of that thread."""
    threads: list[threading.Thread] = []
    steps: Callable[[], Callable[[], None]] = pool.device.steps

    def noted() -> Callable[[], None]:
        threads.append(threading.current_thread())
        return steps()

    pool.device.steps = noted  # type: ignore[method-assign]
    pool.run(move(False, [1], [1]))
    pool.run(move(True, [2], [1]))
    assert threads == [threading.current_thread()] * 2
