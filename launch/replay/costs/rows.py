"""A worker's rows as numbers only: what a diff makes a step cost, and who gets a token from it."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from quire.launch.replay.run.step_shape import StepShape
from quire.protocol.wire.arrays import Int32
from quire.protocol.wire.worker_messages import NewRequestData, SchedulerOutput


@dataclass(slots=True)
class _Row:
    """``base`` and the number of steps so far add up to its computed tokens, while it is active; else it has those."""

    base: int
    num_known: int
    active: bool = True


class SimulatedRows:
    """Applies diffs as a worker does, in time that follows what changed and not how many rows there are.

    An active row's computed tokens grow by one in each step by themselves; only rows that did otherwise are touched.
    """

    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}
        self._step = 0
        self._num_active = 0
        self._sum_base = 0
        self._prefilling: dict[int, _Row] = {}
        """Rows with known tokens that are not computed."""
        self._sampling: dict[int, None] = {}
        """Active rows whose last known token is computed, in the order in which they came to it."""
        self._changed = True
        self._longest = 0
        """Largest ``base`` of the sampling rows, where ``_longest_known``."""
        self._longest_known = False

    def hold(self, handles: Iterable[int]) -> None:
        """Rows that were there before anything that is told, and only wait to be removed."""
        for handle in handles:
            self._rows[handle] = _Row(0, 0, active=False)

    def apply(self, diff: SchedulerOutput) -> StepShape:
        """Take one step's diff; ``take_handles`` then says whose tokens it brings."""
        for handle in diff.removed:
            self._deactivate(handle)
            del self._rows[handle]
            self._prefilling.pop(handle, None)
        for handle in diff.parked:
            self._deactivate(handle)
        for new in diff.new_requests:
            self._add(new)
        for handle in diff.unparked:
            self._activate(handle)
        shape = self._shape(diff)
        self._advance(diff)
        shape.num_samples = len(self._sampling)
        return shape

    def steady_shape(self) -> StepShape:
        """Of the next step, if its diff is empty."""
        active = self._num_active
        context = self._sum_base + active * (self._step + 1)
        return StepShape([], active, context, active, self._longest_decode())

    def fast_forward(self, count: int) -> None:
        """As many steps whose diffs are empty, while all active rows sample."""
        self._step += count

    def take_handles(self) -> Int32 | None:
        """Who samples in the step just applied, where others than in the step before; else None."""
        if not self._changed:
            return None
        self._changed = False
        return np.fromiter(self._sampling, np.int32, len(self._sampling))

    @property
    def handles(self) -> list[int]:
        """Who samples in the step just applied."""
        return list(self._sampling)

    def _add(self, new: NewRequestData) -> None:
        row = _Row(new.num_computed_tokens - self._step, new.num_tokens)
        self._rows[new.handle] = self._prefilling[new.handle] = row
        self._num_active += 1
        self._sum_base += row.base

    def _activate(self, handle: int) -> None:
        row = self._rows[handle]
        row.active, row.base = True, row.base - self._step
        self._num_active += 1
        self._sum_base += row.base
        if handle not in self._prefilling:
            self._sampling[handle] = None
            self._changed, self._longest_known = True, False

    def _deactivate(self, handle: int) -> None:
        row = self._rows[handle]
        if not row.active:
            return
        self._num_active -= 1
        self._sum_base -= row.base
        row.active, row.base = False, row.base + self._step
        if handle in self._sampling:
            del self._sampling[handle]
            self._changed = True
            self._longest_known = False

    def _longest_decode(self) -> int:
        """Context of the longest row that decodes in the next step; looked for where others decode than before."""
        if not self._sampling:
            return 0
        if not self._longest_known:
            self._longest = max(self._rows[handle].base for handle in self._sampling)
            self._longest_known = True
        return self._longest + self._step + 1

    def _shape(self, diff: SchedulerOutput) -> StepShape:
        num_decodes = self._num_active
        context = self._sum_base + num_decodes * (self._step + 1)
        prefills = []
        for handle, count in diff.counts:
            computed = self._rows[handle].base + self._step
            prefills.append((count, computed))
            num_decodes -= 1
            context -= computed + 1
        return StepShape(prefills, num_decodes, context, 0, self._longest_decode())

    def _advance(self, diff: SchedulerOutput) -> None:
        for handle, count in diff.counts:
            self._rows[handle].base += count - 1
            self._sum_base += count - 1
        self._step += 1
        if self._prefilling:
            for handle, row in list(self._prefilling.items()):
                if row.active and row.base + self._step >= row.num_known:
                    del self._prefilling[handle]
                    self._sampling[handle] = None
                    self._changed, self._longest_known = True, False
