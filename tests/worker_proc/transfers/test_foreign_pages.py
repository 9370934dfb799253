"""Pages of other weights or engines, and pages whose bytes were changed, are never taken for those of an engine."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
from host_pages import KEY_BYTES, SMALL, Disk, Memory, Pool, disk_pages, host_memory, move
from tiers import thinned

from quire.kernels.cpu.native.library import load_native
from quire.kernels.cpu.pages.page_moves import HEADER, Bytes
from quire.protocol.model.kv_layout import KVGroup, KVLayout
from quire.protocol.wire.transfer_messages import DiskPages, HostPages

PAGES = range(1, 5)
OWN = ["flash", 0, 2, []]
"""What a worker adds to the layout: backend, rank, number of ranks, scales of keys and values."""

ENGINES: dict[str, tuple[KVLayout, list[object], str]] = {
    "other weights": (SMALL, OWN, "b" * 32),
    "weights without a name": (SMALL, OWN, ""),
    "another state of the files": (SMALL, OWN, "a" * 31 + "b"),
    "another backend": (SMALL, ["torch", *OWN[1:]], "a" * 32),
    "another rank": (SMALL, ["flash", 1, 2, []], "a" * 32),
    "another number of ranks": (SMALL, ["flash", 0, 4, []], "a" * 32),
    "other scales": (SMALL, ["flash", 0, 2, [[0.5]]], "a" * 32),
    "another dtype": (msgspec.structs.replace(SMALL, dtype="float16"), OWN, "a" * 32),
    "other heads": (KVLayout([KVGroup("full_attention", 4, [0, 1])], 4, 4, "bfloat16"), OWN, "a" * 32),
    "other layers": (KVLayout([KVGroup("full_attention", 4, [2, 3])], 2, 8, "bfloat16"), OWN, "a" * 32),
    "another kind of layer": (
        KVLayout([KVGroup("sliding_window", 4, [0, 1], window=4)], 2, 8, "bfloat16"),
        OWN,
        "a" * 32,
    ),
    "another number of tokens": (KVLayout([KVGroup("full_attention", 8, [0, 1])], 1, 8, "bfloat16"), OWN, "a" * 32),
}
FIELDS = HEADER.names or ()


def flip(field: str) -> Callable[[Bytes, Bytes], None]:
    def change(own: Bytes, other: Bytes) -> None:
        own[2, HEADER.itemsize + 9 if field == "data" else HEADER.fields[field][1]] ^= 1  # type: ignore[index]

    return change


def copied(pages: slice | int, span: slice, source: int | slice | None = None) -> Callable[[Bytes, Bytes], None]:
    """Copy a part of pages from the file of other weights, or from another page (``source``) of the same file."""

    def change(own: Bytes, other: Bytes) -> None:
        own[pages, span] = other[pages, span] if source is None else own[source, span].copy()

    return change


def zeroed(span: slice) -> Callable[[Bytes, Bytes], None]:
    def change(own: Bytes, other: Bytes) -> None:
        own[1:, span] = 0

    return change


HEAD, BODY, ALL = slice(0, HEADER.itemsize), slice(HEADER.itemsize, None), slice(None)
LAYOUT = slice(HEADER.fields["layout"][1], HEADER.fields["layout"][1] + 16)  # type: ignore[index]
CHANGES: dict[str, Callable[[Bytes, Bytes], None]] = {
    **{f"flipped {field}": flip(field) for field in (*FIELDS, "data")},
    "all pages but the first are of others": copied(slice(1, None), ALL),
    "one page is of others": copied(3, ALL),
    "bodies of others": copied(slice(1, None), BODY),
    "headers of others": copied(slice(1, None), HEAD),
    "layouts of others": copied(slice(1, None), LAYOUT),
    "shuffled pages": copied(slice(1, 5), ALL, [4, 3, 2, 1]),  # type: ignore[arg-type]
    "shuffled bodies": copied(slice(1, 5), BODY, [4, 3, 2, 1]),  # type: ignore[arg-type]
    "a page in place of another": copied(1, ALL, 2),
    "no bodies": zeroed(BODY),
    "no headers": zeroed(HEAD),
    "torn pages": zeroed(slice(HEADER.itemsize + 64, None)),
    "nothing": zeroed(ALL),
    "no change": lambda own, other: None,
}


@contextmanager
def tier(pool: Pool, place: Path, weights: str, on_disk: bool) -> Iterator[tuple[Memory | Disk, HostPages | DiskPages]]:
    size = pool.mover.page_bytes
    if on_disk:
        disk = disk_pages(place, 1 + len(PAGES), size, read_contents=False)
        yield disk, msgspec.structs.replace(disk.message, weights=weights)
        return
    with host_memory(1 + len(PAGES), size) as memory:
        yield memory, msgspec.structs.replace(memory.message, weights=weights)


def use(pool: Pool, message: HostPages | DiskPages) -> None:
    pool.mover.begin_worker_epoch()
    pool.mover.open(message) if isinstance(message, DiskPages) else pool.mover.map(message)


def stored(pool: Pool, message: HostPages | DiskPages, seed: int) -> list[bytes]:
    """Store the same contents as every other engine; return what the blocks have."""
    use(pool, message)
    pool.fill(seed)
    assert pool.run(move(False, PAGES, PAGES)).failed == []
    return [pool.block(block) for block in PAGES]


def loaded(pool: Pool, message: HostPages | DiskPages) -> dict[int, bytes]:
    """Load every content by the header that it must have, and on disk what the headers say; return what was good."""
    use(pool, message)
    pool.fill(99)
    good = {}
    if isinstance(message, DiskPages):
        pool.mover.begin_worker_epoch()
        found = pool.contents(msgspec.structs.replace(message, read_contents=True))
        for at, page in enumerate(found.page_ids.tolist()):
            key = found.keys[at * KEY_BYTES : (at + 1) * KEY_BYTES]
            named = move(True, [1], [page], generations=found.generations[at : at + 1], keys=key)
            if not pool.run(named).failed:
                good[int.from_bytes(key, "big")] = pool.block(1)
    failed = pool.run(move(True, PAGES, PAGES)).failed
    assert all(good.get(page, pool.block(page)) == pool.block(page) for page in PAGES if page - 1 not in failed)
    return good | {page: pool.block(page) for page in PAGES if page - 1 not in failed}


CASES = [(name, on_disk, native) for name in ENGINES for on_disk in (True, False) for native in (True, False)]


@pytest.mark.parametrize(("name", "on_disk", "native"), thinned(CASES, 12))
def test_pages_of_another_engine_are_not_used(name: str, on_disk: bool, native: bool, tmp_path: Path) -> None:
    layout, meaning, weights = ENGINES[name]
    library = load_native() if native else None
    own, other = Pool(SMALL, library, meaning=OWN), Pool(layout, library, meaning=meaning)
    assert own.mover.page_bytes == other.mover.page_bytes
    with tier(own, tmp_path / "pages", "a" * 32, on_disk) as (_, message):
        expected = stored(own, message, 1)
        assert loaded(own, message) == dict(zip(PAGES, expected, strict=True))
        stored(other, msgspec.structs.replace(message, weights=weights), 2)
        assert loaded(own, message) == {}
        own.mover.close()
        other.mover.close()


CHANGED = [(name, on_disk, native) for name in CHANGES for on_disk in (True, False) for native in (True, False)]


@pytest.mark.parametrize(("name", "on_disk", "native"), thinned(CHANGED, 12))
def test_changed_and_mixed_pages_give_their_own_bytes_or_none(
    name: str, on_disk: bool, native: bool, tmp_path: Path
) -> None:
    pool = Pool(SMALL, load_native() if native else None, meaning=OWN)
    shape = 1 + len(PAGES), pool.mover.page_bytes
    with (
        tier(pool, tmp_path / "own", "a" * 32, on_disk) as (own, message),
        tier(pool, tmp_path / "other", "b" * 32, on_disk) as (other, foreign),
    ):
        expected = dict(zip(PAGES, stored(pool, message, 1), strict=True))
        stored(pool, foreign, 2)
        pool.mover.begin_worker_epoch()
        ours, theirs = (
            np.fromfile(each.path, np.uint8).reshape(shape) if isinstance(each, Disk) else each.pages
            for each in (own, other)
        )
        CHANGES[name](ours, theirs)
        if isinstance(own, Disk):
            ours.tofile(own.path)
        found = loaded(pool, message)
        assert found.items() <= expected.items(), "a content that is not its own"
        assert (len(found) == len(PAGES)) == (name == "no change" or (name == "shuffled pages" and on_disk))
        pool.mover.close()
