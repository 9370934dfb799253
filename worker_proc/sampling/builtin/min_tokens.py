"""``min_tokens``: bans stop tokens until the output has this many tokens."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from quire.protocol.config import EngineConfig
from quire.protocol.request.sampling_params import SamplingParams
from quire.worker_proc.batch.positions import Ints, SampledPositions
from quire.worker_proc.device.transfer import Transfer
from quire.worker_proc.sampling.builtin.base import NO_INTS, BanProcessor, LogitPlaces, RowTokens, find, model_tokens


@dataclass(frozen=True, slots=True)
class Minimum:
    num_tokens: int
    stops: Ints
    output: list[int]


class MinTokens(BanProcessor[Minimum]):
    """Reads only the outputs' lengths, which the host knows before it has the tokens.

    Args:
        num_output: returns the output length of some rows; by default the length of their lists.
    """

    _places: LogitPlaces
    _still: npt.NDArray[np.bool_] | None

    def __init__(
        self,
        config: EngineConfig,
        device: torch.device,
        is_pin_memory: bool,
        transfer: Transfer | None = None,
        num_output: Callable[[Ints], Ints] | None = None,
    ) -> None:
        self._eos = config.model.eos_token_ids
        self._num_output = num_output or self._listed
        super().__init__(config, device, is_pin_memory, transfer)

    def _bans(self, positions: SampledPositions) -> LogitPlaces:
        if not len(self._tokens.rows):
            return self._places
        num_output = self._num_output(self._tokens.rows)
        self._drop_satisfied(num_output)
        if len(num_output) != len(self._tokens.rows):
            return self._bans(positions)
        if not self._same_rows(positions):
            self._which, self._at = find(positions, self._tokens.rows)
            self._still = None
        still = num_output[self._which] + positions.offsets[self._at] < self._minimum[self._which]
        if self._still is None or not np.array_equal(still, self._still):
            self._still = still
            self._places, _ = self._tokens.at(self._which[still], self._at[still])
        return self._places

    def _drop_satisfied(self, num_output: Ints) -> None:
        """Drop the state of rows that have reached their minimum; outputs only grow."""
        done = self._tokens.rows[num_output >= self._minimum]
        if len(done):
            for row in done.tolist():
                del self._states[row]
            self._changed()

    def _listed(self, rows: Ints) -> Ints:
        return np.array([len(self._states[row].output) for row in rows.tolist()], np.int64)

    def _new_state(self, params: SamplingParams, prompt: list[int], output: list[int]) -> Minimum | None:
        if not params.min_tokens:
            return None
        stops = params.stop_token_ids + ([] if params.ignore_eos else self._eos)
        known = model_tokens(stops, self._vocab_size)
        return Minimum(params.min_tokens, known, output) if len(known) else None

    def _rows_changed(self) -> None:
        self._tokens = RowTokens({row: state.stops for row, state in self._states.items()})
        self._minimum = np.array([state.num_tokens for state in self._states.values()], np.int64)
        self._places = LogitPlaces(NO_INTS, NO_INTS)
        self._which = self._at = NO_INTS
        self._still = None
