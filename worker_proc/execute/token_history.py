"""Brings sampled tokens to the host's side of the batch: behind the device by default, exact when somebody asks."""

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.worker_proc.batch.input_batch import InputBatch
from quire.worker_proc.execute.pending_result import HostCopy


@dataclass(frozen=True, slots=True)
class _Sampled:
    """One token per row of a step, on its way. ``starts``: how many tokens each row had before it."""

    handles: npt.NDArray[np.int32]
    serials: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int32]
    generation: int
    copy: HostCopy


class TokenHistory:
    """Owns which steps' tokens the batch's ``tokens`` and ``outputs`` lack; nobody else adds sampled ones there.

    Catching up waits for the device, so it is done only where the next step needs the tokens themselves: for drafts
    and for processors that look at the answer. What is there is taken without being asked for, and so is a step that
    lies far back: its result was sent long ago.
    """

    _MOST_BEHIND = 3
    """Copies to the host stay valid until three more have begun."""

    def __init__(self, batch: InputBatch) -> None:
        self._batch = batch
        self._behind: deque[_Sampled] = deque()

    def sampled(self, rows: npt.NDArray[np.int64], copy: HostCopy) -> None:
        """A step gave one token to each of ``rows``, whose ``num_known`` does not count it yet."""
        batch = self._batch
        self._behind.append(
            _Sampled(batch.handles[rows], batch.serial[rows], rows, batch.num_known[rows], batch.generation, copy)
        )
        while self._behind and (len(self._behind) == self._MOST_BEHIND or self._behind[0].copy.ready):
            self._take(self._behind.popleft())

    def catch_up(self) -> None:
        """Waits for the device: afterwards the host knows every token."""
        while self._behind:
            self._take(self._behind.popleft())

    def extend(self, row: int, tokens: list[int]) -> None:
        """``row`` got several tokens, which the host knows already; it was caught up before."""
        column = self._batch.tokens
        start = int(column.length[row])
        column.data[row, start : start + len(tokens)] = tokens
        column.length[row] = start + len(tokens)
        output = self._batch.outputs.data[row]
        if output is not None:
            output += tokens

    def forget(self) -> None:
        """All rows are gone."""
        self._behind.clear()

    def _take(self, step: _Sampled) -> None:
        tokens = step.copy.arrays()[0]
        rows, starts, batch = step.rows, step.starts, self._batch
        if step.generation != batch.generation:  # rows have moved, or are gone, since
            rows = np.array([batch.row_of.get(handle, -1) for handle in step.handles.tolist()], np.int64)
            # A handle may be another request's by now, or the same one's that came again with its tokens.
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
