"""Copies between the blocks of a GPU and pinned memory: calls and waits without a GPU; bytes and order on one."""

import importlib.util
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from device_moves import round_trip
from gpu_pool import GpuPool
from host_pages import LAYOUTS, SMALL, Pool, host_memory, move

from quire.kernels.cpu.native.library import load_native
from quire.protocol.model.kv_layout import KVLayout
from quire.worker_proc.attention.cpu import CpuBackend
from quire.worker_proc.batch.kv_cache import allocate_kv_caches
from quire.worker_proc.transfers.gpu import GpuBlocks
from quire.worker_proc.transfers.staging import BUFFER_BYTES

NO_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@NO_TRITON
@pytest.mark.full
def test_gpu_blocks_in_the_interpreter(side_run: str) -> None:
    assert " passed" in side_run


@NO_TRITON
def test_a_copy_is_one_launch_between_two_copies_on_a_stream_of_its_own() -> None:
    """The host waits once, in the copier's thread; ``steps`` never waits in that of the steps."""
    from counting_device import DEVICE, counting_device

    with counting_device() as device:
        caches = allocate_kv_caches(SMALL, 12, CpuBackend(native=False), DEVICE)
        blocks = GpuBlocks(SMALL, caches, 12, ())
        load, store = (blocks.copier(BUFFER_BYTES) for _ in range(2))
        lines = blocks.host_memory(3 * blocks.block_bytes[0]).view(3, -1)
        device.take()
        device.finish()
        ids = np.array([4, -1, 7])
        wait = blocks.steps()
        assert device.take() == []
        caches[0].add_(1)
        device.take()
        wait()
        assert device.take() == [], "launched after the message"
        store.store(0, ids, lines)
        load.load(0, ids, lines)
        records = device.take()
    num_bytes, launch = lines.nbytes, ("launch", "block_staging_kernel")
    assert [(record.kind, record.what) for record in records] == [
        *(("copy in", "24 bytes"), launch, ("copy out", f"{num_bytes} bytes"), ("event", "synchronize")),
        *(("copy in", f"{num_bytes} bytes"), ("copy in", "24 bytes"), launch, ("event", "synchronize")),
    ]
    streams = [record.stream for record in records if record.kind != "event"]
    assert 0 not in streams and len(set(streams[:3])) == len(set(streams[3:])) == 1 and streams[0] != streams[3]


@NO_TRITON
def test_a_transfer_waits_for_the_steps_before_it() -> None:
    from counting_device import DEVICE, counting_device

    with counting_device() as device:
        caches = allocate_kv_caches(SMALL, 12, CpuBackend(native=False), DEVICE)
        blocks = GpuBlocks(SMALL, caches, 12, ())
        caches[0].add_(1)
        wait = blocks.steps()
        device.take()
        wait()
        assert [record.kind for record in device.take()] == ["event"]


# ---- on a GPU


@pytest.fixture
def gpu() -> Iterator[torch.device]:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    yield torch.device("cuda", 0)
    torch.cuda.synchronize()


BIG = 1200
"""Blocks of a pool: most messages fill several buffers."""


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_round_trip(gpu: torch.device, layout: KVLayout) -> None:
    native = load_native()
    for count in (1, 11, BIG - 1):
        round_trip(GpuPool(layout, native, BIG), GpuPool(layout, native, BIG), count)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_pages_are_those_of_a_cpu(gpu: torch.device, layout: KVLayout) -> None:
    native = load_native()
    round_trip(GpuPool(layout, native, BIG), Pool(layout, native, BIG), 500)
    round_trip(Pool(layout, native, BIG), GpuPool(layout, native, BIG), 500)


class Steps:
    """A captured step that takes milliseconds, then counts up the bytes of some blocks of every layer, and copies
    others."""

    def __init__(self, pool: GpuPool, written: int, read: int) -> None:
        halves = [cache.view(torch.uint8).view(2, pool.num_blocks, -1) for cache in pool.on_device.values()]
        self.seen = [torch.zeros_like(half[:, read]) for half in halves]
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(self._graph):
            torch.cuda._sleep(10_000_000)
            for half, seen in zip(halves, self.seen, strict=True):
                half[:, written] += 1
                seen.copy_(half[:, read])

    def run(self, count: int) -> None:
        for _ in range(count):
            self._graph.replay()


@pytest.mark.gpu
def test_a_store_reads_what_captured_steps_have_written(gpu: torch.device) -> None:
    pool = GpuPool(SMALL, load_native())
    with host_memory(4, pool.mover.page_bytes) as memory:
        pool.mover.map(memory.message)
        steps, others = Steps(pool, written=3, read=1), Steps(pool, written=4, read=1)
        before = np.frombuffer(pool.block(3), np.uint8)
        steps.run(20)
        pool.mover.submit(move(False, [3], [2]))
        others.run(20)
        (answer,) = pool.answers(1)
        assert answer.failed == []
        assert np.array_equal(memory.data(2)[: len(before)], before + np.uint8(20))
        pool.mover.close()


@pytest.mark.gpu
def test_a_load_does_not_change_blocks_that_captured_steps_read(gpu: torch.device) -> None:
    pool = GpuPool(SMALL, load_native())
    with host_memory(4, pool.mover.page_bytes) as memory:
        pool.mover.map(memory.message)
        pool.run(move(False, [7], [2]))
        stored, before = pool.block(7), pool.block(5)
        steps = Steps(pool, written=3, read=5)
        steps.run(20)
        pool.mover.submit(move(True, [5], [2]))
        (answer,) = pool.answers(1)
        seen = b"".join(half.cpu().numpy().tobytes() for each in steps.seen for half in each)
        assert answer.failed == [] and seen == before
        steps.run(1)
        torch.cuda.synchronize()
        assert pool.block(5) == stored == b"".join(half.cpu().numpy().tobytes() for each in steps.seen for half in each)
        pool.mover.close()


@pytest.mark.gpu
def test_loads_and_stores_run_beside_steps(gpu: torch.device) -> None:
    """Blocks keep their contents through transfers in both directions while steps write another one."""
    pool = GpuPool(LAYOUTS["llama"], load_native(), BIG)
    with host_memory(BIG, pool.mover.page_bytes) as memory:
        pool.mover.map(memory.message)
        steps, blocks = Steps(pool, written=BIG - 1, read=1), list(range(1, 299))
        stored = [pool.block(block) for block in blocks]
        for turn in range(3):
            for is_load, transfer in ((False, 2 * turn), (True, 2 * turn + 1)):
                steps.run(3)
                pool.mover.submit(move(is_load, [300 * (turn + is_load) + block for block in blocks], blocks, transfer))
                steps.run(3)
                (answer,) = pool.answers(1)
                assert answer.failed == []
        assert [pool.block(900 + block) for block in blocks] == stored
        pool.mover.close()
