"""A worker that is killed while it writes pages: a later one accepts only pages that are complete."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from host_pages import KEY_BYTES, Pool, disk_pages, move
from tiers import thinned

from quire.kernels.cpu.native.library import load_native
from quire.protocol.model.kv_layout import KVGroup, KVLayout
from quire.worker_proc.transfers import disk

LARGE = KVLayout([KVGroup("full_attention", 16, list(range(16)))], 4, 64, "float32")
"""Pages of 516 KiB, so that most kills interrupt a write."""
NUM_PAGES = 16


def fill(pool: Pool, generation: int) -> None:
    """Give blocks contents that follow from the generation."""
    for number, span in enumerate(pool.groups[0].spans):
        span[:] = (np.arange(span.shape[1]) * (1 + number) + generation * 131).astype(np.uint8)


def keys(pages: list[int], generation: int) -> bytes:
    return b"".join((1000 * generation + page).to_bytes(KEY_BYTES, "big") for page in pages)


def write_without_end(path: Path, complete: int, *, direct: bool) -> None:
    """Store to all pages, generation after generation; write a byte to ``complete`` when the first is complete.

    A signal interrupts writes through the system's cache, but hardly direct ones.
    """
    if not direct:
        disk._make_direct = lambda fd: False
    pool = Pool(LARGE, load_native(), num_blocks=NUM_PAGES)
    pool.mover.open(disk_pages(path, NUM_PAGES, pool.mover.page_bytes).message)
    pages, generation = list(range(1, NUM_PAGES)), 0
    while True:
        generation += 1
        fill(pool, generation)
        generations = np.full(len(pages), generation, np.int64)
        pool.run(move(False, pages, pages, keys=keys(pages, generation), generations=generations))
        if generation == 1:
            os.write(complete, b".")


def kill_writers(folder: Path, count: int) -> None:
    """Fork processes that write, and kill each at a random point; runs in a process without other threads."""
    for number in range(count):
        read, write = os.pipe()
        writer = os.fork()
        if not writer:
            write_without_end(folder / f"{number}", write, direct=number % 2 == 0)
        assert os.read(read, 1) == b"."
        sum(range(np.random.default_rng(number).integers(3_000_000)))
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)


def check(path: Path) -> None:
    """Every page that is accepted has the bytes of its generation, and only those being written are not."""
    pool, expected = (Pool(LARGE, load_native(), num_blocks=NUM_PAGES) for _ in range(2))
    found = pool.contents(disk_pages(path, NUM_PAGES, pool.mover.page_bytes, read_contents=True).message)
    pages = found.page_ids.tolist()
    assert len(pages) >= NUM_PAGES - 1 - disk.WRITERS
    failed = pool.run(move(True, pages, pages, generations=found.generations, keys=found.keys)).failed
    assert len(failed) <= disk.WRITERS
    for index, (page, generation) in enumerate(zip(pages, found.generations.tolist(), strict=True)):
        assert found.keys[index * KEY_BYTES :][:KEY_BYTES] == keys([page], generation)
        if index not in failed:
            fill(expected, generation)
            assert pool.block(page) == expected.block(page)
    pool.mover.close()


@pytest.mark.full
@pytest.mark.parametrize("count", thinned([3, 40], keep=1))
def test_what_killed_workers_have_written_is_complete_or_fails(tmp_path: Path, count: int) -> None:
    start = f"import pathlib, {Path(__file__).stem} as t; t.kill_writers(pathlib.Path({str(tmp_path)!r}), {count})"
    paths = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    subprocess.run([sys.executable, "-P", "-c", start], env={**os.environ, **paths}, check=True, timeout=300)
    for number in range(count):
        check(tmp_path / f"{number}")
