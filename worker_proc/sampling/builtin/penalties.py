"""Presence, frequency and repetition penalties, from token counts that are kept on the logits' device."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from quire.kernels.common.penalty_rows import PenaltyRows
from quire.protocol.config import EngineConfig
from quire.protocol.request.sampling_params import SamplingParams
from quire.worker_proc.batch.positions import SampledPositions
from quire.worker_proc.device.transfer import Transfer
from quire.worker_proc.sampling.accept import Accepted
from quire.worker_proc.sampling.builtin.base import RowProcessor, find
from quire.worker_proc.sampling.builtin.token_counts import Tokens, make_counts

Text = tuple[Tokens, Tokens]
"""A prompt and its output so far."""
UNTOUCHED = -1
"""Slot of a position without penalties, for the kernel."""


@dataclass(slots=True)
class Penalised:
    """Penalties of one request.

    Attributes:
        repetition, frequency, presence: the penalties, as in SamplingParams.
        prompt, output: token ids of the request; ``output`` grows while the request runs.
        slot: index of the request in the token counts (``token_counts.py``: counts per vocabulary entry); -1 before it
            has one.
        num_listed: number of ``output`` tokens that ``apply`` has already added to the token counts.
    """

    repetition: float
    frequency: float
    presence: float
    prompt: list[int]
    output: list[int]
    slot: int = -1
    num_listed: int = 0


class Penalties(RowProcessor[Penalised]):
    """Owns the token counts, with a slot for each row that has penalties.

    New tokens are counted in one of two ways. ``apply`` reads them from the output lists. The engine does not wait for
    these lists: it calls ``edit``, and then ``accepted`` with the tokens on the device.

    Args:
        text_of: returns prompt and output of a row that was just added; by default those of its lists.
    """

    def __init__(
        self,
        config: EngineConfig,
        device: torch.device,
        is_pin_memory: bool,
        transfer: Transfer | None = None,
        text_of: Callable[[int], Text] | None = None,
    ) -> None:
        transfer = transfer or Transfer(device)
        self._text_of = text_of or self._listed
        self._counts = make_counts(config.model.vocab_size, device, transfer)
        self._free: list[int] = []
        self._drafts_of: SampledPositions | None = None
        super().__init__(config, device, is_pin_memory, transfer)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for state in self._states.values():
            tokens = np.array(state.output[state.num_listed :], np.int64)
            if len(tokens):
                self._counts.add(*self._transfer(np.full(len(tokens), state.slot, np.int64), tokens))
            state.num_listed = len(state.output)
        return super().apply(logits)

    def prepare(self, positions: SampledPositions) -> None:
        self._locate(positions)
        if positions.any_drafts and positions is not self._drafts_of:
            (self._drafts,) = self._transfer(positions.drafts)
            self._drafts_of = positions

    def edit(self, logits: torch.Tensor, positions: SampledPositions) -> None:
        self.prepare(positions)
        drafts = self._drafts if positions.any_drafts else self._no_drafts
        repetition, frequency, presence = self._factors
        rows = PenaltyRows(self._slots, repetition, frequency, presence, self._offsets, drafts)
        self._counts.penalise(logits, rows)

    def accepted(self, positions: SampledPositions, tokens: torch.Tensor, accepted: Accepted | None) -> None:
        """Count the samples on the device, without waiting for them."""
        if not self._states:
            return
        self._locate(positions)
        at, slots = self._at, self._slots_at
        if accepted is not None:
            kept = np.isin(self._at_cpu, accepted.kept)
            at, slots = self._transfer(self._at_cpu[kept], self._slots_at_cpu[kept])
        self._counts.add(slots, tokens[at])

    def _locate(self, positions: SampledPositions) -> None:
        """Build the kernel's arguments for these positions, unless they are those of the last call."""
        if self._same_rows(positions):
            return
        which, at = find(positions, self._rows)
        slots = np.full(len(positions), UNTOUCHED, np.int64)
        slots[at] = self._row_slots[which]
        factors = np.zeros((3, len(positions)), np.float32)
        factors[:, at] = self._row_factors[:, which]
        self._at_cpu, self._slots_at_cpu = at, slots[at]
        none = np.full(len(positions), -1, np.int64)
        arrays = (slots, *factors, positions.offsets, none, at, self._slots_at_cpu)
        self._slots, *self._factors, self._offsets, self._no_drafts, self._at, self._slots_at = self._transfer(*arrays)

    def _new_state(self, params: SamplingParams, prompt: list[int], output: list[int]) -> Penalised | None:
        if not params.has_penalties:
            return None
        return Penalised(params.repetition_penalty, params.frequency_penalty, params.presence_penalty, prompt, output)

    def _rows_changed(self) -> None:
        used = {state.slot for state in self._states.values()}
        self._counts.grow(len(self._states))
        self._free = [slot for slot in range(len(self._counts)) if slot not in used]
        for row, state in self._states.items():
            if state.slot < 0:
                state.slot = self._free.pop()
                self._counts.set_text(state.slot, *self._text_of(row))
                state.num_listed = len(state.output)
        states = self._states.values()
        self._rows = np.fromiter(self._states, np.int64, len(self._states))
        self._row_slots = np.array([state.slot for state in states], np.int64)
        factors = [(state.repetition, state.frequency, state.presence) for state in states]
        self._row_factors = np.array(factors, np.float32).reshape(-1, 3).T

    def _listed(self, row: int) -> Text:
        state = self._states[row]
        return np.array(state.prompt, np.int64), np.array(state.output, np.int64)
