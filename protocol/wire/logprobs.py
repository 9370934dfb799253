"""Log probabilities as they travel from the sampler to the client: arrays that are cut as a whole, in step."""

from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from quire.protocol.request.sampling_params import MAX_LOGPROBS
from quire.protocol.wire.arrays import Float32, Int32

HIGHEST_LOGPROB = 1e-3
"""The logarithm of 1 is 0; a value above it by more than rounding is no log probability."""


@dataclass(slots=True)
class TokenLogprobs:
    """Log probabilities of one token and of the best ones in its place.

    Attributes:
        rank: of the token, from 1.
        top: (token id, log probability) in falling order; at least as many as were asked for.
    """

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


class LogprobArrays(msgspec.Struct, array_like=True, frozen=True, eq=False):
    """Log probabilities of a list of tokens: of each token itself, and of the best ones in its place.

    Attributes:
        token_ids, values: ``len(ranks) * width`` entries, row-major: column 0 is the token itself, the others are the
            best ones in falling order.
        ranks: of the token itself, from 1.
        width: entries per token.
    """

    token_ids: Int32
    values: Float32
    ranks: Int32
    width: int

    @classmethod
    def of(cls, token_ids: Int32, values: Float32, ranks: Int32) -> "LogprobArrays":
        """From ``token_ids`` and ``values`` ``[num_tokens, width]`` and ``ranks`` ``[num_tokens]``."""
        return cls(token_ids.ravel(), values.ravel(), ranks, token_ids.shape[1])

    @classmethod
    def empty(cls) -> "LogprobArrays":
        return cls.of(np.empty((0, 1), np.int32), np.empty((0, 1), np.float32), np.empty(0, np.int32))

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.ranks)

    def columns(self, width: int | None = None) -> tuple[Int32, Float32, Int32]:
        """Token ids and values ``[num_tokens, width]``, ranks ``[num_tokens]``; ``width``: first columns only."""
        return (
            self.token_ids.reshape(-1, self.width)[:, :width],
            self.values.reshape(-1, self.width)[:, :width],
            self.ranks,
        )

    def take(self, tokens: npt.NDArray[np.integer] | npt.NDArray[np.bool_] | slice) -> "LogprobArrays":
        """Those of the tokens at these indices."""
        token_ids, values, ranks = self.columns()
        return LogprobArrays.of(token_ids[tokens], values[tokens], ranks[tokens])

    def overlaid(self, at: int, part: "LogprobArrays") -> "LogprobArrays":
        """These with ``part`` written over them from token ``at`` on; the narrower of both widths remains."""
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
        """One entry per token, with at most ``num_best`` of the best tokens: some 5 µs for each."""
        ids, values, ranks = (column.tolist() for column in self.columns(1 + num_best))
        return [
            TokenLogprobs(own[0], value[0], rank, list(zip(own[1:], value[1:], strict=True)))
            for own, value, rank in zip(ids, values, ranks, strict=True)
        ]

    def shape_error(self, num_tokens: int, vocab_size: int) -> str | None:
        """Why these cannot be of ``num_tokens`` tokens, the values and ranks aside; None when they can be."""
        num_entries = num_tokens * self.width
        if not 1 <= self.width <= MAX_LOGPROBS + 1 or len(self) != num_tokens:
            return "log probabilities do not add up"
        if not len(self.token_ids) == len(self.values) == num_entries:
            return "log probabilities do not add up"
        # As unsigned, a negative id is a huge one.
        if num_entries and self.token_ids.view(np.uint32).max() >= vocab_size:
            return "log probability of a token id outside the vocabulary"
        return None

    def value_error(self, vocab_size: int) -> str | None:
        """Why these values and ranks cannot be right; None when they can be."""
        if not (self.values <= HIGHEST_LOGPROB).all():  # not so either for NaN
            return "a log probability is positive or not a number"
        if not ((self.ranks >= 1) & (self.ranks <= vocab_size)).all():
            return "a rank outside the vocabulary"
        return None


class Logprobs(msgspec.Struct, array_like=True, frozen=True, eq=False):
    """Log probabilities of those of a message's tokens that asked; ``rows``: their indices in the message."""

    rows: list[int]
    arrays: LogprobArrays

    def filtered(self, mask: npt.NDArray[np.bool_] | None) -> "Logprobs | None":
        """Those of the message with only the tokens where ``mask`` is true, in the order of its tokens.

        ``mask``: bool, one per token of this message; None keeps all. Returns None where nothing is left.
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
    """Log probabilities of prompt tokens, in parts that lie one after the other in ``arrays``.

    Part ``i`` is of request ``handles[i]``: its prompt tokens ``starts[i]`` to ``starts[i] + counts[i]`` (the first
    token has none, so a start is 1 at least). After a preemption a part may come a second time.
    """

    handles: list[int]
    starts: list[int]
    counts: list[int]
    arrays: LogprobArrays

    def parts(self) -> list[tuple[int, int, LogprobArrays]]:
        """(handle, start, log probabilities) of each part."""
        ends = np.cumsum(self.counts).tolist()
        slices = (slice(end - count, end) for end, count in zip(ends, self.counts, strict=True))
        return [(h, s, self.arrays.take(part)) for h, s, part in zip(self.handles, self.starts, slices, strict=True)]

    def take(self, parts: list[int]) -> "PromptLogprobs":
        """These parts alone, in this order of indices, which ascends."""
        tokens = np.repeat(np.isin(np.arange(len(self.handles)), parts), self.counts)
        handles, starts, counts = ([column[i] for i in parts] for column in (self.handles, self.starts, self.counts))
        return PromptLogprobs(handles, starts, counts, self.arrays.take(tokens))
