"""Response formatters: the collected outputs of a request, its token counts, and what writes them as JSON."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import UNSET, UnsetType

from quire.frontend.engine.answers import BeamOutput, OutputDelta, PlacedLogprobs, StreamedAnswer
from quire.frontend.engine.routed_experts import by_layer
from quire.frontend.http.routes.conversation import AnswerReader, tool_of
from quire.frontend.http.serving.metrics import SequenceClock
from quire.frontend.text.prompts import Prompt
from quire.protocol.model.model_config import MoeConfig
from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.wire.logprobs import LogprobArrays
from quire.protocol.wire.timeline import TimelineEvent

EXPERTS_PER_CHARACTER = 256
"""Routed experts that are formatted in the time of one character."""


class PromptTokens(msgspec.Struct, frozen=True):
    """``image_tokens``: positions that take rows of images; left out without images."""

    cached_tokens: int
    image_tokens: int | UnsetType = UNSET


class ReasoningTokens(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Token counts. ``completion_tokens_details``: of conversations only."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens
    completion_tokens_details: ReasoningTokens | UnsetType = UNSET


class ExpertsBody(msgspec.Struct, frozen=True):
    """``routed_experts`` of a choice: an array in C order, whose bytes are base64 in JSON."""

    shape: list[int]
    dtype: str
    data: bytes


@dataclass(slots=True)
class Collected:
    """The collected output of one sequence, for a response that is not streamed.

    ``texts``: if thoughts are counted, those of single tokens.
    """

    texts: list[str] = field(default_factory=list)
    logprobs: list[PlacedLogprobs] | None = None
    prompt_logprobs: LogprobArrays | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    beam: BeamOutput | None = None
    """The output of a beam search that this one is."""
    beams: list[BeamOutput] | None = None
    """All of them, in the order of their scores."""
    routed_experts: npt.NDArray[np.uint16] | None = None
    timeline: list[TimelineEvent] | None = None
    token_ids: list[int] = field(default_factory=list)
    has_end_token: bool = False

    def add(self, delta: OutputDelta) -> None:
        self.texts += delta.texts or (delta.text,)
        self.token_ids += delta.token_ids
        self.has_end_token = delta.has_end_token
        if delta.logprobs is not None:
            self.logprobs = [] if self.logprobs is None else self.logprobs
            self.logprobs += delta.logprobs
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        self.beams, self.routed_experts, self.timeline = delta.beams, delta.routed_experts, delta.timeline

    @property
    def size(self) -> int:
        """Characters of its texts, and what takes as long to format."""
        experts = 0 if self.routed_experts is None else self.routed_experts.size // EXPERTS_PER_CHARACTER
        return sum(map(len, self.texts)) + experts

    def outputs(self) -> "list[Collected]":
        """Return one for each output: this one alone, or those of a beam search."""
        if self.beams is None:
            return [self]
        return [
            Collected(b.texts or [b.text], None, None, b.finish_reason, b.stop_reason, beam=b, token_ids=b.token_ids)
            for b in self.beams
        ]


def scores(answer: OutputDelta | Collected) -> tuple[float | UnsetType, float | UnsetType]:
    """Return score and cumulative log probability of an output of a beam search."""
    beam = answer.beam if isinstance(answer, Collected) else None
    return (UNSET, UNSET) if beam is None else (beam.score, beam.logprob)


def num_prompt_values(params: SamplingParams, prompts: Sequence[Prompt]) -> int:
    """Return the number of prompt log probabilities that a response to these prompts has."""
    if params.prompt_logprobs is None:
        return 0
    return params.n * (params.prompt_logprobs + 1) * sum(len(prompt.token_ids) - 1 for prompt in prompts)


def num_values(delta: OutputDelta) -> int:
    """Return the number of log probabilities in the delta."""
    of_prompt = 0 if delta.prompt_logprobs is None else delta.prompt_logprobs.values.size
    return of_prompt + sum(1 + len(each.logprobs.top) for each in delta.logprobs or ())


def experts_body(answer: OutputDelta | Collected, moe: MoeConfig | None) -> ExpertsBody | UnsetType:
    """Return the experts of an answer that has ended; UNSET if they were not requested."""
    if answer.routed_experts is None or moe is None:
        return UNSET
    found = by_layer(answer.routed_experts, moe)
    return ExpertsBody(list(found.shape), str(found.dtype), found.tobytes())


class ResponseFormatter:
    """Formats the responses of one endpoint as JSON.

    ``request_id``: id of the response; ``readers``: of its answers, if they are messages; ``clocks``: of its sequences,
    once they are submitted.
    """

    __slots__ = ("clocks", "readers", "request_id")

    def __init__(self, request_id: str, readers: Sequence[AnswerReader] = ()) -> None:
        self.request_id, self.readers = request_id, readers
        self.clocks: Sequence[SequenceClock] = ()

    def event(self, index: int, delta: OutputDelta, usage: Usage | None) -> bytes:
        """Return the event for one delta of sequence ``index``."""
        raise NotImplementedError

    def usage_event(self, usage: Usage) -> bytes:
        """Return the last event, which holds the usage if the client requested it; empty if an earlier one has it."""
        return b""

    def response(self, answers: Sequence[Collected], usage: Usage) -> bytes:
        """Return the body of a response that is not streamed."""
        raise NotImplementedError

    def tool(self, index: int) -> str:
        """Return the name of the first tool that answer ``index``, which was formatted, calls, or ""."""
        return tool_of(self.readers[index]) if self.readers else ""


def report_tools(formatter: ResponseFormatter, answers: Sequence[StreamedAnswer]) -> None:
    """Report which tools the answers call. They have ended, and the formatter has read them."""
    for index, answer in enumerate(answers):
        if tool := formatter.tool(index):
            answer.sequence.calls_tool(tool)


def encode_choices(
    answers: Sequence[Collected], choice: Callable[[int, Collected], msgspec.Struct]
) -> list[msgspec.Raw]:
    """Return each choice as JSON. One after the other, because encoding holds the interpreter lock.

    Log probabilities and experts are dropped as soon as they are encoded, because freeing many at once takes long, too.
    """
    encoded = []
    for index, answer in enumerate(answers):
        encoded.append(msgspec.Raw(msgspec.json.encode(choice(index, answer))))
        answer.logprobs = answer.routed_experts = None
    return encoded
