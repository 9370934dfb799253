"""``bad_words``: bans the last token of a word where the output ends with the word's other tokens."""

from dataclasses import dataclass

import numpy as np

from quire.protocol.request.sampling_params import SamplingParams
from quire.worker_proc.batch.positions import Ints, SampledPositions
from quire.worker_proc.sampling.builtin.base import NO_INTS, BanProcessor, LogitPlaces, RowTokens, find, model_tokens


@dataclass(frozen=True, slots=True)
class Words:
    """Bad words of one request. A word's prefix is all its tokens but the last.

    Attributes:
        single: words of one token, which are always banned.
        by_last: the last token of a prefix → all (prefix, banned token) with it.
        longest: number of tokens of the longest prefix.
    """

    single: Ints
    by_last: dict[int, list[tuple[list[int], int]]]
    longest: int
    output: list[int]

    def banned_after(self, drafts: list[int]) -> list[int]:
        """Return the tokens that words of several tokens ban after the output and ``drafts``."""
        last = drafts[-1:] or self.output[-1:]
        if not last or last[0] not in self.by_last:  # the usual case, which must not copy the output
            return []
        text = self.output[-self.longest :] + drafts
        return [banned for prefix, banned in self.by_last[last[0]] if text[-len(prefix) :] == prefix]


class BadWords(BanProcessor[Words]):
    """Reads the output tokens of rows that have bad words of several tokens."""

    _long: list[Words]

    @property
    def reads_outputs(self) -> bool:
        """Whether a row has bad words of several tokens."""
        return bool(len(self._long_rows))

    @staticmethod
    def reads_output(params: SamplingParams) -> bool:
        return any(len(ids) > 1 for ids in params.bad_words_token_ids)

    def _bans(self, positions: SampledPositions) -> LogitPlaces:
        if not self._same_rows(positions):
            which, at = find(positions, self._tokens.rows)
            self._singles, _ = self._tokens.at(which, at)
            which, self._long_at = find(positions, self._long_rows)
            self._long = [self._states[row] for row in self._long_rows[which].tolist()]
        places, tokens = [], []
        offsets = positions.offsets[self._long_at].tolist()
        for state, at, offset in zip(self._long, self._long_at.tolist(), offsets, strict=True):
            banned = state.banned_after(positions.drafts[at - offset : at].tolist() if offset else [])
            if banned:
                tokens += banned
                places += [at] * len(banned)
        if not tokens:
            return self._singles
        return LogitPlaces(
            np.concatenate([self._singles.positions, np.array(places, np.int64)]),
            np.concatenate([self._singles.tokens, np.array(tokens, np.int64)]),
        )

    def _new_state(self, params: SamplingParams, prompt: list[int], output: list[int]) -> Words | None:
        words = params.bad_words_token_ids
        if not words:
            return None
        by_last: dict[int, list[tuple[list[int], int]]] = {}
        for ids in words:
            if len(ids) > 1 and ids[-1] < self._vocab_size:
                by_last.setdefault(ids[-2], []).append((ids[:-1], ids[-1]))
        single = model_tokens([ids[0] for ids in words if len(ids) == 1], self._vocab_size)
        return Words(single, by_last, max(len(ids) for ids in words) - 1, output)

    def _rows_changed(self) -> None:
        self._tokens = RowTokens({row: state.single for row, state in self._states.items()})
        self._long_rows = np.array([row for row, state in self._states.items() if state.by_last], np.int64)
        self._singles = LogitPlaces(NO_INTS, NO_INTS)
        self._long_at = NO_INTS
        self._long = []
