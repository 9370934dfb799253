"""POST /v1/chat/completions: from a conversation to the assistant's message."""

import time
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.types import ASGIApp

from quire.frontend.engine.answers import OutputDelta, PlacedLogprobs
from quire.frontend.http.routes.completions import LOWEST_LOGPROB, format_prompt_logprobs
from quire.frontend.http.routes.conversation import AnswerReader, PlainAnswer, TokenReader, encode_conversation
from quire.frontend.http.routes.formatter import (
    Collected,
    ExpertsBody,
    ReasoningTokens,
    ResponseFormatter,
    Usage,
    encode_choices,
    experts_body,
    scores,
)
from quire.frontend.http.routes.generate import Generation, new_request_id
from quire.frontend.http.routes.sessions import as_piece, begin_piece, relay_piece
from quire.frontend.http.routes.text_template import TextTemplate
from quire.frontend.http.routes.tool_calls import new_call_id
from quire.frontend.http.schema.bodies import ChatBody
from quire.frontend.http.schema.schema import READ_ELSEWHERE, ChatRequest
from quire.frontend.http.serving.body import read_json
from quire.frontend.http.serving.row import Row
from quire.frontend.http.serving.server import Server
from quire.frontend.text.logprob import Logprob
from quire.frontend.text.parsing.answer_parser import CallDelta, CallDropped, Content, Event, Thought
from quire.frontend.text.prompts import Prompt
from quire.frontend.text.text_out import TokenTexts
from quire.protocol.wire.timeline import TimelineEvent


class TokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[ContentLogprob]


class FunctionDelta(msgspec.Struct, frozen=True):
    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct, frozen=True):
    """A delta of one tool call. Only the first one has ``id``, ``type`` and the function's name."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class Delta(msgspec.Struct, frozen=True):
    content: str | UnsetType | None = UNSET
    role: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, frozen=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    routed_experts: ExpertsBody | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    timeline: list[TimelineEvent] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, frozen=True):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CalledFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True):
    id: str
    function: CalledFunction
    type: str = "function"


class AnswerMessage(msgspec.Struct, frozen=True):
    role: str
    content: str | None
    refusal: str | None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    """``score``, ``cumulative_logprob``: of outputs of a beam search."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    score: float | UnsetType = UNSET
    cumulative_logprob: float | UnsetType = UNSET
    routed_experts: ExpertsBody | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    timeline: list[TimelineEvent] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True):
    id: str
    object: str
    created: int
    model: str
    choices: Sequence[ChatChoice | msgspec.Raw]
    usage: Usage
    prompt_logprobs: list[dict[int, Logprob] | None] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


async def chat_completions(server: Server, request: Request) -> ASGIApp:
    server.require_generation(request.scope["path"])
    parsed, body = await read_json(request, server.texts, server.parser.chat)
    if parsed.session is not None and (elsewhere := await relay_piece(server, request, parsed, body)) is not None:
        return elsewhere
    found = None if parsed.session is None else begin_piece(server, request, parsed.session, is_chat=True)
    prompt, new_reader = await encode_conversation(server, parsed, len(body), found)
    piece = None
    if parsed.session is not None and found is not None:
        piece, prompt = as_piece(server, found, parsed.session, prompt, parsed.messages[-1]["role"])
    request_id = new_request_id(server, "chatcmpl-", request)
    new_formatter = partial(ChatFormatter, server, new_reader)
    formatter = new_formatter(parsed, [prompt], request_id)
    return Generation(server, parsed, [prompt], formatter, new_formatter=new_formatter, piece=piece)


ROUTES = (Row("POST", "/v1/chat/completions", chat_completions, ChatBody, READ_ELSEWHERE),)


class ChatFormatter(ResponseFormatter):
    """Formats ``chat.completion`` objects and chunks. The first chunk of a choice has the role."""

    __slots__ = (
        "_called", "_calls_named", "_created", "_has_content", "_include_usage", "_is_plain", "_model", "_moe",
        "_num_prompt_logprobs", "_prompt_token_ids", "_readers", "_returns_ids", "_templates", "_token_texts",
    )  # fmt: skip

    def __init__(
        self,
        server: Server,
        new_reader: Callable[[], AnswerReader],
        request: ChatRequest,
        prompts: Sequence[Prompt],
        request_id: str,
    ) -> None:
        self._readers = [TokenReader(new_reader()) for _ in range(request.params.num_outputs)]
        super().__init__(request_id, [each.reader for each in self._readers])
        self._created = int(time.time())
        self._model = request.model
        self._include_usage = request.stream_options.include_usage
        self._token_texts = server.token_texts
        self._moe = server.settings.moe
        self._returns_ids = request.returns_token_ids
        self._prompt_token_ids = prompts[0].token_ids.tolist() if self._returns_ids else UNSET
        """UNSET if they are not requested, or sent."""
        self._num_prompt_logprobs = request.prompt_logprobs
        self._calls_named = request.tool_use is not None and request.tool_use.function is not None
        self._has_content = request.tool_use is None
        self._is_plain = all(isinstance(each, PlainAnswer) for each in self.readers)
        self._called: dict[int, set[int]] = {}
        """Indices of the calls of each choice."""
        self._templates: list[TextTemplate | None] = [None] * request.params.num_outputs
        """Chunks with nothing but content, of the choices that have started."""

    def event(self, index: int, delta: OutputDelta, usage: Usage | None) -> bytes:
        last = delta.finish_reason is not None
        template = self._templates[index]
        is_bare = not (last or self._returns_ids) and delta.logprobs is None and usage is None
        if is_bare and self._is_plain and template is not None:
            return template.fill(delta.text)
        events = self._readers[index].push(delta.texts or (delta.text,), last=last)
        if template is None:
            self._templates[index] = TextTemplate(lambda text: self._chunk(ChunkChoice(index, Delta(text)), None))
        elif is_bare and len(events) == 1:
            (event,) = events
            if isinstance(event, Content):
                return template.fill(event.text)
        message = self._message_delta(index, events, UNSET if template else "assistant")
        reason = self._reason(index, delta.finish_reason)
        more = experts_body(delta, self._moe), delta.token_ids if self._returns_ids else UNSET, delta.timeline or UNSET
        choice = ChunkChoice(index, message, self._logprobs(delta), reason, delta.stop_reason, *more)
        ids, self._prompt_token_ids = self._prompt_token_ids, UNSET
        return self._chunk(choice, usage, ids)

    def _logprobs(self, answer: OutputDelta | Collected) -> ChatLogprobs | None:
        """Return those of the tokens of the text; if ids are returned, of all tokens, also of the one that ends it."""
        if answer.logprobs is None:
            return None
        is_cut = answer.has_end_token and not self._returns_ids
        return format_logprobs(answer.logprobs[:-1] if is_cut else answer.logprobs, self._token_texts)

    def _message_delta(self, index: int, events: Sequence[Event], role: str | UnsetType) -> Delta:
        self._note_calls(index, events)
        calls = [_call_delta(event) for event in events if isinstance(event, CallDelta)]
        reasoning = _joined(events, Thought) or UNSET
        content: str | UnsetType | None = _joined(events, Content)
        if not content and (calls or reasoning or not self._has_content):
            content = UNSET if role is UNSET else None
        return Delta(content, role, calls or UNSET, reasoning, reasoning)

    def usage_event(self, usage: Usage) -> bytes:
        return self._encode([], self._with_thoughts(usage))

    def _with_thoughts(self, usage: Usage) -> Usage:
        num_thought = sum(each.num_thought_tokens for each in self._readers)
        count = ReasoningTokens(min(num_thought, usage.completion_tokens))
        return msgspec.structs.replace(usage, completion_tokens_details=count)

    def response(self, answers: Sequence[Collected], usage: Usage) -> bytes:
        choices = encode_choices(answers, self._choice)
        # All choices have the same prompt.
        prompt_logprobs = format_prompt_logprobs(
            answers[0].prompt_logprobs, self._num_prompt_logprobs, self._token_texts
        )
        return msgspec.json.encode(
            ChatCompletion(
                self.request_id,
                "chat.completion",
                self._created,
                self._model,
                choices,
                self._with_thoughts(usage),
                prompt_logprobs,
                self._prompt_token_ids,
            )
        )

    def _choice(self, index: int, answer: Collected) -> ChatChoice:
        texts = ["".join(answer.texts)] if self._is_plain else answer.texts
        events = self._readers[index].push(texts, last=True)
        self._note_calls(index, events)
        calls = whole_calls(events)
        reasoning = _joined(events, Thought) or UNSET
        content = _joined(events, Content) or (None if calls or not self._has_content else "")
        message = AnswerMessage(
            "assistant", content, tool_calls=calls or UNSET, reasoning=reasoning, reasoning_content=reasoning
        )
        ended = self._reason(index, answer.finish_reason), answer.stop_reason
        experts, ids = experts_body(answer, self._moe), answer.token_ids if self._returns_ids else UNSET
        timeline = answer.timeline or UNSET
        return ChatChoice(index, message, self._logprobs(answer), *ended, *scores(answer), experts, ids, timeline)

    def _note_calls(self, index: int, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, CallDelta):
                self._called.setdefault(index, set()).add(event.index)
            elif isinstance(event, CallDropped):
                self._called[index].discard(event.index)

    def _reason(self, index: int, finish_reason: str | None) -> str | None:
        """Return the finish reason as OpenAI defines it: ``stop``, not ``tool_calls``, for a named function."""
        any_call = not self._calls_named and bool(self._called.get(index))
        return "tool_calls" if any_call and finish_reason == "stop" else finish_reason

    def _chunk(self, choice: ChunkChoice, usage: Usage | None, ids: list[int] | UnsetType = UNSET) -> bytes:
        unset = None if self._include_usage else UNSET
        return self._encode([choice], unset if usage is None else self._with_thoughts(usage), ids)

    def _encode(
        self, choices: list[ChunkChoice], usage: Usage | UnsetType | None, ids: list[int] | UnsetType = UNSET
    ) -> bytes:
        return msgspec.json.encode(
            ChatChunk(self.request_id, "chat.completion.chunk", self._created, self._model, choices, usage, ids)
        )


def _joined(events: Sequence[Event], kind: type[Content] | type[Thought]) -> str:
    return "".join(event.text for event in events if isinstance(event, kind))


def _call_delta(call: CallDelta) -> ToolCallDelta:
    if call.name is None:
        return ToolCallDelta(call.index, FunctionDelta(call.arguments))
    return ToolCallDelta(call.index, FunctionDelta(call.arguments, call.name), call.id or new_call_id(), "function")


def whole_calls(events: Sequence[Event]) -> list[ToolCall]:
    """Return the calls of a complete answer, without those that were dropped."""
    heads: dict[int, tuple[str, str]] = {}
    arguments: dict[int, list[str]] = {}
    for event in events:
        if isinstance(event, CallDelta):
            heads.setdefault(event.index, (event.id or new_call_id(), event.name or ""))
            arguments.setdefault(event.index, []).append(event.arguments)
        elif isinstance(event, CallDropped):
            del heads[event.index]
    return [ToolCall(head[0], CalledFunction(head[1], "".join(arguments[index]))) for index, head in heads.items()]


def format_logprobs(placed: Sequence[PlacedLogprobs], texts: TokenTexts) -> ChatLogprobs:
    """Return log probabilities in chat format: one object per token, with its bytes."""
    return ChatLogprobs([_content(entry, texts) for entry in placed])


def _content(entry: PlacedLogprobs, texts: TokenTexts) -> ContentLogprob:
    sampled = _token(entry.logprobs.token_id, entry.logprobs.logprob, texts)
    best = [_token(token_id, logprob, texts) for token_id, logprob in entry.logprobs.top]
    return ContentLogprob(sampled.token, sampled.logprob, sampled.bytes, best)


def _token(token_id: int, logprob: float, texts: TokenTexts) -> TokenLogprob:
    raw = texts.raw(token_id)
    return TokenLogprob(raw.decode("utf-8", "replace"), max(logprob, LOWEST_LOGPROB), list(raw))
