"""Prompts for a running server, made from a trace's contents: equal contents become equal tokens."""

import numpy as np
from numpy.typing import NDArray

from quire.bench.measure.http_client import Prompt
from quire.replay.workload.workload import Call

_OWN = 2**32 - 2
"""The id space of tokens that no content id of the trace covers; their id is the call's number."""
FIRST_TOKEN = 3
"""Most vocabularies have their begin, end and padding tokens below this id."""
CUT_MARGIN = 0.95
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


class PromptMaker:
    """Makes a call's prompt when the call is due, so that the prompts of a workload are never all in memory.

    Attributes:
        num_folded: number of prompts with token ids beyond the server's vocabulary. The ids are taken modulo its size,
            which keeps equal prefixes equal.
    """

    def __init__(self, vocab_size: int, *, token_ids: bool) -> None:
        """
        Args:
            vocab_size: size of the server's vocabulary.
            token_ids: the server accepts prompts as token ids. Otherwise prompts are one-letter words, each of which
                is one token for most tokenizers.
        """
        self._vocab_size = vocab_size
        self._token_ids = token_ids
        self.num_folded = 0

    def make(self, call: Call, num_tokens: int) -> Prompt:
        """Return the first ``num_tokens`` of the call's prompt.

        Text is preferred to token ids, because the server's tokenizer may differ from the trace's. A text is cut to the
        same share of its characters, less ``CUT_MARGIN`` because tokens differ in length.
        """
        if call.text:
            if num_tokens >= call.num_prompt_tokens:
                return call.text
            return call.text[: max(1, int(len(call.text) * CUT_MARGIN * num_tokens / call.num_prompt_tokens))]
        if call.tokens is not None and self._token_ids:
            return self._own_ids(np.asarray(call.tokens[:num_tokens], np.int64))
        if not self._token_ids:
            letters = generate_tokens(call, num_tokens, len(_LETTERS), first=0).tolist()
            return " ".join(_LETTERS[letter] for letter in letters)
        ids: list[int] = generate_tokens(call, num_tokens, self._vocab_size).tolist()
        return ids

    def _own_ids(self, ids: NDArray[np.int64]) -> list[int]:
        if len(ids) and int(ids.max()) >= self._vocab_size:
            self.num_folded += 1
            ids = ids % self._vocab_size
        return [int(token) for token in ids]


def generate_tokens(call: Call, num_tokens: int, vocab_size: int, *, first: int = FIRST_TOKEN) -> NDArray[np.int64]:
    """Return token ids [num_tokens] int64 in [first, vocab_size): a hash of (space, id, offset in the id's unit).

    The same id gives the same tokens in every call and every run. Tokens without an id are unique to the call.
    """
    places = np.arange(num_tokens, dtype=np.uint64)
    spaces = np.full(num_tokens, _OWN, np.uint64)
    ids = np.full(num_tokens, call.number, np.uint64)
    content = call.content
    if content is not None and len(content.ids):
        unit = np.uint64(content.unit)
        covered = min(num_tokens, len(content.ids) * content.unit)
        ids[:covered] = np.asarray(content.ids, np.uint64)[(places[:covered] // unit).astype(np.int64)]
        places[:covered] %= unit
        spaces[:covered] = content.space
    mixed = _mix(_mix(_mix(spaces) ^ ids) ^ places)
    first = first if vocab_size > 2 * first else 0
    tokens: NDArray[np.int64] = (mixed % np.uint64(vocab_size - first)).astype(np.int64) + first
    return tokens


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash [n] uint64 to [n] uint64 with the finaliser of SplitMix64: each input bit flips half of the output bits."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed
