"""Pinned memory between a device and pages, and what a device does to copy blocks there and back."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from quire.kernels.cpu.pages.page_moves import BlockGroup, Int64

BUFFERS = 2
"""Buffers of each direction: the device copies one while the host copies the other."""

BUFFER_BYTES = 2**23
"""Bytes of a buffer, unless a block is larger. An estimate: it takes a GPU 0.2 to 0.4 ms to copy as much, a multiple of
what it takes to begin a copy and to wait for it."""


class BlockCopier(Protocol):
    """Copies blocks between the device and lines of host memory. For one thread at a time."""

    def store(self, group: int, block_ids: Int64, lines: torch.Tensor) -> None:
        """Copy blocks of a KV group to ``lines``, uint8 ``[num_blocks, bytes of a block]``; wait until it is done."""
        ...

    def load(self, group: int, block_ids: Int64, lines: torch.Tensor) -> None:
        """Copy lines to blocks; wait until it is done. A line with a negative id is left out."""
        ...


class DeviceBlocks(Protocol):
    """The KV blocks of a device.

    Attributes:
        num_blocks: size of the pool, the null block included.
        block_bytes: bytes of a block of each KV group.
        layouts: of each KV group, 16 bytes that name the meaning of a block's bytes.
    """

    num_blocks: int
    block_bytes: Sequence[int]
    layouts: Sequence[bytes]

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        """Return uint8 memory of the host which the device copies to and from without a detour."""
        ...

    def steps(self) -> Callable[[], None]:
        """Return a function that waits until the steps launched so far have run, for any thread."""
        ...

    def copier(self, num_bytes: int) -> BlockCopier:
        """Return a copier of up to ``num_bytes`` at a time."""
        ...


class Staging:
    """Host memory that the device accesses, cut into buffers, and the slots for blocks in each of them.

    Slots of a group are numbered by their place in the whole memory, whose beginning belongs to no buffer: slot 0 is
    not used, like block 0 of a pool. Slots of groups whose blocks have different sizes overlap, so a buffer holds
    blocks of one group at a time.
    """

    def __init__(self, blocks: DeviceBlocks, num_buffers: int) -> None:
        most, least = max(blocks.block_bytes), min(blocks.block_bytes)
        # Where sizes differ, a slot may begin as late as one block after its buffer.
        self.buffer_bytes = most * max(1 if most == least else 2, BUFFER_BYTES // most)
        self._unused = most
        self._memory = blocks.host_memory(most + num_buffers * self.buffer_bytes)
        self._lines = [self._memory[: len(self._memory) // size * size].view(-1, size) for size in blocks.block_bytes]
        self.groups = [
            BlockGroup([lines.numpy()], layout) for lines, layout in zip(self._lines, blocks.layouts, strict=True)
        ]
        self.num_slots = max(len(lines) for lines in self._lines)

    def slots(self, buffer: int, group: int) -> range:
        """Return the slots of a group that lie in a buffer."""
        size, start = self._lines[group].shape[1], self._unused + buffer * self.buffer_bytes
        return range(-(-start // size), (start + self.buffer_bytes) // size)

    def lines(self, group: int, slots: range) -> torch.Tensor:
        """Return the memory of consecutive slots, uint8 ``[num_slots, bytes of a block]``."""
        return self._lines[group][slots.start : slots.stop]
