"""Result types of the offline API, with vLLM's names."""

from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from quire.frontend.engine.answers import OutputDelta
from quire.frontend.engine.routed_experts import by_layer
from quire.frontend.text.logprob import Logprob, logprob_by_id
from quire.frontend.text.text_out import TokenTexts
from quire.protocol.model.model_config import MoeConfig
from quire.protocol.wire.timeline import TimelineEvent


@dataclass(slots=True)
class CompletionOutput:
    """One sampled answer.

    Attributes:
        logprobs: for each token, the sampled and the most likely tokens by id; None unless requested.
        finish_reason: stop, length, abort, error or repetition.
        stop_reason: the stop string, or the stop token's id, that ended the answer.
        score: of an output of a beam search: its cumulative log probability, normalised by its length.
        routed_experts: with ``SamplingParams.return_routed_experts``, at the end: ids of the experts of every token of
            prompt and answer but the last one, ``[tokens, layers with experts, experts per token]``, the one with the
            largest weight first.
        timeline: with ``SamplingParams.return_timeline``, at the end: what happened to it, with seconds since then.
        error: the reason, if ``finish_reason`` is error; other answers of the call are not affected.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    score: float | None = None
    routed_experts: npt.NDArray[Any] | None = None
    timeline: list[TimelineEvent] | None = None


@dataclass(slots=True)
class RequestOutput:
    """The result of one prompt; ``outputs`` has ``n`` answers, or those of a beam search, the best first.

    ``prompt_logprobs``: for each prompt token, that token and the most likely ones by id; None for the first token, and
    None as a whole unless requested.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


def append_delta(output: CompletionOutput, delta: OutputDelta, texts: TokenTexts, moe: MoeConfig | None = None) -> None:
    """Add a part of the answer to it. ``moe``: the model's experts, if it has any."""
    if delta.routed_experts is not None and moe is not None:
        output.routed_experts = by_layer(delta.routed_experts, moe)
    output.text += delta.text
    output.token_ids += delta.token_ids
    output.finish_reason, output.stop_reason, output.timeline = delta.finish_reason, delta.stop_reason, delta.timeline
    output.error = delta.detail or None
    if delta.logprobs is not None:
        output.logprobs = (output.logprobs or []) + [logprob_by_id(placed.logprobs, texts) for placed in delta.logprobs]
        total = sum(placed.logprobs.logprob for placed in delta.logprobs)
        output.cumulative_logprob = (output.cumulative_logprob or 0.0) + total


class EngineStatistics(dict[str, int]):
    """The scheduler's counters and gauges, as keys and as attributes: ``Statistics.counts``."""

    def __getattr__(self, name: str) -> int:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None
