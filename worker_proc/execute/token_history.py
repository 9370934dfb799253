"""Copies sampled tokens to the host's columns of the batch: late by default, and exact when a step needs them."""

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.worker_proc.batch.input_batch import InputBatch
from quire.worker_proc.execute.pending_result import HostCopy


@dataclass(frozen=True, slots=True)
class _Sampled:
    """Sampled tokens of a step, one per row, being copied. ``starts``: each row's number of tokens before them."""

    handles: npt.NDArray[np.int32]
    serials: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int32]
    generation: int
    copy: HostCopy


class TokenHistory:
    """Owns the list of steps whose sampled tokens are missing in the batch's ``tokens`` and ``outputs``.

    No other class adds sampled tokens to these columns. ``catch_up`` waits for the device, so it is called only if the
    next step needs the tokens on the host: for draft tokens, and for logits processors that read the output. Copies
    that are ready are stored at once, and so are those of the step before the previous one, whose result was already
    sent.
    """

    _MAX_PENDING = 3
    """A copy to the host stays valid until three more start."""

    def __init__(self, batch: InputBatch) -> None:
        self._batch = batch
        self._pending: deque[_Sampled] = deque()

    def sampled(self, rows: npt.NDArray[np.int64], copy: HostCopy) -> None:
        """Record that a step sampled one token for each of ``rows``.

        Call it after the launch and before the batch's ``num_known`` (known tokens per row) is increased for the
        sampled tokens: it reads their positions from ``num_known``.

        Args:
            copy: the copy of the tokens to the host, which may still run. The tokens are stored in the batch when it is
                ready.
        """
        batch = self._batch
        self._pending.append(
            _Sampled(batch.handles[rows], batch.serial[rows], rows, batch.num_known[rows], batch.generation, copy)
        )
        while self._pending and (len(self._pending) == self._MAX_PENDING or self._pending[0].copy.ready):
            self._take(self._pending.popleft())

    def catch_up(self) -> None:
        """Wait for the device and store all pending tokens."""
        while self._pending:
            self._take(self._pending.popleft())

    def replace_last(self, chosen: list[tuple[int, int]]) -> None:
        """Replace the last token, which was sampled, of each (handle, token)."""
        if chosen:
            self.catch_up()
        for handle, token in chosen:
            self._batch.replace_last(handle, token)

    def extend(self, row: int, tokens: list[int]) -> None:
        """Add several tokens, already on the host, to ``row``; call ``catch_up`` first."""
        column = self._batch.tokens
        start = int(column.length[row])
        column.data[row, start : start + len(tokens)] = tokens
        column.length[row] = start + len(tokens)
        output = self._batch.outputs.data[row]
        if output is not None:
            output += tokens

    def clear(self) -> None:
        """Discard pending tokens after all rows were removed."""
        self._pending.clear()

    def _take(self, step: _Sampled) -> None:
        tokens = step.copy.arrays()[0]
        rows, starts, batch = step.rows, step.starts, self._batch
        # Compared as one number: looking up each handle would cost every steady step what only a few steps need.
        if step.generation != batch.generation:  # rows have moved or were removed since
            rows = np.array([batch.row_of.get(handle, -1) for handle in step.handles.tolist()], np.int64)
            # A handle may be reused by another request, or by the same request readmitted with these tokens.
            same = (rows >= 0) & (batch.serial[rows] == step.serials)
            rows, starts, tokens = rows[same], starts[same], tokens[: len(same)][same]
        tokens = tokens[: len(rows)]
        batch.tokens.data[rows, starts] = tokens
        batch.tokens.length[rows] = starts + 1
        if batch.outputs.num_kept:
            for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
                output = batch.outputs.data[row]
                if output is not None:
                    output.append(token)
