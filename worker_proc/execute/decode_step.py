"""Steady decode step on the device alone: no part of it waits for the host or reads host memory.

Every row of the batch computes one token, its last sampled one. State that only the host changes (the rows and their
sampling parameters) is in ``RowColumns`` and is sent when it changes. ``decode_graphs`` captures and replays this step.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quire.kernels.cache.prepare_decode import DecodeInputs, advance_decode, prepare_decode
from quire.kernels.sampling.sampling import sample
from quire.kernels.sampling.sampling_noise import uniform
from quire.kernels.sampling.sampling_stats import row_statistics
from quire.worker_proc.batch.input_batch import InputBatch
from quire.worker_proc.device.transfer import Transfer
from quire.worker_proc.execute.forward import Forward
from quire.worker_proc.models.model import Inputs


class RowColumns:
    """Device copies of the batch columns that a decode step reads: views of one buffer, sent in one copy.

    Attributes:
        row_of: int32 ``[max_rows]``: 0, 1, 2 .. for the batch's rows, then -1.
        num_computed, top_k, rope_offset: int32; seed: int64; temperature, top_p, min_p: float32; all ``[max_rows]``.
    """

    _DTYPES = (np.int64, np.int32, np.int32, np.int32, np.float32, np.float32, np.float32, np.int32)

    def __init__(self, max_rows: int, transfer: Transfer, device: torch.device) -> None:
        self._transfer = transfer
        self._host: list[npt.NDArray[Any]] = [np.zeros(max_rows, dtype) for dtype in self._DTYPES]
        self._host[1][:] = -1
        num_bytes = sum(column.nbytes for column in self._host)
        self._bytes = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        views: list[torch.Tensor] = []
        start = 0
        for column in self._host:
            end = start + column.nbytes
            views.append(self._bytes[start:end].view(torch.from_numpy(column[:0]).dtype))
            start = end
        self.seed, self.row_of, self.num_computed, self.top_k, *others = views
        self.temperature, self.top_p, self.min_p, self.rope_offset = others
        self.row_of.fill_(-1)

    def refresh(self, batch: InputBatch) -> None:
        """Send the batch's columns to the device."""
        n = batch.num_rows
        source: tuple[npt.NDArray[Any], ...] = (
            batch.seed.view(np.int64),
            np.arange(n, dtype=np.int32),
            batch.num_computed,
            batch.top_k,
            batch.temperature,
            batch.top_p,
            batch.min_p,
            batch.rope_offset,
        )
        for column, values in zip(self._host, source, strict=True):
            column[:n] = values[:n]
        # A graph for more rows computes these too: without a row they read and write nothing.
        self._host[1][n:] = -1
        self._host[-1][n:] = 0  # their positions are 0, and an offset may be negative
        (sent,) = self._transfer(np.concatenate([column.view(np.uint8) for column in self._host]))
        self._transfer.then(lambda: self._bytes.copy_(sent))


class DecodeStep:
    """Owns the inputs and outputs of a decode step, in the same memory for every step. Other state is shared.

    Attributes:
        output: the memory of ``sampled`` and ``bad``, for one copy to the host.
        sampled: int64 ``[max_rows]``: the tokens of the last step that was sampled here.
        bad: bool ``[max_rows]``: whether the logits of each row were not finite.
    """

    def __init__(self, forward: Forward, last_sampled: torch.Tensor, transfer: Transfer) -> None:
        self._forward = forward
        self._last_sampled = last_sampled
        device, max_rows = last_sampled.device, len(last_sampled)
        self.max_rows = max_rows
        self.columns = RowColumns(max_rows, transfer, device)
        # Both results in one piece of memory, because a copy to the host costs the same for one byte as for some
        # thousand.
        self.output = torch.zeros(9 * max_rows, dtype=torch.uint8, device=device)
        self.sampled = self.output[: 8 * max_rows].view(torch.int64)
        self.bad = self.output[8 * max_rows :].view(torch.bool)
        self._inputs = DecodeInputs.empty(max_rows, len(forward.groups), device)
        vision = forward.model.config.vision
        self._turns = vision is not None and bool(vision.mrope_section)

    def forward(self, size: int) -> torch.Tensor:
        """Compute one token of each of the first ``size`` rows; rows past the batch are padding.

        Returns:
            Logits, float32 ``[size, vocab_size]``.
        """
        inputs, tables = self._prepared(size), self._forward.tables.table_set
        prepare_decode(self.columns.row_of[:size], self._last_sampled, self.columns.num_computed, tables, inputs)
        positions = inputs.positions
        if self._turns:
            positions = positions + self.columns.rope_offset[:size]
        return self._forward.logits_of_decode(
            Inputs(inputs.input_ids, positions), inputs.query_start_loc, inputs.seq_lens, inputs.slot_mapping
        )

    def sample(self, logits: torch.Tensor) -> None:
        """Sample (greedily, or with temperature and min-p) and advance; ``Sampler`` handles all other parameters."""
        size = len(logits)
        columns = self.columns
        statistics = row_statistics(logits)
        noise = uniform(columns.seed[:size], self._inputs.seq_lens[:size])
        tokens = sample(
            logits,
            noise,
            columns.temperature[:size],
            columns.top_k[:size],
            columns.top_p[:size],
            columns.min_p[:size],
            any_top_k=False,
            any_top_p=False,
            statistics=statistics,
        )
        self.sampled[:size] = tokens
        self.bad[:size] = statistics.bad
        self.advance(tokens)

    def advance(self, tokens: torch.Tensor) -> None:
        """Store ``tokens`` (int64, one per row) as the rows' next inputs, and advance the rows."""
        size = len(tokens)
        advance_decode(self.columns.row_of[:size], tokens, self._last_sampled, self.columns.num_computed)

    def _prepared(self, size: int) -> DecodeInputs:
        whole = self._inputs
        return DecodeInputs(
            whole.input_ids[:size],
            whole.positions[:size],
            whole.seq_lens[:size],
            whole.query_start_loc[: size + 1],
            whole.slot_mapping[:, :size],
        )
