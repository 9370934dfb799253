"""Messages that move KV blocks between a worker's device, pages of host memory, and pages on disk.

The pages of all tiers have one sequence of ids, so that an id names a page of any tier. The first page of each tier has
no content.
"""

from collections.abc import Iterator
from enum import IntEnum

from quire.protocol.wire.arrays import Int32, Int64
from quire.protocol.wire.link_messages import Message

CONTENTS_PER_MESSAGE = 4096
"""Most contents in a DiskContents: a disk may have millions, and each message is an event and a line of the trace."""


class HostPages(Message, frozen=True, tag=34):
    """The host memory of a rank, sent once after its Ready and before any MoveBlocks. The scheduler owns it.

    Attributes:
        path: file of the memory. Its pages have the ids from 0 on.
        page_bytes: as in Ready.
        weights: name of the loaded weights, a part of each page's header; equal only for equal weights.
    """

    path: str
    num_pages: int
    page_bytes: int
    weights: str = ""


class DiskPages(Message, frozen=True, tag=36):
    """The file of a rank's pages on disk, sent once after HostPages, if there are any, and before any MoveBlocks.

    The scheduler owns the file. It has ``num_pages`` pages; the first one describes the file.

    Attributes:
        first_page: id of the first page.
        page_bytes: as in Ready.
        read_contents: whether the worker answers with DiskContents.
        key_bytes: length of a key; a page with a key of another length has no content.
        forgotten: pages with a generation up to this one have no content.
        weights: as in HostPages.
    """

    path: str
    first_page: int
    num_pages: int
    page_bytes: int
    read_contents: bool
    key_bytes: int
    forgotten: int = 0
    weights: str = ""


class MoveKind(IntEnum):
    """What a MoveBlocks copies."""

    STORE = 0
    """Blocks to pages."""
    LOAD = 1
    """Pages to blocks."""
    DEMOTE = 2
    """Pages of host memory to pages on disk."""


class MoveBlocks(Message, frozen=True, tag=35):
    """Blocks to copy to pages, or pages to blocks, in the order of the steps.

    A store reads its blocks after all steps sent before it have run. No step reads the blocks of a load before every
    rank has answered it.

    Attributes:
        transfer: number that the answer repeats.
        block_ids: blocks of the device; pages of host memory if pages are demoted.
        page_ids: one page per block. The pages of a load may be of several tiers; those of a store are of one.
        generations: of each page, the number of the transfer that first stored its content; part of its header, like
            its key.
        keys: the hash of each block's content, concatenated, of equal lengths.
        groups: KV group of each block; None: all are of group 0.
    """

    transfer: int
    kind: MoveKind
    block_ids: Int32
    page_ids: Int32
    generations: Int64
    keys: bytes
    groups: Int32 | None = None

    @property
    def is_load(self) -> bool:
        return self.kind is MoveKind.LOAD


class BlocksMoved(Message, frozen=True, tag=46):
    """The end of a MoveBlocks, sent by every rank, in any order.

    Attributes:
        transfer: number of the MoveBlocks.
        failed: indices into its ``block_ids`` whose copy failed, or whose page is not the expected one.
        seconds: duration of the copies, without the time in the worker's queues.
        reason: the first failure, in one line.
        disk_seconds: the part of ``seconds`` for pages on disk.
    """

    transfer: int
    failed: list[int] = []
    seconds: float = 0.0
    reason: str = ""
    disk_seconds: float = 0.0


class DiskContents(Message, frozen=True, tag=48):
    """A part of the contents of the pages on disk, as their headers name them; sent by every rank.

    Pages of other layouts are left out. The bytes are not read: a page that is torn fails when it is loaded.

    Attributes:
        page_ids, generations, keys, groups: as in MoveBlocks.
        reason: why the file cannot be used, in one line, or empty.
        is_last: whether no part follows.
    """

    page_ids: Int32
    generations: Int64
    keys: bytes
    groups: Int32 | None = None
    reason: str = ""
    is_last: bool = True

    def parts(self, most: int = CONTENTS_PER_MESSAGE) -> Iterator["DiskContents"]:
        """Yield the same contents in messages of at most ``most``."""
        count = len(self.page_ids)
        size = len(self.keys) // max(count, 1)
        for start in range(0, max(count, 1), most):
            part = slice(start, start + most)
            keys = self.keys[start * size : (start + most) * size]
            groups = None if self.groups is None else self.groups[part]
            is_last = start + most >= count
            yield DiskContents(self.page_ids[part], self.generations[part], keys, groups, self.reason, is_last)
