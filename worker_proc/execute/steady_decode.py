"""When a step is a steady decode step, and what the host does about one: next to nothing."""

import numpy as np
import numpy.typing as npt
import torch

from quire.protocol.wire.worker_messages import SchedulerOutput
from quire.worker_proc.batch.group_tables import MultiGroupBlockTable
from quire.worker_proc.batch.input_batch import InputBatch
from quire.worker_proc.device.transfer import Transfer
from quire.worker_proc.execute.decode_graphs import DecodeGraphs
from quire.worker_proc.execute.pending_result import HostCopies
from quire.worker_proc.sampling.sampler import Sampled


class SteadyDecode:
    """Launches the steps in which every row computes one token, its last; others make what the device holds stale.

    Owns whether the device's columns are those of the batch.
    """

    def __init__(
        self,
        graphs: DecodeGraphs,
        batch: InputBatch,
        tables: MultiGroupBlockTable,
        last_sampled: torch.Tensor,
        transfer: Transfer,
        copies: HostCopies,
    ) -> None:
        self.graphs = graphs
        self._batch, self._tables = batch, tables
        self._last_sampled, self._transfer, self._copies = last_sampled, transfer, copies
        self._steady = False

    def leave(self) -> None:
        """A step is run in another way: what the device has of the rows is not theirs any more."""
        self._steady = False

    def takes(self, step: SchedulerOutput) -> bool:
        """Whether the step, whose diff is applied, is one; it must be launched then.

        Raises:
            StepRefused: it is, and a row has no block for its token.
        """
        changed = step.removed or step.new_requests or step.parked or step.unparked or step.counts or step.drafts
        if changed or not self._steady:
            self._steady = self._all_decode(step)
            if not self._steady:
                return False
            self._send_rows()
            self._require_blocks(np.arange(self._batch.num_rows))
        else:
            self._require_new_blocks()
        return True

    def _all_decode(self, step: SchedulerOutput) -> bool:
        batch, n = self._batch, self._batch.num_rows
        one_per_row = not step.drafts and all(count == 1 for _, count in step.counts)
        return bool(
            n and one_per_row and batch.active[:n].all() and (batch.num_known[:n] - batch.num_computed[:n] == 1).all()
        )

    def _send_rows(self) -> None:
        """Rows changed, or were computed otherwise: the device is told them anew."""
        batch, n = self._batch, self._batch.num_rows
        self.graphs.step.columns.refresh(batch)
        # Who came with all but one of its tokens computed has not sampled here.
        given = np.flatnonzero(batch.num_computed[:n] < batch.tokens.length[:n])
        if len(given):
            tokens = batch.tokens.data[given, batch.num_computed[given]].astype(np.int64)
            rows, ids = self._transfer(given, tokens)
            self._last_sampled[rows] = ids

    def _require_new_blocks(self) -> None:
        """Only a row that begins a block can lack one."""
        computed = self._batch.num_computed[: self._batch.num_rows]
        for block_size in {table.block_size for table in self._tables.tables}:
            beginning = np.flatnonzero(computed % block_size == 0)
            if len(beginning):
                self._require_blocks(beginning)

    def _require_blocks(self, rows: npt.NDArray[np.int64]) -> None:
        """Raises StepRefused: one of ``rows`` has no block, or the null block, where its next token goes."""
        for table in self._tables.tables:
            table.slots(rows, self._batch.num_computed[rows].astype(np.int64))

    def launch(self, *, sampling: bool) -> Sampled | torch.Tensor:
        """Run the step with its sampling, or up to the logits; the caller advances the batch.

        Returns:
            Tokens, in memory that the next step overwrites once their copy is done; or logits ``[num_rows, vocab]``, of
            which the caller tells ``graphs.step.advance`` what was sampled.
        """
        n = self._batch.num_rows
        self._copies.before_next()
        logits = self.graphs.run(n, sampling=sampling)
        step = self.graphs.step
        return Sampled(step.sampled[:n], step.bad[:n]) if logits is None else logits
