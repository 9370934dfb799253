"""Pages of host memory: their size, what their bytes mean, and the map of the memory that holds them."""

import mmap
import os
import stat
from collections.abc import Mapping, Sequence
from hashlib import blake2b

import msgspec
import numpy as np
import torch

from quire.kernels.cpu.pages.page_moves import HEADER, BlockGroup, Bytes
from quire.protocol.model.kv_layout import KVLayout
from quire.protocol.wire.transfer_messages import HostPages
from quire.worker_proc.batch.kv_cache import group_caches

FORMAT = 2
"""Version of all that ``layout_hash`` does not see: the header, the order of a block's parts, the tag."""

ALIGNMENT = 4096
"""A page's size is a multiple of this, so that a file of pages can be read without the operating system's cache."""


class MapFailed(Exception):
    """The host memory cannot be used; the message is one line."""


def block_groups(
    layout: KVLayout, caches: Mapping[int, torch.Tensor], num_blocks: int, meaning: Sequence[object]
) -> list[BlockGroup]:
    """Return the memory of each group's blocks, and the hash of what its bytes mean.

    Args:
        layout: this rank's KV layout.
        caches: by layer, on a CPU, from ``allocate_kv_caches``.
        meaning: what else decides the meaning of a block's bytes.
    """
    groups = []
    for index, halves in enumerate(group_caches(layout, caches, num_blocks)):
        spans = [span.numpy() for each in halves for span in each]
        groups.append(BlockGroup(spans, group_layout(layout, index, spans[0].shape[1], meaning)))
    return groups


def group_layout(layout: KVLayout, index: int, num_bytes: int, meaning: Sequence[object]) -> bytes:
    """Return 16 bytes that name what the bytes of a block mean, but for the weights.

    ``num_bytes``: bytes of its keys in one tensor.
    """
    return layout_hash([FORMAT, layout, index, num_bytes, *meaning])


def layout_hash(meaning: Sequence[object]) -> bytes:
    """Return 16 bytes that differ when anything in ``meaning`` does."""
    return blake2b(msgspec.msgpack.encode(meaning), digest_size=16).digest()


def page_bytes_of(groups: Sequence[BlockGroup]) -> int:
    """Return the bytes of a page, which holds a block of any group."""
    return -(-(HEADER.itemsize + max(group.num_bytes for group in groups)) // ALIGNMENT) * ALIGNMENT


class MappedPages:
    """This process's map of a rank's host memory. The memory itself belongs to the scheduler."""

    def __init__(self, message: HostPages) -> None:
        """
        Raises:
            MapFailed: the file cannot be opened or mapped, or has another size.
        """
        size = message.num_pages * message.page_bytes
        self._page_bytes = message.page_bytes
        try:
            self._fd = os.open(message.path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise MapFailed(f"cannot open host memory {message.path}: {error.strerror}") from None
        try:
            found = os.fstat(self._fd)
            if not stat.S_ISREG(found.st_mode) or found.st_size != size:
                raise MapFailed(f"host memory {message.path} has {found.st_size} bytes instead of {size}")
            self._map = mmap.mmap(self._fd, size)
        except (OSError, MapFailed) as error:
            os.close(self._fd)
            raise MapFailed(str(error)) from None
        self.pages: Bytes = np.frombuffer(self._map, np.uint8).reshape(message.num_pages, message.page_bytes)

    def num_backed(self) -> int:
        """Return the number of pages that the file still has. Access to others would end the process."""
        return os.fstat(self._fd).st_size // self._page_bytes

    def backed_pages(self) -> Bytes:
        """Return the pages that the file still has."""
        return self.pages[: self.num_backed()]

    def close(self) -> None:
        """Unmap the memory, when nothing refers to it any more."""
        del self.pages, self._map
        os.close(self._fd)
