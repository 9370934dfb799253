"""What the front end asks of an engine, and nothing of how it is reached.

HTTP and the offline API are written against these names; the real client speaks ZeroMQ, tests have one that
invents its tokens.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.wire.messages import EndReason, Statistics


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


@dataclass(slots=True, eq=False)
class PromptLogprobTable:
    """Log probabilities of a prompt's tokens from the second on: row ``i`` is of prompt token ``i + 1``.

    Arrays until somebody asks, since a prompt is long and few read it all.

    Attributes:
        token_ids, values: int32 and float32 ``[num_tokens, width]``: column 0 is the prompt's own token, the others the
            best ones in falling order.
        ranks: int32 ``[num_tokens]``, of the prompt's own token, from 1.
    """

    token_ids: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty((0, 1), np.int32))
    values: npt.NDArray[np.float32] = field(default_factory=lambda: np.empty((0, 1), np.float32))
    ranks: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))

    def placed(self, start: int, part: "PromptLogprobTable") -> "PromptLogprobTable":
        """This table with ``part``, whose first row is of prompt token ``start``, in its place.

        A part may come twice, and parts may differ in width: what all of them have, everybody asked for.
        """
        begin, end = start - 1, start - 1 + len(part.ranks)
        if not begin and end >= len(self.ranks):
            return part
        width = min(self.token_ids.shape[1], part.token_ids.shape[1])
        num_tokens = max(end, len(self.ranks))
        whole = PromptLogprobTable(
            np.zeros((num_tokens, width), np.int32),
            np.zeros((num_tokens, width), np.float32),
            np.zeros(num_tokens, np.int32),
        )
        for at, rows in ((0, self), (begin, part)):
            where = slice(at, at + len(rows.ranks))
            whole.token_ids[where] = rows.token_ids[:, :width]
            whole.values[where] = rows.values[:, :width]
            whole.ranks[where] = rows.ranks
        return whole

    def entries(self, num_best: int) -> list[TokenLogprobs]:
        """One entry per row, with at most ``num_best`` of the best tokens: some 5 µs for each."""
        ids = self.token_ids[:, : 1 + num_best].tolist()
        values = self.values[:, : 1 + num_best].tolist()
        return [
            TokenLogprobs(own[0], value[0], rank, list(zip(own[1:], value[1:], strict=True)))
            for own, value, rank in zip(ids, values, self.ranks.tolist(), strict=True)
        ]


@dataclass(slots=True)
class Update:
    """What one step, or several that piled up, brought one sequence.

    Attributes:
        token_ids: new output tokens, the stop token included when one ended it.
        logprobs: one per token of ``token_ids``, when asked for.
        ended: set on the last update, and only there.
        stop_reason: id of the stop token that ended the sequence.
        num_output_tokens: total so far that counts and is billed, this update included.
        num_cached_tokens: of the prompt, how many the prefix cache served.
        detail: when ``ended`` is ERROR, one line that the client may read.
        prompt_logprobs: with the first tokens, of the whole prompt, when asked for.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    ended: EndReason | None = None
    stop_reason: int | None = None
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    detail: str = ""
    prompt_logprobs: PromptLogprobTable | None = None


class Stoppable(Protocol):
    """What can be told of one sampled answer in flight."""

    request_id: str

    def stop_at(self, num_output_tokens: int) -> None:
        """A stop string was found: the sequence ends with that many tokens. The caller reads no further."""
        ...

    def abort(self) -> None:
        """Nobody waits for the rest. Without effect on a sequence that has ended."""
        ...


class Sequence(Stoppable, Protocol):
    """One sampled answer in flight, and what comes of it."""

    def updates(self) -> AsyncIterator[Update]:
        """What happens, until the update with ``ended``; updates that pile up unread are merged into one.

        Raises:
            InvalidRequest: the scheduler refused the request; only ever before the first update.
            EngineError: the engine died and will not go on.
        """
        ...


class EngineClient(Protocol):
    """The engine, as one front end sees it.

    Attributes:
        max_model_len: most tokens of one request, prompt and answer together.
        vocab_size: the model's output width; every token id must be below it.
    """

    max_model_len: int
    vocab_size: int

    @property
    def state(self) -> str:
        """loading, ready, recovering, draining or failed."""
        ...

    @property
    def seconds_without_progress(self) -> float:
        """How long no token has come although an answer is in flight, or the engine recovers already."""
        ...

    async def add(
        self,
        request_id: str,
        prompt_token_ids: list[int] | npt.NDArray[np.int32],
        params: SamplingParams,
        seed: int,
        priority: int,
        cache_salt: str,
        tenant: int = 0,
    ) -> Sequence:
        """Submit one sequence; ``params`` has ``n = 1``, no stop strings and a ``max_tokens``.

        ``priority``: an int32; the lowest runs first, if the engine schedules by it.
        ``tenant``: whose it is, from 1; 0: nobody's. Tenants take turns at what is scarce.

        Raises:
            InvalidRequest: refused; may also surface from ``Sequence.updates``.
            EngineError: the engine is gone.
        """
        ...

    async def statistics(self) -> Statistics:
        """The scheduler's counters and gauges now.

        Raises:
            EngineError: the engine is gone.
        """
        ...
