"""Memory of the slots of recurrent states."""

from collections.abc import Iterator, Sequence

import torch

from quire.kernels.cache.block_copy import (
    CacheSet,
    copy_blocks,
    copy_blocks_reference,
    zero_blocks,
    zero_blocks_reference,
)
from quire.protocol.model.kv_layout import STATE_ALIGNMENT, StateTensor, slot_bytes
from quire.worker_proc.batch.kv_cache import zeroed_bytes


class StatePool:
    """Slots side by side, with all states of a slot in one piece, so that copying a slot is one operation.

    Attributes:
        memory: uint8 ``[slots, bytes of a slot]``.
        tensors: views of the same memory, ``[slots, *shape]`` each, in the order of the layout. The dimensions after
            the first are contiguous.
    """

    def __init__(self, layout: Sequence[StateTensor], num_slots: int, device: torch.device, num_bytes: int = 0) -> None:
        """``num_bytes``: of a slot, if these are more than its tensors need."""
        size = max(num_bytes, slot_bytes(layout))
        self.memory = memory = zeroed_bytes(num_slots * size, device).view(num_slots, size)
        self._slots = CacheSet.of([memory], block_dim=0)
        self.tensors: list[torch.Tensor] = []
        start = 0
        for state in layout:
            own = memory[:, start : start + state.num_bytes].view(getattr(torch, state.dtype))
            self.tensors.append(own.view(num_slots, *state.shape))
            start += -(-state.num_bytes // STATE_ALIGNMENT) * STATE_ALIGNMENT

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy each source slot to its target, one after the other, on the device's current stream."""
        copy = copy_blocks if self._slots.pointers.is_cuda else copy_blocks_reference
        for together in _independent(pairs):
            copy(self._slots, torch.tensor(together, dtype=torch.int64))

    def zero(self, slots: Sequence[int]) -> None:
        """Zero slots, on the device's current stream."""
        if len(slots):
            zero = zero_blocks if self._slots.pointers.is_cuda else zero_blocks_reference
            zero(self._slots, torch.tensor(slots, dtype=torch.int64))


def _independent(pairs: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Split copies into runs in which none reads or writes what an earlier one writes, or writes what one reads."""
    run: list[tuple[int, int]] = []
    read: set[int] = set()
    written: set[int] = set()
    for source, target in pairs:
        if source in written or target in written | read:
            yield run
            run, read, written = [], set(), set()
        run.append((source, target))
        read.add(source)
        written.add(target)
    if run:
        yield run
