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
from quire.protocol.wire.front_end_messages import EndReason, Statistics
from quire.protocol.wire.logprobs import LogprobArrays, TokenLogprobs


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
        prompt_logprobs: with the first tokens, when asked for: of the prompt's tokens from the second on. Arrays, since
            a prompt is long and few read it all.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    ended: EndReason | None = None
    stop_reason: int | None = None
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    detail: str = ""
    prompt_logprobs: LogprobArrays | None = None


class Stoppable(Protocol):
    """What can be told of one sampled answer in flight."""

    request_id: str

    def stop_at(self, num_output_tokens: int) -> None:
        """A stop string was found: the sequence ends with that many tokens. The caller reads no further."""
        ...

    def abort(self) -> None:
        """The rest is not wanted. Without effect on a sequence that has ended."""
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
        ``tenant``: whose it is, from 1; 0: unknown. Tenants take turns at what is scarce.

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
