"""A step in which every row decodes, some with draft tokens, from inputs in fixed memory: it can be a CUDA graph.

All tokens are sampled. Rows may have different numbers of draft tokens, up to the configured maximum: the tokens of
the graph that are left over are padding. Sampling and the acceptance of drafts follow outside the graph.
"""

from dataclasses import dataclass

import numpy as np
import torch

from quire.kernels.cache.slot_mapping import compute_slot_mappings
from quire.worker_proc.batch.input_batch import InputBatch
from quire.worker_proc.batch.step_inputs import StepInputs
from quire.worker_proc.device.transfer import Transfer
from quire.worker_proc.execute.forward import Forward
from quire.worker_proc.models.model import Inputs


@dataclass(frozen=True, slots=True)
class _Memory:
    """Inputs of a step of ``size`` rows: views of ``packed``.

    Attributes:
        token_ids, positions, turns: int64 ``[size * max_query_len]``; the last are the positions of the rotary
            embedding.
        query_start_loc: int32 ``[size + 1]``; seq_lens, row_of: int32 ``[size]``, -1 for padding rows.
        slots: int64 ``[num_groups, size * max_query_len]``, computed by the step.
    """

    packed: torch.Tensor
    token_ids: torch.Tensor
    positions: torch.Tensor
    turns: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    row_of: torch.Tensor
    slots: torch.Tensor


class VerifyStep:
    """Owns the inputs of such steps, in the same memory for every step of a size. Other state is shared.

    Args:
        max_query_len: maximum number of tokens of a row: its last known one, and draft tokens.
    """

    def __init__(self, forward: Forward, batch: InputBatch, transfer: Transfer, max_query_len: int) -> None:
        self._forward, self._tables, self._batch = forward, forward.tables, batch
        self._transfer = transfer
        self.max_query_len = max_query_len
        self._memory: dict[int, _Memory] = {}

    def takes(self, inputs: StepInputs) -> bool:
        """Return whether the step can run here: all rows of the batch run, every token is sampled, and the host has it.

        That includes a step that may have draft tokens and for which none were found.
        """
        known = self._batch.tokens.length
        return (
            len(inputs.rows) == self._batch.num_rows
            and len(inputs.sampled_tokens) == len(inputs.positions)
            and int(inputs.query_lens.max()) <= self.max_query_len
            and (inputs.drafts is not None or bool((inputs.positions < known[inputs.token_rows]).all()))
            and bool((inputs.positions >= self._batch.given_end[inputs.token_rows]).all())
        )

    def store(self, inputs: StepInputs, size: int) -> torch.Tensor:
        """Send the inputs to the memory of the graph of ``size`` rows, with the step's one copy.

        Returns:
            The rows, int64 ``[num_rows]`` on the device.

        Raises:
            StepRefused: a row has no block for one of its tokens.
        """
        for table in self._tables.tables:
            table.require_slots(inputs.rows, inputs.seq_lens - inputs.query_lens, inputs.seq_lens)
        num_rows, num_tokens = len(inputs.rows), len(inputs.positions)
        tokens = size * self.max_query_len
        wide, narrow = np.zeros((3, tokens), np.int64), np.zeros(3 * size + 1, np.int32)
        wide[0, :num_tokens] = self._batch.tokens.data[inputs.token_rows, inputs.positions]
        wide[1, :num_tokens] = inputs.positions
        wide[2, :num_tokens] = inputs.positions + self._batch.rope_offset[inputs.token_rows]
        starts, lens, rows = narrow[: size + 1], narrow[size + 1 : 2 * size + 1], narrow[2 * size + 1 :]
        starts[: num_rows + 1], starts[num_rows + 1 :] = inputs.query_start_loc, num_tokens
        lens[:num_rows] = inputs.seq_lens
        rows[:] = -1
        rows[:num_rows] = inputs.rows
        sent, own = self._transfer(np.concatenate([wide.ravel().view(np.uint8), narrow.view(np.uint8)]), inputs.rows)
        packed = self._of(size).packed
        self._transfer.then(lambda: packed.copy_(sent))
        return own

    def forward(self, size: int) -> torch.Tensor:
        """Run the stored inputs.

        Returns:
            Logits of all tokens, float32 ``[size * max_query_len, vocab_size]``.
        """
        memory = self._of(size)
        tables = self._tables
        compute_slot_mappings(memory.query_start_loc, memory.positions, tables.table_set, memory.row_of, memory.slots)
        return self._forward.logits_of_decode(
            Inputs(memory.token_ids, memory.turns),
            memory.query_start_loc,
            memory.seq_lens,
            memory.slots,
            self.max_query_len,
        )

    def _of(self, size: int) -> _Memory:
        if size not in self._memory:
            tokens = size * self.max_query_len
            device = self._tables.table_set.device
            packed = torch.zeros(24 * tokens + 4 * (3 * size + 1), dtype=torch.uint8, device=device)
            wide = packed[: 24 * tokens].view(torch.int64).view(3, tokens)
            narrow = packed[24 * tokens :].view(torch.int32)
            narrow[2 * size + 1 :] = -1
            slots = torch.empty(len(self._tables.tables), tokens, dtype=torch.int64, device=device)
            starts, lens, rows = narrow[: size + 1], narrow[size + 1 : 2 * size + 1], narrow[2 * size + 1 :]
            self._memory[size] = _Memory(packed, wide[0], wide[1], wide[2], starts, lens, rows, slots)
        return self._memory[size]
