"""``allowed_token_ids``: bans all other tokens."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from quire.kernels.sampling.token_bitmask import WORD_BITS, apply_token_bitmask
from quire.protocol.request.sampling_params import SamplingParams
from quire.worker_proc.batch.positions import Ints, SampledPositions
from quire.worker_proc.sampling.builtin.base import RowProcessor, find, model_tokens

Words = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Lists:
    """Allowed tokens of some positions.

    Attributes:
        at: int64 ``[num_lists]``: the positions.
        words: int32 ``[num_lists, ceil(vocab_size / 32)]``: bit ``t % 32`` of word ``t // 32`` is token ``t``.
        sizes: int64 ``[num_lists]``: number of allowed tokens.
    """

    at: Ints
    words: Words
    sizes: Ints


class AllowedTokenIds(RowProcessor[tuple[Words, int]]):
    """State of a row: its allowed tokens as a bitmask, and their number."""

    def prepare(self, positions: SampledPositions) -> None:
        self.lists(positions)

    def edit(self, logits: torch.Tensor, positions: SampledPositions) -> None:
        lists = self.lists(positions)
        if len(lists.at):
            apply_token_bitmask(logits, self._at, self._words)

    def lists(self, positions: SampledPositions) -> Lists:
        """Return the allowed tokens of all positions that have a list."""
        if not self._same_rows(positions):
            which, at = find(positions, self._rows)
            self._lists = Lists(at, self._row_words[which], self._row_sizes[which])
            self._at, self._words = self._transfer(at, self._lists.words)
        return self._lists

    def _new_state(self, params: SamplingParams, prompt: list[int], output: list[int]) -> tuple[Words, int] | None:
        if params.allowed_token_ids is None:
            return None
        bits = np.zeros(-(-self._vocab_size // WORD_BITS) * WORD_BITS, np.bool_)
        bits[model_tokens(params.allowed_token_ids, self._vocab_size)] = True
        return np.packbits(bits, bitorder="little").view(np.int32), int(bits.sum())

    def _rows_changed(self) -> None:
        states = self._states.values()
        self._rows = np.fromiter(self._states, np.int64, len(states))
        num_words = -(-self._vocab_size // WORD_BITS)
        self._row_words = np.array([words for words, _ in states], np.int32).reshape(-1, num_words)
        self._row_sizes = np.array([size for _, size in states], np.int64)


def bits_of(words: Words) -> npt.NDArray[np.uint8]:
    """Unpack bitmask words to 0 or 1 per token: ``[..., 32 * num_words]``."""
    return np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=-1, bitorder="little")
