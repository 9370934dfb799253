"""``allowed_token_ids``: all other tokens are banned."""

from dataclasses import dataclass

import torch

from quire.protocol.sampling_params import SamplingParams
from quire.worker_proc.sampling.builtin.base import NO_INTS, Places, RowProcessor, RowTokens, find, model_tokens
from quire.worker_proc.sampling.positions import Ints, SampledPositions


@dataclass(frozen=True, slots=True)
class Lists:
    """``at``: int64, the positions that have a list; ``places``: what is on the lists."""

    at: Ints
    places: Places


class AllowedTokenIds(RowProcessor[Ints]):
    """State of a row: its tokens."""

    def edit(self, logits: torch.Tensor, positions: SampledPositions) -> None:
        lists = self.lists(positions)
        if not len(lists.at):
            return
        flat, kept = logits.view(-1), lists.places.on_device(self._vocab_size, self._transfer)
        values = flat.index_select(0, kept)
        logits.index_fill_(0, self._at, -torch.inf)
        flat.index_copy_(0, kept, values)

    def lists(self, positions: SampledPositions) -> Lists:
        """What may be sampled at those positions that have such a list."""
        if not self._same_rows(positions):
            which, at = find(positions, self._tokens.rows)
            places, _ = self._tokens.at(which, at)
            self._lists = Lists(at, places)
            (self._at,) = self._transfer(at)
        return self._lists

    def _new_state(self, params: SamplingParams, prompt: list[int], output: list[int]) -> Ints | None:
        if params.allowed_token_ids is None:
            return None
        return model_tokens(params.allowed_token_ids, self._vocab_size)

    def _rows_changed(self) -> None:
        self._tokens = RowTokens(self._states)
        self._lists = Lists(NO_INTS, Places(NO_INTS, NO_INTS))
        self._at = torch.zeros(0, dtype=torch.int64)
