"""Transfers of KV blocks by a worker's mover: to and from disk beside plain reads and writes, and loads beside stores.

The file is a temporary one: ``TMPDIR`` selects the disk.
"""

import mmap
import os
import select
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Thread

import numpy as np

from quire.bench.worker.record import Bench
from quire.kernels.cpu.native.library import load_native
from quire.protocol.model.kv_layout import KVLayout
from quire.protocol.wire.arrays import Int32
from quire.protocol.wire.transfer_messages import BlocksMoved, DiskPages, HostPages, MoveBlocks, MoveKind
from quire.worker_proc.attention.cpu import CpuBackend
from quire.worker_proc.batch.kv_cache import allocate_kv_caches
from quire.worker_proc.device.step_watcher import StepWatcher
from quire.worker_proc.transfers.disk import THREADS, WRITERS, open_pages
from quire.worker_proc.transfers.mover import BlockMover
from quire.worker_proc.transfers.pages import block_groups

KEY_BYTES = 32
PART = 64
"""Blocks of one transfer."""
LOAD_PART = 16
STORES = 3
"""Stores of PART blocks that are queued while the time of loads is measured."""


class _Transfers:
    """A mover with host memory and a file, and its transfers, of which the caller waits for the last."""

    def __init__(self, bench: Bench, layout: KVLayout, most: int, memory: int, path: Path) -> None:
        self._count = 1 + most
        caches = allocate_kv_caches(layout, self._count, CpuBackend(), bench.device)
        groups = block_groups(layout, caches, self._count, ())
        for span in groups[0].spans:
            span[:] = 1
        self._watcher = StepWatcher()
        self.mover = BlockMover(load_native(), groups, self._count, self._watcher.wake)
        self.page_bytes = self.mover.page_bytes
        os.ftruncate(memory, self._count * self.page_bytes)
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, self._count * self.page_bytes)
        self.mover.map(HostPages(f"/proc/{os.getpid()}/fd/{memory}", self._count, self.page_bytes))
        self.mover.open(DiskPages(str(path), self._count, self._count, self.page_bytes, False, KEY_BYTES))
        self.ids = 1 + np.random.default_rng(0).permutation(most).astype(np.int32)

    def submit(self, kind: MoveKind, ids: Int32, *, disk: bool, transfer: int = 0) -> None:
        """Queue a transfer between blocks and pages of the same numbers."""
        pages = ids + np.int32(self._count) if disk else ids
        keys = bytes(KEY_BYTES * len(ids))
        self.mover.submit(MoveBlocks(transfer, kind, ids, pages, ids.astype(np.int64), keys))

    def answers(self) -> list[BlocksMoved]:
        """Wait for answers."""
        select.select([self._watcher.fileno()], [], [])
        self._watcher.fired()
        found = [answer for answer in self.mover.take_answers() if isinstance(answer, BlocksMoved)]
        if any(answer.failed for answer in found):
            raise RuntimeError(found[0].reason)
        return found

    def move_all(self, kind: MoveKind, *, disk: bool) -> None:
        parts = range(0, len(self.ids), PART)
        for start in parts:
            self.submit(kind, self.ids[start : start + PART], disk=disk)
        self.wait(len(parts))

    def wait(self, count: int) -> None:
        while count:
            count -= len(self.answers())

    def load_seconds(self, number: int, *, disk: bool, beside_stores: bool) -> list[float]:
        """Return the times of ``number`` loads, one after the other."""
        half, queued = len(self.ids) // 2, 0
        times: list[float] = []
        for index in range(number):
            while beside_stores and queued < STORES:
                self.submit(MoveKind.STORE, self.ids[half:][:PART], disk=disk)
                queued += 1
            time.sleep(0.001 + 0.003 * np.random.default_rng(index).random())
            start = index * LOAD_PART % max(1, half - LOAD_PART)
            began = time.perf_counter()
            self.submit(MoveKind.LOAD, self.ids[start : start + LOAD_PART], disk=disk, transfer=1)
            while len(times) == index:
                for answer in self.answers():
                    if answer.transfer:
                        times.append(time.perf_counter() - began)
                    else:
                        queued -= 1
        self.wait(queued)
        return times


@contextmanager
def _transfers(bench: Bench, layout: KVLayout, most: int) -> Iterator[tuple[_Transfers, Path]]:
    memory = os.memfd_create("pages")
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        path = Path(folder) / "pages"
        made = _Transfers(bench, layout, most, memory, path)
        yield made, path
        made.mover.close()
    os.close(memory)


def transfers_of_disk(bench: Bench, layout: KVLayout, most: int) -> None:
    """Measure transfers of ``most`` blocks in random order, and the times of loads beside stores.

    Plain reads and writes are of whole pages in the same order, by as many threads, with the same descriptor flags.
    """
    with _transfers(bench, layout, most) as (made, path):
        size = made.page_bytes
        fd, direct = open_pages(str(path), (1 + most) * size)
        for disk in (False, True):
            made.move_all(MoveKind.STORE, disk=disk)
        calls = {
            "quire, load": partial(made.move_all, MoveKind.LOAD, disk=True),
            "plain read": partial(_plain, fd, made.ids, size, write=False),
            "plain write": partial(_plain, fd, made.ids, size, write=True),
            "quire, store": partial(made.move_all, MoveKind.STORE, disk=True),
            "quire, demote": partial(made.move_all, MoveKind.DEMOTE, disk=True),
        }
        bench.require_time()
        times = dict(zip(calls, bench.clock.alternating(list(calls.values())), strict=True))
        case = f"disk, {'direct' if direct else 'cached'}, {size} bytes"
        for name, seconds in times.items():
            plain = times["plain read" if name in ("quire, load", "plain read") else "plain write"]
            bench.note(case, name, seconds / most, gb_per_s=most * size / seconds / 1e9, of_plain=plain / seconds)
        os.close(fd)
        number = bench.pick(full=100, quick=50, dry=2)
        for disk, name in ((False, "host memory"), (True, "disk")):
            bench.require_time()
            waits: dict[bool, list[float]] = {False: [], True: []}
            for beside in (False, True) * bench.pick(full=4, quick=2, dry=1):
                waits[beside] += made.load_seconds(number, disk=disk, beside_stores=beside)
            alone, beside_stores = (float(np.percentile(waits[beside], 99)) for beside in (False, True))
            case = f"loads of {LOAD_PART} blocks, {name}, p99"
            bench.note(case, "alone", alone)
            bench.note(case, "beside stores", beside_stores, of_alone=beside_stores / alone)


def _plain(fd: int, ids: Int32, size: int, *, write: bool) -> None:
    """Read or write whole pages."""
    left = iter(ids.tolist())

    def run() -> None:
        memory = mmap.mmap(-1, size)
        memory[:] = bytes(size)
        for page in left:
            moved = os.pwritev(fd, [memory], page * size) if write else os.preadv(fd, [memory], page * size)
            assert moved == size

    threads = [Thread(target=run) for _ in range(WRITERS if write else THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
