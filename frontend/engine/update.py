"""Update: the new tokens of a sequence since the last read."""

import msgspec
import numpy as np
import numpy.typing as npt

from quire.protocol.wire.front_end_messages import EndReason, Hypothesis
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
