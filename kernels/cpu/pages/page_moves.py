"""Copies of KV blocks to pages of host memory and back, by the library or NumPy.

A page is a header (``HEADER``), then the bytes of a block in all tensors of its KV group. Its tag is the XXH3 hash with
128 bits of these bytes followed by the header before the tag.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.kernels.cpu.native.library import Native

Bytes = npt.NDArray[np.uint8]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

MAX_KEY_BYTES = 196
HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("layout", "u1", 16),
        ("bytes", "<i8"),
        ("generation", "<i8"),
        ("key_bytes", "<i4"),
        ("key", "u1", MAX_KEY_BYTES),
        ("tag", "u1", 16),
    ]
)
MAGIC = b"QUIREKV1"

OUTCOMES = (
    "",
    "not a page",
    "page of another layout",
    "page of another generation",
    "page of another key",
    "tag does not match the bytes",
    "host memory was truncated",
    "the file was truncated",
    "error of the file",
)
"""What a copy ended with: nothing wrong, or the first difference that a load found. Bytes are only copied, and then
compared with the tag, if the header is the expected one. The last three are of memory and files."""

_TAGGED = HEADER.fields["tag"][1] if HEADER.fields is not None else 0
_GROUP = np.dtype([("bases", "<u8"), ("count", "<i8"), ("span", "<i8"), ("layout", "u1", 16)])


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """The memory of a KV group's blocks.

    Attributes:
        spans: uint8 ``[num_blocks, span]``, contiguous, of equal shape; a block is its row in all of them.
        layout: 16 bytes that name the meaning of a block's bytes.
    """

    spans: Sequence[Bytes]
    layout: bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of one block."""
        return sum(span.shape[1] for span in self.spans)


@dataclass(frozen=True, slots=True)
class Moves:
    """Blocks and their pages, one each: arrays of equal length, and keys of equal length, concatenated.

    Attributes:
        generations: part of a page's header, like the keys.
        groups: index of each block's group.
    """

    blocks: Int32
    pages: Int32
    generations: Int64
    groups: Int32
    keys: bytes

    @property
    def key_bytes(self) -> int:
        return len(self.keys) // max(len(self.blocks), 1)

    def arrays(self) -> list[npt.NDArray[Any]]:
        """Return blocks, pages, generations, groups and keys as the library reads them."""
        given = (self.blocks, self.pages, self.generations, self.groups, np.frombuffer(self.keys, np.uint8))
        types = (np.int32, np.int32, np.int64, np.int32, np.uint8)
        return [np.ascontiguousarray(array, dtype) for array, dtype in zip(given, types, strict=True)]

    def take(self, which: slice | npt.NDArray[np.bool_]) -> "Moves":
        """Return some of the moves."""
        blocks, pages, generations, groups = self.blocks, self.pages, self.generations, self.groups
        keys = np.frombuffer(self.keys, np.uint8).reshape(len(blocks), -1)
        return Moves(blocks[which], pages[which], generations[which], groups[which], keys[which].tobytes())


class PageMoves:
    """Moves blocks between the memory of some KV groups and pages. The ids of blocks, pages and groups are not checked.

    The bytes of a page are read once: what is compared with the tag is what was copied, even if another process writes
    to the page meanwhile. The native copy does not hold the GIL.
    """

    def __init__(self, native: Native | None, groups: Sequence[BlockGroup], *, check_tags: bool = True) -> None:
        """
        Args:
            native: None computes with NumPy, at a hundredth of the speed.
            check_tags: whether loads compare the tag.
        """
        if any(not span.flags.c_contiguous or span.shape != g.spans[0].shape for g in groups for span in g.spans):
            raise ValueError("the spans of a group must be contiguous and have equal shapes")
        self.groups = list(groups)
        self.check_tags = check_tags
        self._call: Any = None
        if native is not None:
            pointer, long = ctypes.c_void_p, ctypes.c_int64
            arguments = (long, long, pointer, pointer, pointer, long, long, *[pointer] * 5, long, pointer)
            self._call = native.function("quire_move_blocks", *arguments, returns=long)
        self._bases = [np.array([span.ctypes.data for span in group.spans], np.uint64) for group in groups]
        self.described = np.zeros(len(groups), _GROUP)
        """The groups, for the library."""
        for row, group, bases in zip(self.described, groups, self._bases, strict=True):
            row["bases"], row["count"], row["span"] = bases.ctypes.data, len(bases), group.spans[0].shape[1]
            row["layout"] = np.frombuffer(group.layout, np.uint8)

    def set_layouts(self, layouts: Sequence[bytes]) -> None:
        """Replace the layouts of the groups, while no copy runs."""
        self.groups[:] = [replace(group, layout=each) for group, each in zip(self.groups, layouts, strict=True)]
        self.described["layout"] = np.frombuffer(b"".join(layouts), np.uint8).reshape(-1, 16)

    def move(self, memory: Bytes, moves: Moves, *, is_load: bool, stop: Int64 | None = None) -> Bytes:
        """Copy pages to blocks (``is_load``) or blocks to pages; return an index into OUTCOMES for each copy.

        A block whose load has failed has undefined bytes.

        Args:
            memory: ``[num_pages, page_bytes]``, contiguous.
            stop: a number that another thread may set to 1 to end the call after the block that is being copied.
        """
        if self._call is None:
            checks = self.check_tags
            return move_reference(memory, self.groups, moves, is_load=is_load, check_tags=checks, stop=stop)
        arrays, outcomes = moves.arrays(), np.zeros(len(moves.blocks), np.uint8)
        places = (self.described.ctypes.data, memory.ctypes.data, memory.shape[1], len(outcomes))
        ids = (array.ctypes.data for array in arrays)
        flag = None if stop is None else stop.ctypes.data
        done = self._call(is_load, self.check_tags, flag, *places, *ids, moves.key_bytes, outcomes.ctypes.data)
        return outcomes[:done]


def move_reference(
    memory: Bytes,
    groups: Sequence[BlockGroup],
    moves: Moves,
    *,
    is_load: bool,
    check_tags: bool = True,
    stop: Int64 | None = None,
) -> Bytes:
    """Move blocks like ``PageMoves.move``, with NumPy."""
    outcomes = np.zeros(len(moves.blocks), np.uint8)
    size = moves.key_bytes
    for index, (block, page) in enumerate(zip(moves.blocks, moves.pages, strict=True)):
        if stop is not None and stop[0]:
            return outcomes[:index]
        group = groups[moves.groups[index]]
        key = moves.keys[index * size : (index + 1) * size]
        header = header_of(group, int(moves.generations[index]), key)
        end = HEADER.itemsize + group.num_bytes
        if is_load:
            copied = memory[page, :end].copy()
            found = copied[: HEADER.itemsize].view(HEADER)[0]
            outcomes[index] = difference(found, header)
            if not outcomes[index]:
                data = copied[HEADER.itemsize :]
                for span, part in zip(group.spans, data.reshape(len(group.spans), -1), strict=True):
                    span[block] = part
                if check_tags and _tag(data, header) != found["tag"].tobytes():
                    outcomes[index] = OUTCOMES.index("tag does not match the bytes")
        else:
            data = np.concatenate([span[block] for span in group.spans])
            header["tag"] = np.frombuffer(_tag(data, header), np.uint8)
            memory[page, HEADER.itemsize : end] = data
            memory[page, : HEADER.itemsize] = np.frombuffer(header.tobytes(), np.uint8)
    return outcomes


def header_of(group: BlockGroup, generation: int, key: bytes) -> Any:
    header = np.zeros(1, HEADER)[0]
    header["magic"], header["bytes"], header["generation"] = MAGIC, group.num_bytes, generation
    header["layout"] = np.frombuffer(group.layout, np.uint8)
    header["key_bytes"], header["key"][: len(key)] = len(key), np.frombuffer(key, np.uint8)
    return header


def difference(found: Any, wanted: Any) -> int:
    """Return the outcome of a load as far as the header decides it."""
    for outcome, names in enumerate((("magic",), ("layout", "bytes"), ("generation",), ("key_bytes", "key")), 1):
        if any(np.any(found[name] != wanted[name]) for name in names):
            return outcome
    return 0


def _tag(data: Bytes, header: Any) -> bytes:
    return xxh3_reference(data.tobytes() + header.tobytes()[:_TAGGED])


_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248e"
    "e03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d"
    "8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc"
    "8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_MASK = 2**64 - 1
_P32_1, _P32_2, _P32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_P64_1, _P64_2, _P64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_P64_4, _P64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_SWAPPED = np.arange(8) ^ 1


def xxh3_reference(data: bytes) -> bytes:
    """Return XXH3 with 128 bits and seed 0, little-endian low half first, of more than 240 bytes."""
    stripes, last = (len(data) - 1) // 64, np.frombuffer(data, "<u8", 8, len(data) - 64)
    words = np.frombuffer(data, "<u8", stripes * 8).reshape(stripes, 8)
    keys = np.stack([np.frombuffer(_SECRET, "<u8", 8, 8 * (stripe % 16)) for stripe in range(min(stripes, 16))])
    state = np.array([_P32_3, _P64_1, _P64_2, _P64_3, _P64_4, _P32_2, _P64_5, _P32_1], np.uint64)
    scramble = np.frombuffer(_SECRET, "<u8", 8, 128)
    for start in range(0, stripes, 16):
        block = words[start : start + 16]
        state = state + _sums(block, keys[: len(block)])
        if len(block) == 16:
            state = (state ^ state >> np.uint64(47) ^ scramble) * np.uint64(_P32_1)
    state = state + _sums(last[None], np.frombuffer(_SECRET, "<u8", 8, 121)[None])
    lanes = [int(lane) for lane in state]
    halves = _merged(lanes, 11, len(data) * _P64_1), _merged(lanes, 117, ~(len(data) * _P64_2))
    return b"".join(half.to_bytes(8, "little") for half in halves)


def _sums(words: npt.NDArray[np.uint64], keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return what some stripes add to the state."""
    keyed = words ^ keys
    products: npt.NDArray[np.uint64] = (keyed & np.uint64(0xFFFFFFFF)) * (keyed >> np.uint64(32))
    plain: npt.NDArray[np.uint64] = words.sum(axis=0)
    total: npt.NDArray[np.uint64] = products.sum(axis=0) + plain[_SWAPPED]
    return total


def _merged(lanes: list[int], secret: int, total: int) -> int:
    keys = np.frombuffer(_SECRET, "<u8", 8, secret).tolist()
    keyed = [lane ^ key for lane, key in zip(lanes, keys, strict=True)]
    for left, right in zip(keyed[::2], keyed[1::2], strict=True):
        total += left * right & _MASK ^ left * right >> 64
    total &= _MASK
    total = (total ^ total >> 37) * 0x165667919E3779F9 & _MASK
    return total ^ total >> 32
