"""Copies of KV blocks to pages of host memory and back, beside a plain copy of as many bytes; then to disk."""

import mmap
import os
from collections.abc import Sequence
from functools import partial

import numpy as np
from xxhash import xxh3_128_digest

from quire.bench.worker.disk_transfer import transfers_of_disk
from quire.bench.worker.record import Bench
from quire.kernels.cpu.native.library import load_native
from quire.kernels.cpu.pages.page_moves import HEADER, Bytes, Moves, PageMoves
from quire.protocol.model.kv_layout import KVLayout, kv_layout
from quire.worker_proc.attention.cpu import CpuBackend
from quire.worker_proc.batch.kv_cache import allocate_kv_caches
from quire.worker_proc.transfers.pages import block_groups, page_bytes_of

KEY_BYTES = 32
BLOCK_SIZE = 16


def cpu_transfer(bench: Bench) -> None:
    """Measure loads and stores of blocks in random order, in turn with plain copies and the tag of xxhash.

    All memory was written before. Each call copies all blocks once, and together they exceed the caches.
    """
    if load_native() is None:
        bench.note("transfers", "no compiler", None)
        return
    model = bench.models["smollm2-135m"]
    for dtype in ("float32", "bfloat16", "float8_e4m3fn"):
        layout = kv_layout(model, BLOCK_SIZE, dtype)
        most = max(2, bench.pick(full=2**28, quick=2**27, dry=0) // layout.block_bytes)
        for tokens in bench.pick(full=(16, 4096), quick=(4096,), dry=(32,)):
            _measure(bench, layout, min(most, tokens // BLOCK_SIZE), most, f"{tokens} tokens, {dtype}")
    layout = kv_layout(model, BLOCK_SIZE, "bfloat16")
    transfers_of_disk(bench, layout, max(2, bench.pick(full=2**28, quick=2**27, dry=0) // layout.block_bytes))


def _measure(bench: Bench, layout: KVLayout, count: int, most: int, case: str) -> None:
    """Measure transfers of ``count`` blocks each, of ``most`` blocks in all."""
    num_blocks = 1 + most
    caches = allocate_kv_caches(layout, num_blocks, CpuBackend(), bench.device)
    (group,) = block_groups(layout, caches, num_blocks, ())
    for span in group.spans:
        span[:] = 1
    page_bytes = page_bytes_of([group])
    pages = _shared(num_blocks * page_bytes).reshape(num_blocks, page_bytes)
    bytes_in_all = most * group.num_bytes
    source, target = _shared(bytes_in_all), np.frombuffer(mmap.mmap(-1, bytes_in_all), np.uint8)
    copies, parts = PageMoves(load_native(), [group]), _parts(most, count)
    headers_only = PageMoves(load_native(), [group], check_tags=False)
    _move(copies, pages, parts, is_load=False)
    calls = {
        "quire, load": partial(_move, copies, pages, parts, is_load=True),
        "plain copy": partial(np.copyto, target, source),
        "quire, load, header": partial(_move, headers_only, pages, parts, is_load=True),
        "quire, store": partial(_move, copies, pages, parts, is_load=False),
        "xxhash of pages": partial(_tag, pages[:, HEADER.itemsize :][:, : group.num_bytes]),
    }
    bench.require_time()
    times = dict(zip(calls, bench.clock.alternating(list(calls.values())), strict=True))
    for name, seconds in times.items():
        rate = most * group.num_bytes / seconds / 1e9
        share = times["plain copy"] / seconds
        bench.note(case, name, seconds * count / most, gb_per_s=rate, of_plain_copy=share)


def _shared(size: int) -> Bytes:
    """Return written memory of a file, like that of the scheduler."""
    fd = os.memfd_create("pages")
    os.ftruncate(fd, size)
    made = np.frombuffer(mmap.mmap(fd, size), np.uint8)
    os.close(fd)
    made[:] = 1
    return made


def _parts(most: int, count: int) -> list[Moves]:
    rng = np.random.default_rng(0)
    blocks, pages = (1 + rng.permutation(most).astype(np.int32) for _ in range(2))
    zeros = np.zeros(most, np.int32)
    whole = Moves(blocks, pages, zeros.astype(np.int64), zeros, bytes(KEY_BYTES * most))
    return [whole.take(slice(start, start + count)) for start in range(0, most, count)]


def _move(copies: PageMoves, pages: Bytes, parts: Sequence[Moves], *, is_load: bool) -> None:
    for part in parts:
        if copies.move(pages, part, is_load=is_load).any():
            raise RuntimeError("a page is not what was stored")


def _tag(pages: Bytes) -> None:
    for page in pages[1:]:
        xxh3_128_digest(page)
