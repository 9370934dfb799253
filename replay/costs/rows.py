"""A worker's rows without tensors: derives the shape and the sampling requests of each step from its diff."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from quire.protocol.wire.arrays import Int32
from quire.protocol.wire.worker_messages import NewRequestData, SchedulerOutput
from quire.replay.run.step_shape import StepShape


@dataclass(slots=True)
class _Row:
    """A row. Its computed tokens are ``base`` plus the number of steps while it is active, and ``base`` otherwise.

    ``pools``: it never samples, and is not active after its last token.
    """

    base: int
    num_known: int
    active: bool = True
    pools: bool = False


class SimulatedRows:
    """Applies diffs like a worker, in time proportional to the changes and not to the number of rows.

    The computed tokens of an active row grow by one per step implicitly; only rows with other counts are updated.
    """

    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}
        self._step = 0
        self._num_active = 0
        self._sum_base = 0
        self._prefilling: dict[int, _Row] = {}
        """Rows with known tokens that are not computed yet."""
        self._sampling: dict[int, None] = {}
        """Active rows whose last known token is computed, in the order in which that happened."""
        self._changed = True
        self._longest = 0
        """Largest ``base`` of the sampling rows; valid only if ``_longest_known``."""
        self._longest_known = False

    def hold(self, handles: Iterable[int]) -> None:
        """Add rows from before the start of the trace, which will only be removed."""
        for handle in handles:
            self._rows[handle] = _Row(0, 0, active=False)

    def apply(self, diff: SchedulerOutput) -> StepShape:
        """Apply one step's diff and return its shape; ``take_handles`` then returns its sampling requests."""
        for handle in diff.removed:
            self._deactivate(handle)
            del self._rows[handle]
            self._prefilling.pop(handle, None)
        for handle in diff.parked:
            self._deactivate(handle)
        forked = {handle for handle, _ in diff.forks}
        for new in diff.new_requests:
            self._add(new, new.num_computed_tokens - (new.handle in forked))  # as if it computed its last token
        for handle in diff.unparked:
            self._activate(handle)
        shape = self._shape(diff)
        self._advance(diff)
        shape.num_samples = len(self._sampling)
        return shape

    def steady_shape(self) -> StepShape:
        """Return the shape of the next step if its diff is empty."""
        active = self._num_active
        context = self._sum_base + active * (self._step + 1)
        return StepShape([], active, context, active, self._longest_decode())

    def fast_forward(self, count: int) -> None:
        """Apply ``count`` empty diffs. All active rows must be sampling."""
        self._step += count

    def take_handles(self) -> Int32 | None:
        """Return the handles that sample in the last applied step, or None if they are those of the step before."""
        if not self._changed:
            return None
        self._changed = False
        return np.fromiter(self._sampling, np.int32, len(self._sampling))

    @property
    def handles(self) -> list[int]:
        """The handles that sample in the last applied step."""
        return list(self._sampling)

    def _add(self, new: NewRequestData, num_computed: int) -> None:
        row = _Row(num_computed - self._step, new.num_tokens, pools=new.pooling is not None)
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
        """Return the longest context of the next step's decodes, recomputed only when the decoding rows change."""
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
                    if row.pools:
                        self._deactivate(handle)
                        continue
                    self._sampling[handle] = None
                    self._changed, self._longest_known = True, False
