"""Detection and launch of steady decode steps, which need almost no work on the host."""

import numpy as np
import numpy.typing as npt
import torch

from quire.protocol.config import EngineConfig
from quire.protocol.wire.worker_messages import SchedulerOutput
from quire.worker_proc.batch.group_tables import MultiGroupBlockTable
from quire.worker_proc.batch.input_batch import InputBatch
from quire.worker_proc.device.transfer import Transfer
from quire.worker_proc.execute.decode_graphs import DecodeGraphs
from quire.worker_proc.execute.decode_step import DecodeStep
from quire.worker_proc.execute.forward import Forward
from quire.worker_proc.execute.pending_result import HostCopies
from quire.worker_proc.execute.verify_step import VerifyStep
from quire.worker_proc.sampling.sampler import SampledTokens


class SteadyLauncher:
    """Launches steps in which every row computes one token, its last one.

    Owns the flag whether the device's columns are up to date; any other step makes them stale.
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

    @classmethod
    def make(
        cls,
        config: EngineConfig,
        forward: Forward,
        batch: InputBatch,
        last_sampled: torch.Tensor,
        transfer: Transfer,
        copies: HostCopies,
    ) -> "SteadyLauncher":
        """Make the steps and their graphs; attention must not need lengths on the host."""
        step, verify = DecodeStep(forward, last_sampled, transfer), None
        if config.num_speculative_tokens:
            verify = VerifyStep(forward, batch, transfer, 1 + config.num_speculative_tokens)
        eager = config.enforce_eager or last_sampled.device.type != "cuda" or not forward.model.can_be_captured
        graphs = DecodeGraphs(step, verify, forward.model.build.additions, eager=eager)
        return cls(graphs, batch, forward.tables, last_sampled, transfer, copies)

    def leave(self) -> None:
        """Mark the device's columns as stale, because another kind of step runs."""
        self._steady = False

    def enter(self, step: SchedulerOutput) -> bool:
        """Return whether the step, whose diff is applied, is a steady decode step; if so, it must be launched here.

        Sends the rows' columns to the device if they are stale.

        Raises:
            StepRefused: it is a steady decode step, but a row has no block for its token.
        """
        rows = step.removed or step.new_requests or step.parked or step.unparked or step.chosen
        # Any change of rows makes the columns on the device stale. Appended blocks do not: their table entries were
        # sent with the diff.
        changed = rows or step.counts or step.drafts
        if changed or not self._steady:
            self._steady = self._all_decode(step)
            if not self._steady:
                return False
            self._send_rows()
            # Kernels do not check. A row without a block would write its keys to a block of another request.
            self._require_blocks(np.arange(self._batch.num_rows))
        else:
            self._require_new_blocks()
        return True

    def _all_decode(self, step: SchedulerOutput) -> bool:
        batch, n = self._batch, self._batch.num_rows
        one_per_row = not step.drafts and all(count == 1 for _, count in step.counts) and batch.samples[:n].all()
        return bool(
            n
            and one_per_row
            and batch.active[:n].all()
            and (batch.num_known[:n] - batch.num_computed[:n] == 1).all()
            # The last token of a prompt may be given as an embedding.
            and (batch.num_computed[:n] >= batch.given_end[:n]).all()
        )

    def _send_rows(self) -> None:
        """Send the columns of all rows to the device, after row changes or other steps."""
        batch, n = self._batch, self._batch.num_rows
        self.graphs.step.columns.refresh(batch)
        # A request admitted with all but its last token computed has no sampled token on the device yet.
        admitted = np.flatnonzero(batch.num_computed[:n] < batch.tokens.length[:n])
        if len(admitted):
            tokens = batch.tokens.data[admitted, batch.num_computed[admitted]].astype(np.int64)
            rows, ids = self._transfer(admitted, tokens)
            self._transfer.then(lambda: self._last_sampled.index_copy_(0, rows, ids))

    def _require_new_blocks(self) -> None:
        """Check the rows whose next token starts a block; the others cannot lack one."""
        computed = self._batch.num_computed[: self._batch.num_rows]
        for block_size in {table.block_size for table in self._tables.tables}:
            beginning = np.flatnonzero(computed % block_size == 0)
            if len(beginning):
                self._require_blocks(beginning)

    def _require_blocks(self, rows: npt.NDArray[np.int64]) -> None:
        """Raise StepRefused if one of ``rows`` has no block for its next token."""
        for table in self._tables.tables:
            table.slots(rows, self._batch.num_computed[rows].astype(np.int64))

    def launch(self, *, sampling: bool) -> SampledTokens | torch.Tensor:
        """Run the step with or without sampling; the caller advances the batch.

        Returns:
            With sampling: tokens, in memory that the next step overwrites after their copy is done. Otherwise logits
            ``[num_rows, vocab]``; the caller must sample and pass the tokens to ``graphs.step.advance``.
        """
        n = self._batch.num_rows
        # The graph writes its tokens to the same memory in each step, so that the device must have copied the last ones
        # out first.
        self._copies.before_next()
        logits = self.graphs.run(n, sampling=sampling)
        step = self.graphs.step
        return SampledTokens(step.sampled[:n], step.bad[:n]) if logits is None else logits
