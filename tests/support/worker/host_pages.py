"""Host memory and files of pages as the scheduler makes them, and a mover of made-up KV caches without a worker."""

import mmap
import os
import select
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from quire.kernels.cpu.native.library import Native
from quire.kernels.cpu.pages.page_moves import HEADER, Bytes
from quire.protocol.model.kv_layout import KVGroup, KVLayout
from quire.protocol.wire.transfer_messages import BlocksMoved, DiskContents, DiskPages, HostPages, MoveBlocks, MoveKind
from quire.worker_proc.attention.cpu import CpuBackend
from quire.worker_proc.batch.kv_cache import allocate_kv_caches
from quire.worker_proc.device.step_watcher import StepWatcher
from quire.worker_proc.transfers.mover import BlockMover
from quire.worker_proc.transfers.pages import block_groups

Answer = TypeVar("Answer", BlocksMoved, DiskContents)

KEY_BYTES = 36
LLAMA = KVLayout([KVGroup("full_attention", 16, [0, 1, 2])], 3, 64, "float32")
SMALL = KVLayout([KVGroup("full_attention", 4, [0, 1])], 2, 8, "bfloat16")
FP8 = KVLayout([KVGroup("full_attention", 16, [0, 1])], 1, 20, "float8_e4m3fn")
GEMMA = KVLayout(
    [
        KVGroup("full_attention", 4, [5], num_kv_heads=1, head_dim=16),
        KVGroup("sliding_window", 4, [0, 1], window=6, num_kv_heads=1, head_dim=8),
        KVGroup("sliding_window", 4, [2, 3], window=6, num_kv_heads=1, head_dim=8),
    ],
    1,
    8,
    "bfloat16",
)
LAYOUTS = {"llama": LLAMA, "small": SMALL, "fp8": FP8, "gemma": GEMMA}


@dataclass
class Memory:
    """A memory file and the test's own view of its pages."""

    message: HostPages
    fd: int
    pages: Bytes

    def data(self, page: int) -> Bytes:
        return self.pages[page, HEADER.itemsize :]


@contextmanager
def host_memory(num_pages: int, page_bytes: int) -> Iterator[Memory]:
    fd = os.memfd_create("pages")
    os.ftruncate(fd, num_pages * page_bytes)
    view = mmap.mmap(fd, num_pages * page_bytes)
    pages = np.frombuffer(view, np.uint8).reshape(num_pages, page_bytes)
    yield Memory(HostPages(f"/proc/{os.getpid()}/fd/{fd}", num_pages, page_bytes), fd, pages)
    os.close(fd)


def demote(sources: Sequence[int], pages: Sequence[int], transfer: int = 1, **fields: object) -> MoveBlocks:
    """Return a message that demotes pages of host memory which ``move`` has stored."""
    generations = np.array(sources, np.int64)
    keys = b"".join(page.to_bytes(KEY_BYTES, "big") for page in sources)
    given = {"generations": generations, "keys": keys} | fields
    ids = np.array(sources, np.int32), np.array(pages, np.int32)
    return MoveBlocks(transfer, MoveKind.DEMOTE, *ids, **given)  # type: ignore[arg-type]


def move(
    is_load: bool, blocks: Sequence[int], pages: Sequence[int], transfer: int = 1, *, key: int = 0, **fields: object
) -> MoveBlocks:
    """Return a message with generation ``p`` and key ``key + p`` for page ``p``, of group 0 unless ``fields`` say
    otherwise."""
    ids = np.array(blocks, np.int32), np.array(pages, np.int32)
    keys = b"".join((key + page).to_bytes(KEY_BYTES, "big", signed=True) for page in pages)
    given = {"generations": ids[1].astype(np.int64), "keys": keys} | fields
    return MoveBlocks(transfer, MoveKind.LOAD if is_load else MoveKind.STORE, *ids, **given)  # type: ignore[arg-type]


@dataclass
class Pool:
    """The KV caches of a layout with random bytes, and their mover."""

    layout: KVLayout
    native: Native | None
    num_blocks: int = 12
    meaning: Sequence[object] = ()
    watcher: StepWatcher = field(default_factory=StepWatcher)

    def __post_init__(self) -> None:
        device = torch.device("cpu")
        self.caches = allocate_kv_caches(self.layout, self.num_blocks, CpuBackend(native=False), device)
        self.groups = block_groups(self.layout, self.caches, self.num_blocks, self.meaning)
        self.mover = BlockMover(self.native, self.groups, self.num_blocks, self.watcher.wake)
        self.fill(0)

    def fill(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        for group in self.groups:
            for span in group.spans:
                span[:] = rng.integers(0, 256, span.shape, np.uint8)

    def block(self, block: int, group: int = 0) -> bytes:
        return b"".join(span[block].tobytes() for span in self.groups[group].spans)

    def run(self, message: MoveBlocks) -> BlocksMoved:
        """Return the answer to a transfer."""
        self.mover.submit(message)
        (moved,) = self.answers(1)
        assert moved.transfer == message.transfer
        return moved

    def contents(self, message: DiskPages) -> DiskContents:
        """Open a file, and return its contents."""
        self.mover.open(message)
        (contents,) = self.answers(1, DiskContents)
        return contents

    def answers(self, count: int, kind: type[Answer] = BlocksMoved) -> list[Answer]:  # type: ignore[assignment]
        """Wait for this many answers, all of ``kind``."""
        found: list[Answer] = []
        while len(found) < count:
            if not select.select([self.watcher.fileno()], [], [], 30)[0]:
                raise AssertionError(f"{len(found)} of {count} answers after 30 s")
            self.watcher.fired()
            for answer in self.mover.take_answers():
                assert isinstance(answer, kind)
                found.append(answer)
        assert len(found) == count
        return found


@dataclass
class Disk:
    """A file of pages on disk as the scheduler makes it."""

    message: DiskPages
    path: Path

    def page(self, page_id: int) -> bytes:
        start = (page_id - self.message.first_page) * self.message.page_bytes
        return self.path.read_bytes()[start : start + self.message.page_bytes]

    def overwrite(self, page_id: int, offset: int, data: bytes) -> None:
        with self.path.open("r+b") as file:
            file.seek((page_id - self.message.first_page) * self.message.page_bytes + offset)
            file.write(data)


def disk_pages(
    path: Path, num_pages: int, page_bytes: int, *, first_page: int = 0, read_contents: bool = False, forgotten: int = 0
) -> Disk:
    """Return the file, which is made if it does not exist."""
    if not path.exists():
        path.write_bytes(bytes(num_pages * page_bytes))
    numbers = (first_page, num_pages, page_bytes)
    return Disk(DiskPages(str(path), *numbers, read_contents, KEY_BYTES, forgotten), path)
