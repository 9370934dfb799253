"""Log probabilities on their way from the sampler to the client, as parallel arrays that are sliced together."""

from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from quire.protocol.request.sampling_params import MAX_CANDIDATES, MAX_LOGPROBS
from quire.protocol.wire.arrays import Float32, Int32

HIGHEST_LOGPROB = 1e-3
"""Largest value accepted as a log probability: 0 is the logarithm of 1, and rounding may exceed it slightly."""


@dataclass(slots=True)
class TokenLogprobs:
    """Log probabilities of one token and of the most likely tokens at its position.

    Attributes:
        rank: token rank: the token's position in the vocabulary sorted by falling probability, from 1.
        top: (token id, log probability) in descending order; at least as many as the request wants.
    """

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


class LogprobArrays(msgspec.Struct, array_like=True, frozen=True, eq=False):
    """Log probabilities of a list of tokens: of each token itself, and of the most likely tokens at its position.

    Attributes:
        token_ids: ids, ``[num_tokens, width]`` flattened: column 0 is the token itself, the other columns are the most
            likely tokens in descending order.
        values: log probability of each id in ``token_ids``.
        ranks: ``[num_tokens]``: token rank of the token itself, which is its position in the vocabulary sorted by
            falling probability, from 1.
        width: entries per token.
    """

    token_ids: Int32
    values: Float32
    ranks: Int32
    width: int

    @classmethod
    def of(cls, token_ids: Int32, values: Float32, ranks: Int32) -> "LogprobArrays":
        """Build from ``token_ids`` and ``values`` ``[num_tokens, width]`` and ``ranks`` ``[num_tokens]``."""
        return cls(token_ids.ravel(), values.ravel(), ranks, token_ids.shape[1])

    @classmethod
    def empty(cls) -> "LogprobArrays":
        return cls.of(np.empty((0, 1), np.int32), np.empty((0, 1), np.float32), np.empty(0, np.int32))

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.ranks)

    def columns(self, width: int | None = None) -> tuple[Int32, Float32, Int32]:
        """Return token ids and values ``[num_tokens, width]`` and ranks ``[num_tokens]``; ``width`` keeps the first
        columns only.
        """
        return (
            self.token_ids.reshape(-1, self.width)[:, :width],
            self.values.reshape(-1, self.width)[:, :width],
            self.ranks,
        )

    def take(self, tokens: npt.NDArray[np.integer] | npt.NDArray[np.bool_] | slice) -> "LogprobArrays":
        """Return the entries of the tokens at these indices."""
        token_ids, values, ranks = self.columns()
        return LogprobArrays.of(token_ids[tokens], values[tokens], ranks[tokens])

    def overlaid(self, at: int, part: "LogprobArrays") -> "LogprobArrays":
        """Return a copy with ``part`` written over it from token ``at`` on, in the smaller of both widths."""
        end = at + len(part)
        if not at and end >= len(self):
            return part
        width, num_tokens = min(self.width, part.width), max(end, len(self))
        whole = (
            np.zeros((num_tokens, width), np.int32),
            np.zeros((num_tokens, width), np.float32),
            np.zeros(num_tokens, np.int32),
        )
        for begin, rows in ((0, self), (at, part)):
            for column, values in zip(whole, rows.columns(width), strict=True):
                column[begin : begin + len(rows)] = values
        return LogprobArrays.of(*whole)

    def entries(self, num_best: int = MAX_LOGPROBS) -> list[TokenLogprobs]:
        """Return one entry per token with at most ``num_best`` alternatives; costs about 5 µs per token."""
        ids, values, ranks = (column.tolist() for column in self.columns(1 + num_best))
        return [
            TokenLogprobs(own[0], value[0], rank, list(zip(own[1:], value[1:], strict=True)))
            for own, value, rank in zip(ids, values, ranks, strict=True)
        ]

    def shape_error(self, num_tokens: int, vocab_size: int) -> str | None:
        """Return why sizes or token ids cannot be those of ``num_tokens`` tokens, or None if they can."""
        num_entries = num_tokens * self.width
        if not 1 <= self.width <= MAX_CANDIDATES + 1 or len(self) != num_tokens:
            limits = f"expected {num_tokens} tokens and a width of 1 to {MAX_CANDIDATES + 1}"
            return f"log probabilities of {len(self)} tokens with width {self.width}, {limits}"
        if not len(self.token_ids) == len(self.values) == num_entries:
            sizes = f"{len(self.token_ids)} token ids and {len(self.values)} values"
            return f"log probabilities have {sizes}, expected {num_entries} of each"
        # As unsigned, a negative id is a huge one.
        if num_entries and (highest := self.token_ids.view(np.uint32).max()) >= vocab_size:
            return f"log probability of token id {highest.view(np.int32)}, but the vocabulary has {vocab_size} tokens"
        return None

    def value_error(self, vocab_size: int) -> str | None:
        """Return why the values or ranks are invalid, or None if they are valid."""
        if not (self.values <= HIGHEST_LOGPROB).all():  # NaN fails the comparison too
            wrong = self.values[~(self.values <= HIGHEST_LOGPROB)]
            return f"a log probability must be at most 0 (got {wrong[0]:g})"
        valid = (self.ranks >= 1) & (self.ranks <= vocab_size)
        if not valid.all():
            return f"token rank must be between 1 and {vocab_size} (got {self.ranks[~valid][0]})"
        return None


class Logprobs(msgspec.Struct, array_like=True, frozen=True, eq=False):
    """Log probabilities of the tokens of a message that have them; ``rows``: indices of these tokens in the message."""

    rows: list[int]
    arrays: LogprobArrays

    def filtered(self, mask: npt.NDArray[np.bool_] | None) -> "Logprobs | None":
        """Return the log probabilities of the message reduced to the tokens where ``mask`` is true, ordered by token.

        ``mask``: bool, one per token of this message; None keeps all. Returns None if none remain.
        """
        rows = np.array(self.rows, np.int64)
        order = np.argsort(rows, kind="stable")
        if mask is not None:
            order = order[mask[rows[order]]]
        if not len(order):
            return None
        places = rows if mask is None else (np.cumsum(mask) - 1)[rows]
        return Logprobs(places[order].tolist(), self.arrays.take(order))


class PromptLogprobs(msgspec.Struct, array_like=True, frozen=True, eq=False):
    """Log probabilities of prompt tokens, as consecutive parts of ``arrays``.

    Part ``i`` belongs to request ``handles[i]``: its prompt tokens ``starts[i]`` to ``starts[i] + counts[i]``
    (exclusive). The first token has none, so a start is at least 1. After a preemption a part may be sent a second
    time.
    """

    handles: list[int]
    starts: list[int]
    counts: list[int]
    arrays: LogprobArrays

    def parts(self) -> list[tuple[int, int, LogprobArrays]]:
        """Return (handle, start, log probabilities) of each part."""
        ends = np.cumsum(self.counts).tolist()
        slices = (slice(end - count, end) for end, count in zip(ends, self.counts, strict=True))
        return [(h, s, self.arrays.take(part)) for h, s, part in zip(self.handles, self.starts, slices, strict=True)]

    def take(self, parts: list[int]) -> "PromptLogprobs":
        """Return these parts only; the indices ascend."""
        tokens = np.repeat(np.isin(np.arange(len(self.handles)), parts), self.counts)
        handles, starts, counts = ([column[i] for i in parts] for column in (self.handles, self.starts, self.counts))
        return PromptLogprobs(handles, starts, counts, self.arrays.take(tokens))
