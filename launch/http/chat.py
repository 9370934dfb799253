"""POST /v1/chat/completions: a conversation in, the assistant's message out."""

import time
from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.types import ASGIApp

from quire.launch.answers import Piece, PlacedLogprobs
from quire.launch.http.body import parse_body, read_body
from quire.launch.http.completions import LOWEST_LOGPROB
from quire.launch.http.generate import Collected, Generation, Usage, new_request_id
from quire.launch.http.schema import ChatRequest
from quire.launch.http.server import Server, in_thread_if_long
from quire.launch.prompts import encode_messages
from quire.launch.text_out import TokenTexts


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


class Delta(msgspec.Struct, frozen=True):
    content: str
    role: str | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, frozen=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None


class ChatChunk(msgspec.Struct, frozen=True):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class AnswerMessage(msgspec.Struct, frozen=True):
    role: str
    content: str
    refusal: str | None = None


class ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None


class ChatCompletion(msgspec.Struct, frozen=True):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


async def chat_completions(server: Server, request: Request) -> ASGIApp:
    """The route's handler."""
    server.require_serving()
    parsed = parse_body(await read_body(request), server.parser.chat)
    num_chars = sum(len(message["content"]) for message in parsed.messages)
    prompt = await in_thread_if_long(
        num_chars, lambda: encode_messages(parsed.messages, parsed.options, server.text_in, server.engine)
    )
    return Generation(server, parsed, [prompt], ChatSpeller(server, parsed))


class ChatSpeller:
    """Writes ``chat.completion`` objects and their chunks; the first chunk of an answer has its role."""

    def __init__(self, server: Server, request: ChatRequest) -> None:
        self.request_id = new_request_id("chatcmpl")
        self._created = int(time.time())
        self._model = request.model
        self._include_usage = request.stream.include_usage
        self._token_texts = server.token_texts
        self._to_begin = set(range(request.params.n))

    def event(self, index: int, piece: Piece, usage: Usage | None) -> bytes:
        begins = index in self._to_begin
        self._to_begin.discard(index)
        delta = Delta(piece.text, "assistant" if begins else UNSET)
        logprobs = None if piece.logprobs is None else spell_logprobs(piece.logprobs, self._token_texts)
        choice = ChunkChoice(index, delta, logprobs, piece.finish_reason, piece.stop_reason)
        return self._chunk([choice], usage or (None if self._include_usage else UNSET))

    def usage_event(self, usage: Usage) -> bytes:
        return self._chunk([], usage)

    def whole(self, answers: Sequence[Collected], usage: Usage) -> bytes:
        choices = [self._choice(index, answer) for index, answer in enumerate(answers)]
        return msgspec.json.encode(
            ChatCompletion(self.request_id, "chat.completion", self._created, self._model, choices, usage)
        )

    def _choice(self, index: int, answer: Collected) -> ChatChoice:
        message = AnswerMessage("assistant", "".join(answer.texts))
        logprobs = None if answer.logprobs is None else spell_logprobs(answer.logprobs, self._token_texts)
        return ChatChoice(index, message, logprobs, answer.finish_reason, answer.stop_reason)

    def _chunk(self, choices: list[ChunkChoice], usage: Usage | UnsetType | None) -> bytes:
        return msgspec.json.encode(
            ChatChunk(self.request_id, "chat.completion.chunk", self._created, self._model, choices, usage)
        )


def spell_logprobs(placed: Sequence[PlacedLogprobs], texts: TokenTexts) -> ChatLogprobs:
    """Log probabilities in the form of chat: one object per token, with its own bytes."""
    return ChatLogprobs([_content(entry, texts) for entry in placed])


def _content(entry: PlacedLogprobs, texts: TokenTexts) -> ContentLogprob:
    sampled = _token(entry.logprobs.token_id, entry.logprobs.logprob, texts)
    best = [_token(token_id, logprob, texts) for token_id, logprob in entry.logprobs.top]
    return ContentLogprob(sampled.token, sampled.logprob, sampled.bytes, best)


def _token(token_id: int, logprob: float, texts: TokenTexts) -> TokenLogprob:
    raw = texts.raw(token_id)
    return TokenLogprob(raw.decode("utf-8", "replace"), max(logprob, LOWEST_LOGPROB), list(raw))
