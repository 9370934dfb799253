"""Base classes of built-in processors: state per row, and the positions at which a step samples those rows.

A step costs a few array operations over the rows that use a feature, and nothing for other rows. Data that depends on
the rows alone is computed when they change, and kept on the device until they change again.
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
    """Concatenate the ranges ``starts[i], starts[i] + 1, ...`` of ``counts[i]`` numbers."""
    ends = np.cumsum(counts)
    return np.repeat(starts - ends + counts, counts) + np.arange(ends[-1] if len(ends) else 0)


def find(positions: SampledPositions, rows: Ints) -> tuple[Ints, Ints]:
    """Find the positions of ``rows``: returns indices into ``rows``, and the position of each."""
    first = np.searchsorted(positions.rows, rows)
    counts = np.searchsorted(positions.rows, rows, side="right") - first
    return np.repeat(np.arange(len(rows)), counts), ranges(first, counts)


@dataclass(slots=True)
class LogitPlaces:
    """Single logits, each given by its position and token: int64 ``[n]`` both. Only bans may contain duplicates.

    ``on_device`` returns their indices into the flattened logits, which are copied to the device once.
    """

    positions: Ints
    tokens: Ints
    _flat: torch.Tensor | None = field(default=None, init=False)

    def on_device(self, vocab_size: int, transfer: Transfer) -> torch.Tensor:
        if self._flat is None:
            (self._flat,) = transfer(self.positions * vocab_size + self.tokens)
        return self._flat


class RowTokens:
    """A list of tokens for each of some rows, concatenated.

    Attributes:
        rows: int64 ``[num_rows]``.
        tokens: int64; ``tokens[starts[i] : starts[i] + lengths[i]]`` is the list of ``rows[i]``.
    """

    def __init__(self, of_row: Mapping[int, Ints]) -> None:
        self.rows = np.fromiter(of_row, np.int64, len(of_row))
        self.lengths = np.fromiter((len(tokens) for tokens in of_row.values()), np.int64, len(of_row))
        self.starts = np.cumsum(self.lengths) - self.lengths
        self.tokens = np.concatenate([NO_INTS, *of_row.values()])

    def at(self, which: Ints, positions: Ints) -> tuple[LogitPlaces, Ints]:
        """Return the tokens of ``rows[which[i]]`` at ``positions[i]``, and their indices into ``tokens``."""
        counts = self.lengths[which]
        index = ranges(self.starts[which], counts)
        return LogitPlaces(np.repeat(positions, counts), self.tokens[index]), index


def model_tokens(tokens: Sequence[int], vocab_size: int) -> Ints:
    """Return the ``tokens`` that are in the model's vocabulary."""
    given = np.array(tokens, np.int64)
    return given[(given >= 0) & (given < vocab_size)]


class RowProcessor(LogitsProcessor, Generic[State]):
    """A processor with a state for each row that uses its feature (``_states``).

    The engine calls ``edit`` with any number of positions per row; ``apply`` is the case of one position per row.
    Logits are contiguous and changed in place.
    """

    def __init__(
        self, config: EngineConfig, device: torch.device, is_pin_memory: bool, transfer: Transfer | None = None
    ) -> None:
        """
        Args:
            transfer: sends arrays to the device; None: one of its own.
        """
        self._vocab_size = config.model.vocab_size
        self._transfer = transfer or Transfer(device)
        self._states: dict[int, State] = {}
        self._found_for: Ints | None = None
        self._rows_changed()

    @property
    def active(self) -> bool:
        """Whether any row uses the feature."""
        return bool(self._states)

    @abstractmethod
    def prepare(self, positions: SampledPositions) -> None:
        """Send to the device what ``edit`` needs for these positions, unless it is there already."""

    @abstractmethod
    def edit(self, logits: torch.Tensor, positions: SampledPositions) -> None:
        """Edit float32 ``[len(positions), vocab_size]``, as if the drafts before a position were output tokens."""

    @abstractmethod
    def _new_state(self, params: SamplingParams, prompt: list[int], output: list[int]) -> State | None:
        """Return the state of a new request, or None if it does not use the feature."""

    @abstractmethod
    def _rows_changed(self) -> None:
        """Drop or recompute what is derived from ``_states``, which has changed."""

    def accepted(self, positions: SampledPositions, tokens: torch.Tensor, accepted: Accepted | None) -> None:
        """Count the tokens of the last positions; see ``LogitsProcessors.accepted``."""

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
        """Start over with an empty batch, without regard to updates that were not applied."""
        self._states.clear()
        self._changed()

    def _changed(self) -> None:
        self._found_for = None
        self._rows_changed()

    def _same_rows(self, positions: SampledPositions) -> bool:
        """Return whether the positions have the rows of the last call, and no row has changed since that call."""
        same = self._found_for is not None and np.array_equal(self._found_for, positions.rows)
        self._found_for = positions.rows
        return same


class BanProcessor(RowProcessor[State]):
    """A processor that bans single tokens.

    Attributes:
        banned: the logits to ban at the positions that were last prepared.
    """

    banned = LogitPlaces(NO_INTS, NO_INTS)

    @abstractmethod
    def _bans(self, positions: SampledPositions) -> LogitPlaces:
        """Return the logits to ban, possibly with duplicates; the same object as long as they do not change."""

    def prepare(self, positions: SampledPositions) -> None:
        self.banned = self._bans(positions)
        if len(self.banned.positions):
            self.banned.on_device(self._vocab_size, self._transfer)

    def edit(self, logits: torch.Tensor, positions: SampledPositions) -> None:
        self.prepare(positions)
        self.ban(logits, self.banned)

    def _changed(self) -> None:
        self.banned = LogitPlaces(NO_INTS, NO_INTS)
        super()._changed()

    def ban(self, logits: torch.Tensor, places: LogitPlaces) -> None:
        if len(places.positions):
            # Of torch's ways to write single elements, index_*_ do not wake other threads for a few elements.
            logits.view(-1).index_fill_(0, places.on_device(self._vocab_size, self._transfer), -torch.inf)
