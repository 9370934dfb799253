"""The suffix proposer: the most frequent continuation of the last tokens in this request and in earlier outputs.

After SuffixDecoding (Oliaro et al., arXiv 2411.04975), with hashed runs of a few lengths instead of a suffix tree. The
places after earlier occurrences of the longest matching run are the leaves under a node of that tree. Drafts descend
from this node, token by token, to the most frequent child.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.protocol.wire.arrays import Int32
from quire.worker_proc.batch.input_batch import InputBatch
from quire.worker_proc.batch.positions import Ints
from quire.worker_proc.drafts.row_texts import RowTexts
from quire.worker_proc.drafts.text_index import NONE, TextIndex

MAX_PLACES = 8
"""Maximum number of occurrences of a run that are counted, the latest first."""
MAX_OUTPUT_TOKENS = 2048
"""Tokens of an earlier output that are kept, from its start."""
MAX_DRAFTS_PER_MATCHED = 2
"""Maximum number of drafts per matched token: short matches predict little."""
MIN_PROBABILITY = 0.1
"""Drafts end where their estimated probability of acceptance falls below this."""


@dataclass(frozen=True, slots=True)
class _Guess:
    """Drafts of some rows.

    Attributes:
        tokens: ``[rows, count]``, NONE after a row's last draft.
        score: ``[rows]``: expected number of accepted drafts.
        newest: ``[rows]``: the latest matching place.
    """

    tokens: Ints
    score: npt.NDArray[np.float64]
    newest: Ints


class SuffixProposer:
    """Owns the rows' sequences and the outputs of earlier requests, as of the last proposal of drafts.

    Prompts are never shared, outputs are. A client that sends the start of another client's output gets only tokens
    that the model generates, but can measure that they arrive faster. ``max_cached_requests`` 0 shares nothing. A
    preempted request leaves its output at each preemption, so the start of its output counts several times.
    """

    def __init__(self, batch: InputBatch, max_depth: int, max_cached_requests: int) -> None:
        lengths = [2**power for power in range(max_depth.bit_length()) if 2**power < max_depth] + [max_depth]
        self._texts = RowTexts(batch, lengths, max_places=MAX_PLACES)
        batch.register(self)
        width = min(batch.tokens.data.shape[1], MAX_OUTPUT_TOKENS)
        self._outputs = (
            TextIndex(max_cached_requests, width, lengths, shared=True, max_places=MAX_PLACES)
            if max_cached_requests
            else None
        )
        self._width = width
        self._free = list(range(max_cached_requests))[::-1]
        self._used: OrderedDict[int, None] = OrderedDict()  # text numbers of outputs, the least recently used first

    @property
    def num_outputs(self) -> int:
        """Number of earlier outputs that are kept."""
        return len(self._used)

    def propose(self, wanted: Mapping[int, int]) -> dict[int, list[int]]:
        rows = np.fromiter(wanted, np.int64, len(wanted))
        limits = np.fromiter(wanted.values(), np.int64, len(wanted))
        own, texts = self._texts.index, self._texts.catch_up(rows)
        ends, known = own.ends(texts)
        best = _guess(own, *own.find(texts, ends, known), limits, repeating=True)
        tokens = best.tokens
        uncertain = np.flatnonzero(best.score < limits)  # the other rows have the highest possible score
        if self._used and len(uncertain):
            assert self._outputs is not None
            found = self._outputs.find(uncertain, ends[uncertain], known[uncertain])
            others = _guess(self._outputs, *found, limits[uncertain], repeating=False)
            better = others.score > best.score[uncertain]
            tokens[uncertain[better], : others.tokens.shape[1]] = others.tokens[better]
            for place in others.newest[better].tolist():
                self._used.move_to_end(place // self._width)
        counts = (tokens != NONE).sum(axis=1).tolist()
        drafts = zip(wanted, tokens.tolist(), counts, strict=True)
        return {row: tokens_of_row[:count] for row, tokens_of_row, count in drafts if count}

    def move_row(self, source: int, target: int) -> None:
        self._texts.move_row(source, target)

    def clear_row(self, row: int) -> None:
        self._keep_output(self._texts.output(row)[: self._width])
        self._texts.clear_row(row)

    def _keep_output(self, output: Int32) -> None:
        if self._outputs is None or len(output) < 2:  # a single token continues nothing
            return
        text = self._free.pop() if self._free else self._used.popitem(last=False)[0]
        self._used[text] = None
        self._outputs.reset(text)
        self._outputs.extend(np.array([text]), np.array([len(output)]), output[None], np.zeros(1, np.int64))


def _guess(index: TextIndex, places: Ints, matched: Ints, limits: Ints, *, repeating: bool) -> _Guess:
    """Draft the most frequent token after ``places``, step by step; of equally frequent ones that of the latest place.

    Args:
        places, matched: ``[rows, places]``, as ``find`` returns them.
        limits: ``[rows]``: maximum number of drafts.
    """
    count = int(limits.max())
    allowed = np.minimum(limits, MAX_DRAFTS_PER_MATCHED * matched[:, 0])
    following = index.following(places, count, repeating=repeating)
    tokens = np.full((len(places), count), NONE, np.int64)
    score = np.zeros(len(places))
    probability = np.ones(len(places))
    alive = places != NONE
    for step in range(count):
        own = following[:, :, step]
        alive = alive & (own != NONE)
        votes = ((own[:, :, None] == own[:, None, :]) & alive[:, None, :]).sum(axis=2, dtype=np.int8) * alive
        winner = votes.argmax(axis=1)[:, None]
        chosen = np.take_along_axis(own, winner, axis=1)
        counted = np.take_along_axis(votes, winner, axis=1)[:, 0]
        probability = probability * counted / np.maximum(alive.sum(axis=1), 1)
        alive = alive & (own == chosen) & ((probability >= MIN_PROBABILITY) & (step < allowed))[:, None]
        continues = alive.any(axis=1)
        if not continues.any():
            break
        tokens[:, step] = np.where(continues, chosen[:, 0], NONE)
        score += np.where(continues, probability, 0.0)
    return _Guess(tokens, score, places[:, 0])
