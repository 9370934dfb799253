"""The slots of recurrent states of a fake worker. A state is a number that depends on all tokens before it."""

from collections.abc import Callable
from typing import Any

from quire.protocol.wire.worker_messages import SchedulerOutput

ZERO = 0
_NOTHING = -1
"""What slots begin with, which no request may read."""


class FakeStates:
    """Checks that each row begins a step with the state of exactly its tokens. ``tag``: of a row, from a context.

    A slot has ``num_parts`` parts, each of which is a list of one number that names the state and the part.
    """

    def __init__(self, num_slots: int, tag: Callable[[Any, int], int], num_parts: int = 1) -> None:
        self._num_parts = num_parts
        self.slots = [self._parts(_NOTHING) for _ in range(num_slots)]
        self._tag = tag
        self._awaiting: set[int] = set()
        """Slots of rows that were forked in the last step: their states are copied in this one."""

    def forget(self) -> None:
        self.slots = [self._parts(_NOTHING) for _ in self.slots]

    def _parts(self, state: int) -> list[list[int]]:
        return [[state ^ part << 80] for part in range(self._num_parts)]

    def apply(self, diff: SchedulerOutput, rows: dict[int, Any]) -> None:
        """Apply a diff after its rows were removed and added."""
        own = [] if diff.state_slots is None else diff.state_slots.tolist()
        assert len(own) == (len(diff.new_requests) if self.slots else 0), "a new request has no slot, or several"
        for new, slot in zip(diff.new_requests, own, strict=False):
            rows[new.handle].slot = slot
        held = [row.slot for row in rows.values() if row.slot]
        assert len(held) == len(set(held)), "two requests have one slot"
        added = {rows[new.handle].slot for new in diff.new_requests}
        for source, target in diff.state_copies:
            assert 0 < source < len(self.slots) and 0 < target < len(self.slots) and source != target
            others = {row.slot for row in rows.values() if row.added_in < diff.step} - self._awaiting
            assert target not in others, f"slot {target} is copied to, and has the state of a request"
            self.slots[target] = [part.copy() for part in self.slots[source]]
        forked = {handle for handle, _ in diff.forks}
        self._awaiting = {rows[handle].slot for handle in forked if handle in rows}
        for slot in diff.blocks_to_zero:
            assert slot in added, f"slot {slot} is zeroed, and belongs to no new request"
            self.slots[slot] = self._parts(ZERO)

    def read(self, row: Any, start: int) -> None:
        """Check the state with which a row computes from ``start`` on."""
        want = self._tag(row, row.contexts[start - 1]) if start else ZERO
        assert not self.slots or self.slots[row.slot] == self._parts(want), (
            f"{row.request_id} has another state at {start}"
        )

    def write(self, row: Any) -> None:
        """Set the state that a row has after a step."""
        if self.slots and row.num_computed:
            self.slots[row.slot] = self._parts(self._tag(row, row.contexts[row.num_computed - 1]))
