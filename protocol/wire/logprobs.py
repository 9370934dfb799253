"""Log probabilities of tokens as a client receives them."""

from dataclasses import dataclass

import numpy as np

from quire.protocol.request.sampling_params import MAX_LOGPROBS
from quire.protocol.wire.arrays import Float32, Int32


@dataclass(slots=True)
class TokenLogprobs:
    """Log probabilities of one token and of the most likely tokens at its position.

    Attributes:
        rank: token rank: the token's position in the vocabulary sorted by falling probability, from 1.
        top: (token id, log probability) in descending order.
    """

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


@dataclass(frozen=True, slots=True, eq=False)
class LogprobArrays:
    """Log probabilities of a list of tokens: of each token itself, and of the most likely tokens at its position.

    Attributes:
        token_ids: ids, ``[num_tokens, width]``: column 0 is the token itself, the other columns are the most likely
            tokens in descending order.
        values: log probability of each id in ``token_ids``.
        ranks: ``[num_tokens]``: token rank of the token itself, which is its position in the vocabulary sorted by
            falling probability, from 1.
    """

    token_ids: Int32
    values: Float32
    ranks: Int32

    @classmethod
    def empty(cls) -> "LogprobArrays":
        return cls(np.empty((0, 1), np.int32), np.empty((0, 1), np.float32), np.empty(0, np.int32))

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.ranks)

    def columns(self, width: int | None = None) -> tuple[Int32, Float32, Int32]:
        """Return token ids and values ``[num_tokens, width]`` and ranks ``[num_tokens]``; ``width`` keeps the first
        columns only.
        """
        return self.token_ids[:, :width], self.values[:, :width], self.ranks

    def entries(self, num_best: int = MAX_LOGPROBS) -> list[TokenLogprobs]:
        """Return one entry per token with at most ``num_best`` alternatives; costs about 5 µs per token."""
        ids, values, ranks = (column.tolist() for column in self.columns(1 + num_best))
        return [
            TokenLogprobs(own[0], value[0], rank, list(zip(own[1:], value[1:], strict=True)))
            for own, value, rank in zip(ids, values, ranks, strict=True)
        ]
