"""``logit_bias``: adds a number to the logits of single tokens."""

import numpy as np
import numpy.typing as npt
import torch

from quire.protocol.request.sampling_params import SamplingParams
from quire.worker_proc.batch.positions import Ints, SampledPositions
from quire.worker_proc.sampling.builtin.base import LogitPlaces, RowProcessor, RowTokens, find

Bias = tuple[Ints, npt.NDArray[np.float32]]


class LogitBias(RowProcessor[Bias]):
    """State of a row: tokens and their biases."""

    def prepare(self, positions: SampledPositions) -> None:
        if not self._same_rows(positions):
            self._places, index = self._tokens.at(*find(positions, self._tokens.rows))
            (self._added,) = self._transfer(self._values[index])
            self._places.on_device(self._vocab_size, self._transfer)

    def edit(self, logits: torch.Tensor, positions: SampledPositions) -> None:
        self.prepare(positions)
        logits.view(-1).index_add_(0, self._places.on_device(self._vocab_size, self._transfer), self._added)

    def _new_state(self, params: SamplingParams, prompt: list[int], output: list[int]) -> Bias | None:
        known = [(token, bias) for token, bias in params.logit_bias.items() if token < self._vocab_size]
        if not known:
            return None
        return np.array([token for token, _ in known], np.int64), np.array([bias for _, bias in known], np.float32)

    def _rows_changed(self) -> None:
        self._tokens = RowTokens({row: tokens for row, (tokens, _) in self._states.items()})
        self._values = np.concatenate([np.zeros(0, np.float32), *(values for _, values in self._states.values())])
        self._places = LogitPlaces(self._tokens.rows, self._tokens.rows)
        self._added = torch.zeros(0)
