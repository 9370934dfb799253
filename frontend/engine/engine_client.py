"""The engine's interface for a front end, independent of the transport.

HTTP is written against this interface. The real client uses ZeroMQ; tests have one that generates arbitrary tokens.
"""

from collections.abc import Callable
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from quire.protocol.routing import EnginePlace
from quire.protocol.wire.front_end_messages import AddRequest, EndReason, Hypothesis, Statistics
from quire.protocol.wire.link_messages import Message
from quire.protocol.wire.logprobs import LogprobArrays, TokenLogprobs
from quire.protocol.wire.timeline import TimelineEvent


class Update(msgspec.Struct, gc=False):
    """New tokens of one sequence, from one step or from several unread ones.

    A struct is made in a fifth of the time of a dataclass, once per token of each stream.

    Attributes:
        token_ids: new output tokens, including the stop token that ended the sequence.
        logprobs: one per token of ``token_ids``, if requested.
        ended: set only on the last update.
        stop_reason: id of the stop token that ended the sequence.
        num_output_tokens: total output tokens to bill so far, including this update.
        num_cached_tokens: number of prompt tokens found in the prefix cache.
        admitted: time of the first admission, in seconds of the monotonic clock of all processes; 0 if not known.
        detail: if ``ended`` is ERROR, one line that may be sent to the client.
        prompt_logprobs: with the first tokens, if requested: of the prompt tokens from the second on. Arrays, because
            prompts are long.
        hypotheses: with the end of a beam search, its outputs, the best first. There are no other tokens.
        pooled: with the end of a request with PoolingParams: float32 ``[rows, width]``.
        routed_experts: new rows, int32 ``[rows, num_moe_layers * num_experts_per_token]``, if requested: of all
            positions but the last token's.
        timeline: the events so far, if requested.
    """

    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    ended: EndReason | None = None
    stop_reason: int | None = None
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    admitted: float = 0.0
    detail: str = ""
    prompt_logprobs: LogprobArrays | None = None
    hypotheses: list[Hypothesis] | None = None
    pooled: npt.NDArray[np.float32] | None = None
    routed_experts: npt.NDArray[np.int32] | None = None
    timeline: list[TimelineEvent] | None = None

    @property
    def pooling_error(self) -> str:
        """Why the update that ends a request with PoolingParams has no usable rows, or ""."""
        if self.ended is not EndReason.STOPPED:
            return self.detail or "the request was aborted"
        is_finite = self.pooled is not None and np.isfinite(self.pooled).all()
        return "" if is_finite else "numerical_error: the vector is not finite"


class Sequence(Protocol):
    """One sequence in flight, whose updates are taken."""

    request_id: str

    @property
    def engines(self) -> str:
        """The engines that have had it and why, such as ``2 cached, 0 load``; empty with one engine alone."""
        ...

    def take(self) -> Update | None:
        """Return the tokens since the last call, or None. The last update has ``ended``.

        Raises:
            InvalidRequest: the scheduler refused the request; only before the first update.
            EngineError: the engine has failed.
        """
        ...

    def stop_at(self, num_output_tokens: int) -> None:
        """End the sequence with this many tokens, because a stop string was found. The caller reads no further."""
        ...

    def abort(self) -> None:
        """Abort the sequence. No effect if it has ended."""
        ...

    def calls_tool(self, tool: str) -> None:
        """Report that the answer, which has ended, calls this tool: the next turn of its job follows the tool."""
        ...


class EngineClient(Protocol):
    """The engine's interface for one front end.

    Attributes:
        max_model_len: maximum number of tokens of a request, prompt and answer together.
        vocab_size: vocabulary size of the model's output; every token id must be below it.
    """

    max_model_len: int
    vocab_size: int

    @property
    def places(self) -> list[EnginePlace]:
        """The engines of a server with several, with the reason for each that cannot compute requests now; empty for
        one engine alone."""
        ...

    @property
    def state(self) -> str:
        """loading, ready, recovering, draining or failed."""
        ...

    @property
    def pause_kind(self) -> str:
        """Which pause an operator has set: pause, pause_new or empty, as in Control."""
        ...

    @property
    def seconds_without_progress(self) -> float:
        """Seconds since the last token while an answer is in flight and no pause is set, or since a recovery began."""
        ...

    async def add(
        self, request: AddRequest, on_update: Callable[[], None], *, parent: Sequence | None = None, num_shared: int = 0
    ) -> Sequence:
        """Submit one sequence; its parameters have ``n = 1``, no stop strings and a ``max_tokens``.

        Args:
            on_update: called on the event loop when there is an update or an error to take: once per step for all
                sequences that have the same callback. It must not raise.
            parent: a sequence with the same prompt, which is then neither sent nor computed a second time.
            num_shared: output tokens of ``parent`` that the sequence begins with; its first update has them.

        Raises:
            InvalidRequest: refused; ``Sequence.updates`` may raise it too.
            EngineError: the engine has failed.
        """
        ...

    async def statistics_by_engine(self) -> dict[int, Statistics]:
        """Return the current counters and gauges of each engine that answers; one engine alone has the number 0.

        An engine that has not been ready is left out.

        Raises:
            EngineError: the engine has failed.
        """
        ...

    async def control(self, kind: str) -> Statistics:
        """Send a Control of this kind and return its answer. There is none while the scheduler is dead or loading.

        Raises:
            EngineError: the engine has failed.
        """
        ...

    async def ask(self, question: Callable[[int], Message], about: Callable[[AddRequest], bool]) -> Statistics:
        """Send the message that ``question`` returns for a query number, and return its answer, as ``control``.

        ``about``: the answer's ``done`` is false while a request is left for which this returns True.
        """
        ...
