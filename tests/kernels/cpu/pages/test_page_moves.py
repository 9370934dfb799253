"""Copies between blocks and pages: native against NumPy, and the tag against another implementation of XXH3."""

import numpy as np
import pytest
import xxhash
from tiers import covering

from quire.kernels.cpu.native.library import Native
from quire.kernels.cpu.pages.page_moves import HEADER, OUTCOMES, BlockGroup, Bytes, Moves, PageMoves, xxh3_reference

NUM_BLOCKS, NUM_PAGES = 5, 7
BLOCKS, PAGES = [1, 4, 2], [6, 1, 3]


def memory(rng: np.random.Generator, rows: int, width: int, *, shift: int = 0) -> Bytes:
    """Return random bytes ``[rows, width]`` that begin ``shift`` bytes after a multiple of 64."""
    whole = rng.integers(0, 256, rows * width + 128, np.uint8)
    start = -whole.ctypes.data % 64 + shift
    return whole[start : start + rows * width].reshape(rows, width)


def moves(rng: np.random.Generator) -> Moves:
    ids = [np.array(numbers, np.int32) for numbers in (BLOCKS, PAGES, [5, 2**31 - 1, 0], [0, 0, 0])]
    return Moves(*ids, rng.bytes(36 * 3))


@pytest.mark.parametrize("size", [241, 255, 256, 257, 320, 1023, 1024, 1025, 1088, 1089, 2048, 2049, 5000, 70001])
def test_reference_tag_is_xxh3(size: int) -> None:
    data = np.random.default_rng(size).bytes(size)
    assert int.from_bytes(xxh3_reference(data), "little") == xxhash.xxh3_128_intdigest(data)


@pytest.mark.parametrize(
    ("span", "count", "shift"), covering([1, 17, 32, 64, 80, 320, 1024, 1088, 6144], [1, 2, 60], [0, 16, 1])
)
def test_native_pages_equal_those_of_numpy(native: Native, span: int, count: int, shift: int) -> None:
    rng = np.random.default_rng(span + count)
    blocks = [memory(rng, NUM_BLOCKS, span, shift=shift) for _ in range(count)]
    wanted = moves(rng)
    stored = [memory(rng, NUM_PAGES, HEADER.itemsize + span * count, shift=shift) for _ in range(2)]
    stored[1][:] = stored[0]
    for pages, library in zip(stored, (native, None), strict=True):
        assert not PageMoves(library, [BlockGroup(blocks, b"l" * 16)]).move(pages, wanted, is_load=False).any()
    assert np.array_equal(stored[0], stored[1])
    page, data = stored[0][PAGES[1]], b"".join(part[BLOCKS[1]].tobytes() for part in blocks)
    header = page[: HEADER.itemsize].view(HEADER)[0]
    tagged = page[HEADER.itemsize :].tobytes() + page[:240].tobytes()
    assert page[HEADER.itemsize :].tobytes() == data
    assert int.from_bytes(header["tag"].tobytes(), "little") == xxhash.xxh3_128_intdigest(tagged)
    for library in (native, None):
        loaded = [memory(rng, NUM_BLOCKS, span, shift=shift) for _ in range(count)]
        before = [part.copy() for part in loaded]
        assert not PageMoves(library, [BlockGroup(loaded, b"l" * 16)]).move(stored[0], wanted, is_load=True).any()
        for part, old, source in zip(loaded, before, blocks, strict=True):
            assert np.array_equal(part[BLOCKS], source[BLOCKS])
            assert np.array_equal(part[[0, 3]], old[[0, 3]])


@pytest.mark.parametrize("use_native", [True, False])
def test_each_flipped_bit_of_a_page_is_found(native: Native, use_native: bool) -> None:
    rng = np.random.default_rng(3)
    span = 80
    blocks = [memory(rng, NUM_BLOCKS, span) for _ in range(2)]
    copies = PageMoves(native if use_native else None, [BlockGroup(blocks, b"l" * 16)])
    pages = memory(rng, NUM_PAGES, HEADER.itemsize + 2 * span)
    wanted = moves(rng)
    copies.move(pages, wanted, is_load=False)
    found = set()
    for place in range(pages.shape[1]):
        pages[PAGES[1], place] ^= 1 << place % 8
        outcomes = copies.move(pages, wanted, is_load=True)
        assert outcomes[1] and not outcomes[[0, 2]].any(), place
        found.add(OUTCOMES[outcomes[1]])
        pages[PAGES[1], place] ^= 1 << place % 8
    assert found == {*OUTCOMES[1:6]}
    assert not copies.move(pages, wanted, is_load=True).any()


def test_spans_of_different_shapes_are_an_error() -> None:
    with pytest.raises(ValueError, match="equal shapes"):
        PageMoves(None, [BlockGroup([np.zeros((2, 8), np.uint8), np.zeros((2, 4), np.uint8)], b"l" * 16)])
