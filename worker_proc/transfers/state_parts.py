"""Slots of recurrent states as further KV groups of a mover."""

from collections.abc import Sequence

import msgspec
import torch

from quire.kernels.cpu.pages.page_moves import BlockGroup
from quire.protocol.model.kv_layout import KVLayout
from quire.protocol.wire.transfer_messages import MoveBlocks, MoveKind
from quire.worker_proc.states.rows import RowStates
from quire.worker_proc.transfers.pages import group_layout


class StateParts:
    """The parts of slots, each in a KV group of its own (``KVLayout.num_state_parts``), with slots as ids of blocks.

    A page has room for a part, and its header names the part by the group's layout.

    Attributes:
        memory: uint8 ``[parts of all places, bytes of a part]``; the parts of a place are consecutive.
        layouts: of each group, as ``group_layout``.
        num_slots: number of ids, slot 0 included.
    """

    def __init__(self, layout: KVLayout, states: RowStates, meaning: Sequence[object]) -> None:
        """``meaning``: as of ``block_groups``."""
        self._states = states
        self._first, self._count, size = len(layout.groups), layout.num_state_parts, layout.state_part_bytes
        groups = range(self._first, self._first + self._count)
        self.layouts = [group_layout(layout, group, size, meaning) for group in groups]
        self.memory = torch.zeros(0) if states.pool is None else states.pool.memory.view(-1, size)
        self.num_slots = states.num_slots

    def groups(self) -> list[BlockGroup]:
        """Return the groups of memory on a CPU."""
        return [BlockGroup([self.memory.numpy()], layout) for layout in self.layouts]

    def resolve(self, message: MoveBlocks) -> MoveBlocks:
        """Return a message, whose ids are checked, with the rows of ``memory`` in place of the slots of parts."""
        if message.groups is None or message.kind is MoveKind.DEMOTE:
            return message
        # Where the state of a slot lies changes only in steps of a row with that slot. No step after this message has
        # such a row before the copy has ended, so the place of now is right.
        ids, parts = message.block_ids.copy(), message.groups - self._first
        own = parts >= 0
        ids[own] = self._states.place[ids[own]] * self._count + parts[own]
        return msgspec.structs.replace(message, block_ids=ids)


def num_ids(num_groups: int, num_blocks: int, parts: StateParts | None) -> list[int]:
    """Return the number of ids of blocks or slots in each of ``num_groups`` groups, of which the parts are the last."""
    slots = [] if parts is None else [parts.num_slots] * len(parts.layouts)
    return [num_blocks] * (num_groups - len(slots)) + slots
