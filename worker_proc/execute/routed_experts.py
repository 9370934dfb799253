"""The experts to which each position was routed, kept by KV slot, and their way into the result of a step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quire.protocol.model.kv_layout import KVLayout
from quire.protocol.wire.side_rows import ROUTED_EXPERTS, SideRows
from quire.worker_proc.batch.block_table import BlockTable
from quire.worker_proc.batch.input_batch import InputBatch
from quire.worker_proc.batch.positions import Ints
from quire.worker_proc.batch.step_inputs import StepInputs
from quire.worker_proc.device.transfer import Transfer
from quire.worker_proc.models.routes import Routes

MOST_STEP_BYTES = 192 * 2**20
"""Bytes of the rows in the result of one step, which is one frame of a message. Requests beyond it fail; the scheduler
admits fewer."""

TOO_MANY_EXPERTS = (
    f"the routed experts of all requests in one step exceed {MOST_STEP_BYTES // 2**20} MiB: send fewer long requests "
    "with return_routed_experts at a time"
)

NOT_ASKED = -1
"""Number of reported positions of a row that does not ask for its experts."""


def group_of_experts(layout: KVLayout) -> int:
    """Return the index of the first KV group that keeps all positions; the configuration has checked that one does."""
    return next(index for index, group in enumerate(layout.groups) if group.keeps_all)


def expert_block_bytes(layout: KVLayout, routes: Routes | None) -> int:
    """Return the bytes of the table per block of the pool; 0 without ``routes``."""
    if routes is None:
        return 0
    return layout.groups[group_of_experts(layout)].block_size * routes.width * routes.dtype.itemsize


@dataclass(slots=True)
class RoutedRows:
    """Experts of the rows of a step that ask for them, from each row's first position that was not reported yet.

    Attributes:
        batch: the rows.
        reported: ``RoutedExpertTable``'s column of reported positions.
        table: ``RoutedExpertTable.values``.
        rows: int64 ``[n]``: the rows that report.
        handles: their requests.
        starts: int32 ``[n]``: first position of each.
        counts: int32 ``[n]``: number of positions of each; ``advance`` leaves out rejected draft tokens.
        ends: int64 ``[n]``: end of each in ``slots``.
        slots: int64 ``[num_positions]`` on the device.
        failed: requests that sample in this step, and whose positions exceed ``MOST_STEP_BYTES``; they are not among
            ``handles``. Those that do not sample report their positions in a later step.
    """

    batch: InputBatch
    reported: npt.NDArray[np.int32]
    table: torch.Tensor
    rows: Ints
    handles: list[int]
    starts: npt.NDArray[np.int32]
    counts: npt.NDArray[np.int32]
    ends: Ints
    slots: torch.Tensor
    failed: list[int]

    def read(self) -> torch.Tensor:
        """Return the experts of ``slots`` on the device, after the forward pass was launched."""
        return self.table.index_select(0, self.slots)

    def advance(self) -> None:
        """Move each row's mark of reported positions up to what it has computed. The rows must have advanced."""
        begins = self.ends - self.counts
        computed = self.batch.num_computed[self.rows]
        self.reported[self.rows] = computed
        self.counts = computed - self.starts
        self.ends = begins + self.counts

    def message(self, values: npt.NDArray[Any]) -> list[SideRows]:
        """Return the part of the result message. ``values``: the result of ``read`` on the host."""
        spans = zip(self.handles, self.starts.tolist(), self.counts.tolist(), self.ends.tolist(), strict=True)
        return SideRows.of(
            ROUTED_EXPERTS, [(handle, start, [values[end - count : end]]) for handle, start, count, end in spans]
        )

    @property
    def failures(self) -> list[tuple[int, str]]:
        """The (handle, reason) of each failed request."""
        return [(handle, TOO_MANY_EXPERTS) for handle in self.failed]


class RoutedExpertTable:
    """Owns the table ``[num_slots, width]`` of expert ids, beside the KV cache and with the slots of one KV group.

    Every computed token writes its row, whichever request has it, so that a hit in the prefix cache finds the experts
    of its positions.
    """

    def __init__(
        self,
        routes: Routes,
        layout: KVLayout,
        num_blocks: int,
        batch: InputBatch,
        tables: Sequence[BlockTable],
        transfer: Transfer,
        device: torch.device,
    ) -> None:
        self._routes, self._batch, self._transfer = routes, batch, transfer
        self._reported = batch.column(
            np.int32, lambda new: 0 if new.sampling.return_routed_experts else NOT_ASKED, NOT_ASKED
        )
        self.group = group_of_experts(layout)
        self._blocks = tables[self.group]
        num_slots = num_blocks * layout.groups[self.group].block_size
        # Not zeroed: positions are read after they are computed.
        self.values = torch.empty(num_slots, routes.width, dtype=routes.dtype, device=device)

    def store(self, slots: torch.Tensor) -> None:
        """Keep the experts of the pass that was launched last.

        Args:
            slots: int64 ``[num_tokens]`` on the device: slots of the tokens in this group. Padding, which is negative,
                is written to the null block.
        """
        self.values.index_copy_(0, slots.clamp(min=0), self._routes.take())

    def of_step(self, inputs: StepInputs) -> RoutedRows | None:
        """Find what the step reports, before its copy is sent; None if no row asks.

        A forked row has the positions of its parent, and its own copy of their last block only in the next step.
        """
        parents = inputs.rows[inputs.sampling]
        forked = np.flatnonzero(parents != inputs.sampled_rows)
        children = inputs.sampled_rows[forked]
        return self._rows(
            np.concatenate((inputs.rows, children)),
            np.concatenate((inputs.rows, parents[forked])),
            np.concatenate((inputs.seq_lens, self._batch.num_computed[children])),
            inputs.sampled_rows,
        )

    def of_steady_step(self) -> RoutedRows | None:
        """As ``of_step``, for a step in which every row computes one token."""
        rows = np.arange(self._batch.num_rows)
        return self._rows(rows, rows, self._batch.num_computed[rows] + 1, rows)

    def _rows(self, rows: Ints, sources: Ints, ends: npt.NDArray[np.int32], sampled: Ints) -> RoutedRows | None:
        """``sources``: the rows whose blocks have the positions of ``rows``, up to ``ends``. ``sampled``: rows."""
        asking = self._reported[rows] != NOT_ASKED
        if not asking.any():
            return None
        rows, sources, ends = rows[asking], sources[asking], ends[asking]
        starts = self._reported[rows]
        planned = ends - starts
        fits = np.cumsum(planned, dtype=np.int64) * self._routes.width * 4 <= MOST_STEP_BYTES
        failed = self._batch.handles[rows[~fits & np.isin(rows, sampled)]].tolist()
        rows, sources, starts, planned = rows[fits], sources[fits], starts[fits], planned[fits]
        bounds = np.cumsum(planned, dtype=np.int64)
        positions = np.arange(planned.sum()) - np.repeat(bounds - planned - starts, planned)
        (slots,) = self._transfer(self._blocks.slots(np.repeat(sources, planned), positions))
        handles = self._batch.handles[rows].tolist()
        return RoutedRows(
            self._batch, self._reported, self.values, rows, handles, starts, planned, bounds, slots, failed
        )
