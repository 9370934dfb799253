"""Presence, frequency and repetition penalties, from counts that stay on the device."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quire.kernels.penalties import PROMPT_BIT, apply_penalties
from quire.protocol.config import EngineConfig
from quire.protocol.sampling_params import SamplingParams
from quire.worker_proc.sampling.accept import Accepted
from quire.worker_proc.sampling.builtin.base import RowProcessor, find
from quire.worker_proc.sampling.positions import SampledPositions

Tokens = npt.NDArray[np.integer[Any]]
Text = tuple[Tokens, Tokens]
"""A prompt and an answer."""
UNTOUCHED = -1
"""For the kernel, the slot of a position without penalties."""


@dataclass(slots=True)
class Penalised:
    """Of one request. ``slot``: its row of the counts, -1 before it has one; ``num_listed``: how much of ``output`` is
    in them, which matters to ``apply`` alone."""

    repetition: float
    frequency: float
    presence: float
    prompt: list[int]
    output: list[int]
    slot: int = -1
    num_listed: int = 0


class Penalties(RowProcessor[Penalised]):
    """Owns the counts: int32 ``[num_slots, vocab_size]``, a slot for each row that has penalties and none for others.

    New tokens come to the counts in one of two ways: ``apply`` reads them off the lists; the engine, which does not
    wait for the host to know them, calls ``edit`` and says with ``accepted`` what became of it.

    Attributes:
        text_of: prompt and answer so far of a row that was just added. By default as its lists say.
    """

    def __init__(self, config: EngineConfig, device: torch.device, is_pin_memory: bool) -> None:
        self.text_of: Callable[[int], Text] = self._listed
        self._counts = torch.zeros(0, config.model.vocab_size, dtype=torch.int32, device=device)
        self._free: list[int] = []
        super().__init__(config, device, is_pin_memory)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for state in self._states.values():
            self._count(state.slot, np.array(state.output[state.num_listed :], np.int64))
            state.num_listed = len(state.output)
        return super().apply(logits)

    def edit(self, logits: torch.Tensor, positions: SampledPositions) -> None:
        self._locate(positions)
        drafts = self._no_drafts
        if positions.any_drafts:
            (drafts,) = self._transfer(positions.drafts)
        repetition, frequency, presence = self._factors
        apply_penalties(logits, self._slots, self._counts, repetition, frequency, presence, self._offsets, drafts)

    def accepted(self, positions: SampledPositions, tokens: torch.Tensor, accepted: Accepted | None) -> None:
        """The device adds up its own samples: nobody waits for them."""
        if not self._states:
            return
        self._locate(positions)
        at, begins = self._at, self._begins
        if accepted is not None:
            kept = np.isin(self._at_cpu, accepted.kept)
            at, begins = self._transfer(self._at_cpu[kept], self._begins_cpu[kept])
        self._add(begins + tokens[at])

    def _locate(self, positions: SampledPositions) -> None:
        """What the kernel is told of these positions, unless it is at hand."""
        if self._same_rows(positions):
            return
        which, at = find(positions, self._rows)
        slots = np.full(len(positions), UNTOUCHED, np.int32)
        slots[at] = self._row_slots[which]
        factors = np.zeros((3, len(positions)), np.float32)
        factors[:, at] = self._row_factors[:, which]
        self._at_cpu, self._begins_cpu = at, slots[at].astype(np.int64) * self._vocab_size
        none = np.full(len(positions), -1, np.int64)
        arrays = (slots, *factors, positions.offsets, none, at, self._begins_cpu)
        self._slots, *self._factors, self._offsets, self._no_drafts, self._at, self._begins = self._transfer(*arrays)

    def _new_state(self, params: SamplingParams, prompt: list[int], output: list[int]) -> Penalised | None:
        if not params.has_penalties:
            return None
        return Penalised(params.repetition_penalty, params.frequency_penalty, params.presence_penalty, prompt, output)

    def _rows_changed(self) -> None:
        taken = {state.slot for state in self._states.values()}
        self._grow(len(self._states))
        self._free = [slot for slot in range(len(self._counts)) if slot not in taken]
        for row, state in self._states.items():
            if state.slot < 0:
                state.slot = self._free.pop()
                self._fill(state, *self.text_of(row))
        states = self._states.values()
        self._rows = np.fromiter(self._states, np.int64, len(self._states))
        self._row_slots = np.array([state.slot for state in states], np.int32)
        factors = [(state.repetition, state.frequency, state.presence) for state in states]
        self._row_factors = np.array(factors, np.float32).reshape(-1, 3).T

    def _grow(self, num_slots: int) -> None:
        """By doubling: memory follows the most rows that had penalties at a time."""
        old = self._counts
        if num_slots > len(old):
            self._counts = old.new_zeros(max(num_slots, 2 * len(old)), self._vocab_size)
            self._counts[: len(old)] = old

    def _fill(self, state: Penalised, prompt: Tokens, output: Tokens) -> None:
        own = self._counts[state.slot]
        own.zero_()
        if len(prompt):
            (there,) = self._transfer(prompt.astype(np.int64))
            own[there] = PROMPT_BIT
        self._count(state.slot, output)
        state.num_listed = len(state.output)

    def _count(self, slot: int, tokens: Tokens) -> None:
        if len(tokens):
            self._add(*self._transfer(slot * self._vocab_size + tokens.astype(np.int64)))

    def _add(self, places: torch.Tensor) -> None:
        """One more of each of ``places``, indices into the flattened counts; a place may come several times."""
        self._counts.view(-1).index_add_(0, places, torch.ones_like(places, dtype=torch.int32))

    def _listed(self, row: int) -> Text:
        state = self._states[row]
        return np.array(state.prompt, np.int64), np.array(state.output, np.int64)
