"""Transfers of KV blocks to host memory and back: loads equal stores, and every fault fails its own block."""

import os
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from host_pages import GEMMA, KEY_BYTES, LAYOUTS, LLAMA, SMALL, Memory, Pool, host_memory, move
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import covering

from quire.kernels.cpu.native.library import load_native
from quire.kernels.cpu.pages.page_moves import HEADER
from quire.protocol.model.kv_layout import KVLayout
from quire.protocol.wire.transfer_messages import HostPages, MoveBlocks
from quire.worker_proc.batch.input_batch import StepRefused

NUM_PAGES = 20


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool(SMALL, load_native())
    yield pool
    pool.mover.close()


@pytest.fixture
def memory(pool: Pool) -> Iterator[Memory]:
    with host_memory(NUM_PAGES, pool.mover.page_bytes) as memory:
        pool.mover.map(memory.message)
        yield memory


@pytest.mark.parametrize(("layout", "native"), covering(LAYOUTS.values(), [True, False]))
@settings(max_examples=10)
@given(data=st.data())
def test_loaded_blocks_equal_the_stored_ones(layout: KVLayout, native: bool, data: st.DataObject) -> None:
    pool = Pool(layout, load_native() if native else None)
    blocks = data.draw(st.lists(st.integers(1, 11), min_size=1, unique=True))
    pages = data.draw(st.permutations(range(1, NUM_PAGES)))[: len(blocks)]
    targets = data.draw(st.permutations(range(1, 12)))[: len(blocks)]
    of = data.draw(st.lists(st.integers(0, len(layout.groups) - 1), min_size=len(blocks), max_size=len(blocks)))
    groups = np.array(of, np.int32)
    with host_memory(NUM_PAGES, pool.mover.page_bytes) as memory:
        pool.mover.map(memory.message)
        before = [pool.block(block, group) for block, group in zip(blocks, of, strict=True)]
        assert pool.run(move(False, blocks, pages, 7, groups=groups)).failed == []
        assert [pool.block(block, group) for block, group in zip(blocks, of, strict=True)] == before
        pool.fill(1)
        others = [block for block in range(12) if block not in targets]
        unchanged = [pool.block(block) for block in others]
        answer = pool.run(move(True, targets, pages, 8, groups=groups))
        assert (answer.failed, answer.reason) == ([], "") and answer.seconds > 0
        assert [pool.block(block, group) for block, group in zip(targets, of, strict=True)] == before
        assert [pool.block(block) for block in others] == unchanged
        pool.mover.close()


def test_a_page_holds_a_block_of_every_layer_of_its_group(pool: Pool, memory: Memory) -> None:
    pool.run(move(False, [3], [5]))
    assert memory.data(5)[: pool.groups[0].num_bytes].tobytes() == pool.block(3)
    assert pool.mover.page_bytes % 4096 == 0


def flip_data(memory: Memory) -> None:
    memory.data(2)[77] ^= 4


def flip_header(memory: Memory) -> None:
    memory.pages[2, HEADER.itemsize - 20] ^= 4


def tear(memory: Memory) -> None:
    """Half of the page is from the store of another block, as when a writer died or still writes."""
    memory.pages[2, 300:] = memory.pages[3, 300:]


def clear(memory: Memory) -> None:
    memory.pages[2] = 0


def swap(memory: Memory) -> None:
    memory.pages[2] = memory.pages[1]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (flip_data, "tag does not match"),
        (tear, "tag does not match"),
        (flip_header, "another key"),
        (clear, "not a page"),
        (swap, "another generation"),
    ],
)
@pytest.mark.parametrize("native", [True, False], ids=["native", "numpy"])
def test_a_damaged_page_fails_its_own_block(native: bool, damage: Callable[[Memory], None], reason: str) -> None:
    pool = Pool(LLAMA, load_native() if native else None)
    with host_memory(NUM_PAGES, pool.mover.page_bytes) as memory:
        pool.mover.map(memory.message)
        pool.run(move(False, [1, 2, 3], [1, 2, 3]))
        stored = {page: pool.block(page) for page in (1, 3)}
        damage(memory)
        answer = pool.run(move(True, [4, 5, 6], [1, 2, 3]))
        assert answer.failed == [1] and reason in answer.reason and "page 2 for block 5" in answer.reason
        assert (pool.block(4), pool.block(6)) == (stored[1], stored[3])
        pool.mover.close()


def test_another_key_or_generation_fails(pool: Pool, memory: Memory) -> None:
    pool.run(move(False, [1, 2], [1, 2]))
    keys = (1).to_bytes(KEY_BYTES, "big") + (9).to_bytes(KEY_BYTES, "big")
    assert pool.run(move(True, [3, 4], [1, 2], keys=keys)).failed == [1]
    longer = (1).to_bytes(KEY_BYTES + 1, "big") + (2).to_bytes(KEY_BYTES + 1, "big")
    assert pool.run(move(True, [3, 4], [1, 2], keys=longer)).failed == [0, 1]
    assert pool.run(move(True, [3, 4], [1, 2], generations=np.array([0, 2]))).failed == [0]


def test_a_page_of_another_layout_or_group_fails(memory: Memory, pool: Pool) -> None:
    pool.run(move(False, [1], [1]))
    other = Pool(SMALL, load_native(), meaning=["rank 1"])
    other.mover.map(memory.message)
    answer = other.run(move(True, [2], [1]))
    assert answer.failed == [0] and "another layout" in answer.reason
    other.mover.close()
    groups = Pool(GEMMA, load_native())
    with host_memory(4, groups.mover.page_bytes) as own:
        groups.mover.map(own.message)
        groups.run(move(False, [1], [1], groups=np.array([1], np.int32)))
        assert groups.run(move(True, [2], [1], groups=np.array([2], np.int32))).failed == [0]
        groups.mover.close()


@pytest.mark.parametrize("native", [True, False], ids=["native", "numpy"])
def test_blocks_are_never_torn_while_their_page_changes(native: bool) -> None:
    """A load either fails, or the block has exactly one of the two contents that the writer alternates."""
    pool = Pool(LLAMA, load_native() if native else None)
    with host_memory(2, pool.mover.page_bytes) as memory:
        pool.mover.map(memory.message)
        contents = []
        for block in (1, 2):
            pool.run(move(False, [block], [1]))
            contents.append(memory.pages[1].copy())
        blocks = {pool.block(1), pool.block(2)}
        ending = threading.Event()

        def alternate() -> None:
            while not ending.is_set():
                for content in contents:
                    memory.pages[1] = content

        writer = threading.Thread(target=alternate)
        writer.start()
        answers = [(pool.run(move(True, [3], [1])).failed, pool.block(3)) for _ in range(100)]
        ending.set()
        writer.join()
        assert all(failed == [0] or block in blocks for failed, block in answers)
        pool.mover.close()


def test_truncated_memory_fails_the_pages_after_its_end(pool: Pool, memory: Memory) -> None:
    pool.run(move(False, [1, 2, 3], [1, 18, 19]))
    os.ftruncate(memory.fd, 18 * pool.mover.page_bytes)
    answer = pool.run(move(True, [4, 5, 6], [1, 18, 19]))
    assert answer.failed == [1, 2] and "truncated" in answer.reason
    assert pool.block(4) == pool.block(1)
    assert pool.run(move(False, [1], [19])).failed == [0]


@pytest.mark.parametrize("path", ["/proc/self/fd/99999", "/dev/null"])
def test_memory_that_cannot_be_mapped_fails_every_transfer(pool: Pool, path: str) -> None:
    pool.mover.map(HostPages(path, 4, pool.mover.page_bytes))
    answer = pool.run(move(False, [1, 2], [1, 2]))
    assert answer.failed == [0, 1] and path in answer.reason


def test_memory_of_another_size_fails_every_transfer(pool: Pool) -> None:
    with host_memory(3, pool.mover.page_bytes) as memory:
        pool.mover.map(HostPages(memory.message.path, 4, pool.mover.page_bytes))
        assert "instead of" in pool.run(move(True, [1], [1])).reason


@pytest.mark.parametrize(
    "message",
    [
        move(False, [0], [1]),
        move(False, [12], [1]),
        move(False, [1], [0]),
        move(False, [1], [NUM_PAGES]),
        move(False, [1], [-1]),
        move(False, [1], [1], groups=np.array([1], np.int32)),
        move(False, [1], [1], generations=np.array([1, 2])),
        move(False, [1], [1], groups=np.array([], np.int32)),
        move(False, [1, 2], [1, 2], keys=b"odd"),
        move(False, [1], [1], keys=b""),
        move(False, [1], [1], keys=bytes(201)),
        move(False, [], []),
    ],
)
@pytest.mark.usefixtures("memory")
def test_wrong_messages_are_refused(pool: Pool, message: MoveBlocks) -> None:
    with pytest.raises(StepRefused, match="MoveBlocks 1"):
        pool.mover.submit(message)


def test_host_pages_come_first_and_once(pool: Pool) -> None:
    with pytest.raises(StepRefused, match="before HostPages"):
        pool.mover.submit(move(False, [1], [1]))
    with pytest.raises(StepRefused, match="a page of this worker has"):
        pool.mover.map(HostPages("/dev/null", 4, 4096 + pool.mover.page_bytes))
    with host_memory(3, pool.mover.page_bytes) as memory:
        pool.mover.map(memory.message)
        with pytest.raises(StepRefused, match="second time"):
            pool.mover.map(memory.message)
        pool.mover.close()


class Gate:
    """Stops the mover's thread before each copy until the test lets it continue; notes what it copies."""

    def __init__(self, pool: Pool) -> None:
        self.copied: list[tuple[str, list[int]]] = []
        self.arrived, self.opened = threading.Semaphore(0), threading.Semaphore(0)
        self._move = pool.mover._copies.move
        pool.mover._copies.move = self  # type: ignore[method-assign]

    def __call__(self, memory: object, moves: object, *, is_load: bool, stop: object) -> object:
        self.copied.append(("load" if is_load else "store", moves.blocks.tolist()))  # type: ignore[attr-defined]
        self.arrived.release()
        assert self.opened.acquire(timeout=30)
        return self._move(memory, moves, is_load=is_load, stop=stop)  # type: ignore[arg-type]


@pytest.fixture
def gate(pool: Pool, memory: Memory) -> Gate:
    return Gate(pool)


def test_loads_overtake_queued_stores_and_the_rest_of_a_running_one(pool: Pool, gate: Gate) -> None:
    gate.opened.release()
    pool.run(move(False, [7], [9]))
    assert gate.arrived.acquire(timeout=30)
    pool.mover.submit(move(False, [1, 2, 3], [1, 2, 3], 1))
    pool.mover.submit(move(False, [4], [4], 2))
    assert gate.arrived.acquire(timeout=30)
    pool.mover.submit(move(True, [5], [9], 3))
    pool.mover.submit(move(True, [6], [9], 4))
    gate.opened.release(10)
    assert [moved.transfer for moved in pool.answers(4)] == [3, 4, 1, 2]
    assert [kind for kind, _ in gate.copied] == ["store", "store", "load", "load", "store", "store"]
    assert pool.block(5) == pool.block(6) == pool.block(7)


def test_a_new_epoch_drops_queued_transfers_and_waits_for_the_running_one(pool: Pool, gate: Gate) -> None:
    for transfer in range(1, 4):
        pool.mover.submit(move(False, [1, 2], [1, 2], transfer))
    pool.mover.submit(move(True, [3], [1], 4))
    assert gate.arrived.acquire(timeout=30)
    began = threading.Thread(target=pool.mover.begin_worker_epoch)
    began.start()
    began.join(0.05)
    assert began.is_alive()
    gate.opened.release(10)
    began.join(30)
    assert not began.is_alive() and len(gate.copied) == 1
    assert pool.mover.take_answers() == []
    with pytest.raises(StepRefused, match="before HostPages"):
        pool.mover.submit(move(False, [1], [1]))
    with host_memory(3, pool.mover.page_bytes) as memory:
        pool.mover.map(memory.message)
        assert pool.run(move(False, [1], [1], 1)).failed == []
        pool.mover.begin_worker_epoch()


def test_an_error_of_a_copy_is_an_answer(pool: Pool, memory: Memory) -> None:
    def broken(*_: object, **__: object) -> None:
        raise MemoryError("no\nmemory")

    pool.mover._copies.move = broken  # type: ignore[method-assign,assignment]
    answer = pool.run(move(False, [1, 2], [1, 2]))
    assert answer.failed == [0, 1] and answer.reason == "MemoryError: no memory"


def test_close_drops_what_is_queued(pool: Pool, gate: Gate) -> None:
    for transfer in range(3):
        pool.mover.submit(move(False, [1], [1], transfer))
    assert gate.arrived.acquire(timeout=30)
    gate.opened.release(10)
    pool.mover.close()
    assert pool.mover.take_answers() == [] and len(gate.copied) <= 3
    assert not any(thread.name == "block mover" for thread in threading.enumerate())
