"""What built-in processors share: state by row, and the positions at which a step samples those rows.

A step costs a few array operations over all rows that have a feature; rows without it are not looked at. What depends
on the rows alone is computed when they change, and kept on the device until they change again.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
import torch

from quire.protocol.config import EngineConfig
from quire.protocol.request.logits_processors import BatchUpdate, LogitsProcessor, apply_update
from quire.protocol.request.sampling_params import SamplingParams
from quire.worker_proc.batch.positions import Ints, SampledPositions
from quire.worker_proc.device.transfer import Transfer
from quire.worker_proc.sampling.accept import Accepted

State = TypeVar("State")

NO_INTS: Ints = np.zeros(0, np.int64)


def ranges(starts: Ints, counts: Ints) -> Ints:
    """``starts[i], starts[i] + 1, ...``, ``counts[i]`` numbers, one run behind the other."""
    ends = np.cumsum(counts)
    return np.repeat(starts - ends + counts, counts) + np.arange(ends[-1] if len(ends) else 0)


def find(positions: SampledPositions, rows: Ints) -> tuple[Ints, Ints]:
    """Where ``rows`` are sampled: indices into ``rows``, and the positions that belong to them."""
    first = np.searchsorted(positions.rows, rows)
    counts = np.searchsorted(positions.rows, rows, side="right") - first
    return np.repeat(np.arange(len(rows)), counts), ranges(first, counts)


@dataclass(slots=True)
class Places:
    """Single logits, each a position and a token: int64 ``[n]`` both. None is there twice, but for bans.

    ``on_device`` are their indices into the flattened logits; copied once.
    """

    positions: Ints
    tokens: Ints
    _flat: torch.Tensor | None = field(default=None, init=False)

    def on_device(self, vocab_size: int, transfer: Transfer) -> torch.Tensor:
        if self._flat is None:
            (self._flat,) = transfer(self.positions * vocab_size + self.tokens)
        return self._flat


class RowTokens:
    """Some tokens of some rows, one row behind the other.

    Attributes:
        rows: int64 ``[num_rows]``.
        tokens: int64, of all rows; ``lengths[i]`` of them, from ``starts[i]`` on, are of ``rows[i]``.
    """

    def __init__(self, of_row: Mapping[int, Ints]) -> None:
        self.rows = np.fromiter(of_row, np.int64, len(of_row))
        self.lengths = np.fromiter((len(tokens) for tokens in of_row.values()), np.int64, len(of_row))
        self.starts = np.cumsum(self.lengths) - self.lengths
        self.tokens = np.concatenate([NO_INTS, *of_row.values()])

    def at(self, which: Ints, positions: Ints) -> tuple[Places, Ints]:
        """The tokens of ``rows[which[i]]`` at ``positions[i]``, and their indices into ``tokens``."""
        counts = self.lengths[which]
        index = ranges(self.starts[which], counts)
        return Places(np.repeat(positions, counts), self.tokens[index]), index


def model_tokens(tokens: Sequence[int], vocab_size: int) -> Ints:
    """Those of ``tokens`` that the model has."""
    given = np.array(tokens, np.int64)
    return given[(given >= 0) & (given < vocab_size)]


class RowProcessor(LogitsProcessor, Generic[State]):
    """Keeps a state for each row that has the feature; ``_states`` follows the batch.

    ``edit`` is what the engine calls, with any number of positions per row; ``apply`` is its case of one position for
    each row. Logits are contiguous, and changed in place.
    """

    def __init__(self, config: EngineConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._vocab_size = config.model.vocab_size
        self._device = device
        self._transfer = Transfer(device)
        self._states: dict[int, State] = {}
        self._found_for: Ints | None = None
        self._rows_changed()

    @property
    def active(self) -> bool:
        """Whether any row has the feature."""
        return bool(self._states)

    @abstractmethod
    def edit(self, logits: torch.Tensor, positions: SampledPositions) -> None:
        """Change float32 ``[len(positions), vocab_size]``, as if the drafts before a position were its answer's."""

    @abstractmethod
    def _new_state(self, params: SamplingParams, prompt: list[int], output: list[int]) -> State | None:
        """Of a request; None: it does not have the feature."""

    @abstractmethod
    def _rows_changed(self) -> None:
        """``_states`` has changed: forget what was derived from it, or derive it again."""

    def accepted(self, positions: SampledPositions, tokens: torch.Tensor, accepted: Accepted | None) -> None:
        """What became of the last positions; see ``LogitsProcessors.accepted``."""

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if self._states:
            self.edit(logits, SampledPositions.one_per_row(np.arange(len(logits))))
        return logits

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if apply_update(self._states, batch_update, self._new_state):
            self._changed()

    def reset(self) -> None:
        """The batch is empty, whatever updates were not told."""
        self._states.clear()
        self._changed()

    def _changed(self) -> None:
        self._found_for = None
        self._rows_changed()

    def _same_rows(self, positions: SampledPositions) -> bool:
        """Whether these are the rows that were asked about last, and nothing changed since."""
        same = self._found_for is not None and np.array_equal(self._found_for, positions.rows)
        self._found_for = positions.rows
        return same


class BanProcessor(RowProcessor[State]):
    """Takes single tokens away."""

    @abstractmethod
    def bans(self, positions: SampledPositions) -> Places:
        """What must not be sampled; may name a place twice. The same object while it has not changed."""

    def edit(self, logits: torch.Tensor, positions: SampledPositions) -> None:
        self.ban(logits, self.bans(positions))

    def ban(self, logits: torch.Tensor, places: Places) -> None:
        if len(places.positions):
            # Of torch's ways to write single numbers, those by index_*_ do not wake other threads for a few of them.
            logits.view(-1).index_fill_(0, places.on_device(self._vocab_size, self._transfer), -torch.inf)
