"""POST /v1/decisions: OpenAI's API for questions about one input, answered with probabilities."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from quire.frontend.engine.terms import Terms
from quire.frontend.engine.update import Update
from quire.frontend.http.dialects.chat_fields import renamed
from quire.frontend.http.dialects.responses_events import token_counts
from quire.frontend.http.dialects.responses_input import chat_messages, input_items
from quire.frontend.http.routes.pooling.response import ENCODE, Entries, PooledHead, PooledResponse, PooledUsage
from quire.frontend.http.routes.pooling.run import InputRun
from quire.frontend.http.schema.errors import ApiError
from quire.frontend.http.schema.reading import read
from quire.frontend.http.schema.schema import ChatRequest, Parser
from quire.frontend.http.schema.unknown_fields import Ignored
from quire.frontend.http.serving.body import read_json
from quire.frontend.http.serving.row import Row
from quire.frontend.http.serving.server import Server
from quire.frontend.text.decisions.asking import Asker
from quire.frontend.text.decisions.questions import Question, read_questions
from quire.frontend.text.decisions.reads import Decisions
from quire.frontend.text.message_checks import MAX_MESSAGES
from quire.frontend.text.prompts import Prompt
from quire.protocol.errors import InvalidRequest
from quire.protocol.wire.front_end_messages import AddRequest

CHAT_FIELDS = ("priority", "cache_salt", "chat_template_kwargs")
"""Fields beside those of DecisionBody, which are read as those of chat."""


class DecisionBody(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of ``/v1/decisions``."""

    input: Any
    questions: Any
    model: str | None = None
    # Ignored:
    prompt_cache_key: str = ""
    prompt_cache_options: Any = None
    safety_identifier: str = ""


def parse_decisions(parser: Parser, raw: Mapping[str, Any]) -> tuple[ChatRequest, list[Question]]:
    """Return the input as a request of chat, by whose names InvalidRequest has its fields, and the questions."""
    ignored = Ignored(parser.unknown_fields)
    body = read(DecisionBody, raw, besides=CHAT_FIELDS, ignored=ignored)
    messages = chat_messages("", input_items(body.input, MAX_MESSAGES))
    passed = {name: raw.get(name) for name in CHAT_FIELDS}
    passed |= {"model": body.model, "messages": messages, "reasoning_effort": "none"}
    return parser.chat(passed, ignored), read_questions(body.questions)


async def decisions(server: Server, request: Request) -> ASGIApp:
    server.require_generation(request.scope["path"])

    def encode() -> Decisions:
        markers = server.settings.thinking.start, server.settings.thinking.end
        asker = Asker(chat.messages, chat.options, server.text_in, server.engine, markers)
        return asker.ask(questions)

    try:
        (chat, questions), body = await read_json(request, server.texts, partial(parse_decisions, server.parser))
        await chat.options.images.read(server.settings.images)
        made = await server.conversations.run(len(body), chat.options, encode)
    except InvalidRequest as error:
        raise renamed(error, {"messages": "input"}, ()) from None
    answer = PooledHead.to(server, "decision", request, chat.model)
    return PooledResponse(server, ReadRun(server, chat, made, answer.id), DecisionEntries(answer, made))


ROUTES = (Row("POST", "/v1/decisions", decisions, DecisionBody, CHAT_FIELDS),)


class ReadRun(InputRun[Update]):
    """The reads of a request, stage by stage."""

    task = "decisions"

    def __init__(self, server: Server, chat: ChatRequest, made: Decisions, request_id: str) -> None:
        super().__init__(server, chat, len(made.reads), request_id)
        self._made = made

    def num_ready(self) -> int:
        return next(end for end in self._made.ends if end > self._num_returned)

    def prompt(self, index: int) -> Prompt:
        return self._made.reads[index].prompt()

    def request(self, request_id: str, index: int, prompt: Prompt, terms: Terms) -> AddRequest:
        return terms.request(request_id, prompt, self._made.reads[index].params, 0)

    def outcome(self, update: Update) -> Update | str:
        return update.detail or update


class DecisionEntries(Entries[Update]):
    """``{"model", "answers", "usage"}``, once all reads have a result."""

    def __init__(self, answer: PooledHead, made: Decisions) -> None:
        super().__init__(answer)
        self._made = made
        self._num_cached = 0

    def head(self) -> bytes:
        return b""

    def push(self, index: int, outcome: Update | ApiError) -> Iterable[bytes]:
        if isinstance(outcome, ApiError):
            raise outcome
        if not index:
            self._num_cached = outcome.num_cached_tokens
        self._made.reads[index].note(outcome.logprobs)
        return []

    def tail(self, usage: PooledUsage) -> Iterable[bytes]:
        counts = token_counts(self._made.num_tokens, self._num_cached, 0, 0)
        answers = [each.answer() for each in self._made.asked]
        return [ENCODE({"model": self.answer.model, "answers": answers, "usage": counts})]
