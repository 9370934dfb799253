"""What a simulated worker returns beside tokens: pooled rows, and routed experts."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.protocol.model.model_config import ModelConfig
from quire.protocol.wire.arrays import Int32
from quire.protocol.wire.side_rows import POOLED, ROUTED_EXPERTS, Rows, SideRows
from quire.protocol.wire.worker_messages import NewRequestData, SchedulerOutput


@dataclass(slots=True)
class _Row:
    """A row that has rows of its own in results. ``num_sent``: how many of its positions were sent."""

    new: NewRequestData
    token_ids: Int32
    num_computed: int
    num_sent: int = 0
    active: bool = True


class SimulatedSideRows:
    """Makes pseudorandom pooled rows, which depend on the tokens, and routed experts, which depend on the position."""

    def __init__(self, model: ModelConfig) -> None:
        self._model = model
        self._rows: dict[int, _Row] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, new: NewRequestData, token_ids: Int32, *, is_forked: bool) -> None:
        """Add a row, if its request needs more than tokens. ``is_forked``: it computes nothing in its first step."""
        if new.pooling is not None or (new.sampling.return_routed_experts and self._model.moe is not None):
            self._rows[new.handle] = _Row(new, token_ids.copy(), new.num_computed_tokens - is_forked)

    def forget(self, handle: int) -> None:
        self._rows.pop(handle, None)

    def compute(self, diff: SchedulerOutput) -> list[SideRows]:
        """Return what the step makes. Call it after its new rows were added."""
        counts = dict(diff.counts)
        pooled: list[tuple[int, int, Rows]] = []
        experts: list[tuple[int, int, Rows]] = []
        for handle, row in list(self._rows.items()):
            row.active = (row.active or handle in diff.unparked) and handle not in diff.parked
            if not row.active:
                continue
            start, row.num_computed = row.num_computed, row.num_computed + counts.get(handle, 1)
            if row.new.pooling is not None:
                pooled += self._pooled(row, start)
            elif row.num_computed >= row.new.num_tokens:
                experts.append((handle, row.num_sent, [self._experts(row.num_sent, row.num_computed)]))
                row.num_sent = row.num_computed
        return SideRows.of(POOLED, pooled) + SideRows.of(ROUTED_EXPERTS, experts)

    def _pooled(self, row: _Row, start: int) -> Iterator[tuple[int, int, Rows]]:
        """Yield the part of a pooled row that computes the positions from ``start`` on, if it has one."""
        params, config = row.new.pooling, self._model.pooling
        assert params is not None and config is not None, "the scheduler refuses pooling without a configuration"
        width, ends = config.width(params.task, params.dimensions), row.num_computed >= len(row.token_ids)
        if params.task == "token_embed":
            yield row.new.handle, start, [_noise(row.token_ids[start : row.num_computed], width)]
        elif ends:
            total = np.array([row.token_ids.sum() % 2**31], np.int32)
            yield row.new.handle, 0, [_noise(total, width)]
        if ends:
            del self._rows[row.new.handle]

    def _experts(self, start: int, end: int) -> npt.NDArray[np.int32]:
        moe = self._model.moe
        assert moe is not None, "add() leaves it out"
        width = len(moe.layers) * moe.num_experts_per_token
        positions = np.arange(start, end, dtype=np.int64)[:, None]
        return ((positions * 31 + np.arange(width)) % moe.num_experts).astype(np.int32)


def _noise(values: Int32, width: int) -> npt.NDArray[np.float32]:
    """Return float32 ``[len(values), width]`` from -1 to 1."""
    mixed = (values.astype(np.int64)[:, None] + 1) * (2654435761 + 40503 * np.arange(width)) % 2**24
    return (mixed / 2**23 - 1).astype(np.float32)
