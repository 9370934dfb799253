"""Prompts for a running server, from what a trace tells of them: equal contents become equal tokens."""

import numpy as np
from numpy.typing import NDArray

from quire.launch.measure.http_client import Prompt
from quire.launch.replay.workload.workload import Call

_OWN = 2**32 - 2
"""The space of tokens that no id of the trace covers; the call's number is their id."""
FIRST_TOKEN = 3
"""Below it most vocabularies have their marks for a text's beginning, its end and padding."""
CUT_MARGIN = 0.95
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


class PromptMaker:
    """Makes a call's prompt when it is due, so that a workload's prompts are never all held at once.

    Attributes:
        num_folded: prompts whose own token ids did not fit the server's vocabulary; they were taken modulo its size,
            which leaves equal prefixes equal.
    """

    def __init__(self, vocab_size: int, *, token_ids: bool) -> None:
        """
        Args:
            vocab_size: ids below this are the server's.
            token_ids: the server takes prompts as ids; else they are words of one letter, which most tokenizers make
                one token of.
        """
        self._vocab_size = vocab_size
        self._token_ids = token_ids
        self.num_folded = 0

    def make(self, call: Call, num_tokens: int) -> Prompt:
        """The first ``num_tokens`` of the call's prompt.

        Text goes first: token ids are of the trace's tokenizer, which need not be the server's. A text is cut to the
        share of its characters that the tokens are, and a little more, since tokens differ in length.
        """
        if call.text:
            if num_tokens >= call.num_prompt_tokens:
                return call.text
            return call.text[: max(1, int(len(call.text) * CUT_MARGIN * num_tokens / call.num_prompt_tokens))]
        if call.tokens is not None and self._token_ids:
            return self._own_ids(np.asarray(call.tokens[:num_tokens], np.int64))
        if not self._token_ids:
            letters = invented_tokens(call, num_tokens, len(_LETTERS), first=0).tolist()
            return " ".join(_LETTERS[letter] for letter in letters)
        ids: list[int] = invented_tokens(call, num_tokens, self._vocab_size).tolist()
        return ids

    def _own_ids(self, ids: NDArray[np.int64]) -> list[int]:
        if len(ids) and int(ids.max()) >= self._vocab_size:
            self.num_folded += 1
            ids = ids % self._vocab_size
        return [int(token) for token in ids]


def invented_tokens(call: Call, num_tokens: int, vocab_size: int, *, first: int = FIRST_TOKEN) -> NDArray[np.int64]:
    """Token ids [num_tokens] int64 from ``first`` to below ``vocab_size``: a hash of (space, id, place in its unit).

    The same id gives the same tokens in every call and every run; what no id covers is the call's own.
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
    """SplitMix64's finishing steps: every bit of the input moves half of those of the output. [n] uint64 each."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed
