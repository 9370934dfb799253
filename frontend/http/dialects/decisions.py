"""POST /v1/decisions: OpenAI's API for questions about one input, answered with probabilities."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.frontend.engine.terms import Terms
from quire.frontend.engine.update import Update
from quire.frontend.http.dialects.chat_fields import renamed
from quire.frontend.http.dialects.responses_events import token_counts
from quire.frontend.http.dialects.responses_input import chat_messages, input_items
from quire.frontend.http.routes.generate import new_request_id
from quire.frontend.http.routes.pooling.run import PooledRun
from quire.frontend.http.schema.bodies import TokenizeBody
from quire.frontend.http.schema.reading import read
from quire.frontend.http.schema.schema import Parser
from quire.frontend.http.schema.unknown_fields import Ignored
from quire.frontend.http.serving.body import json_response, read_json
from quire.frontend.http.serving.gate import IGNORED_FIELDS
from quire.frontend.http.serving.row import Row
from quire.frontend.http.serving.server import Server
from quire.frontend.http.serving.sse import run_until_disconnect
from quire.frontend.http.serving.tracing import RequestSpan
from quire.frontend.text.chat_template import Message
from quire.frontend.text.decisions.asking import Asker
from quire.frontend.text.decisions.questions import Question, json_text, read_questions
from quire.frontend.text.decisions.reads import Decisions, Read
from quire.frontend.text.message_checks import MAX_MESSAGES
from quire.frontend.text.prompts import Prompt
from quire.frontend.text.text_in import ChatOptions
from quire.protocol.config import MAX_PRIORITY, MIN_PRIORITY
from quire.protocol.errors import InvalidRequest
from quire.protocol.process.log import event_logger
from quire.protocol.request.sampling_params import MAX_SALT_LENGTH, SamplingParams
from quire.protocol.wire.front_end_messages import AddRequest
from quire.protocol.wire.logprobs import TokenLogprobs

log = event_logger("http")


class DecisionBody(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of ``/v1/decisions``."""

    input: Any
    questions: Any
    model: str | None = None
    priority: Annotated[int, Meta(ge=MIN_PRIORITY, le=MAX_PRIORITY)] = 0
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MAX_SALT_LENGTH)] = ""
    chat_template_kwargs: Any = None
    # Ignored:
    prompt_cache_key: str = ""
    prompt_cache_options: Any = None
    safety_identifier: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRequest:
    """A parsed request. ``ignored``: names of unknown fields that the client sent."""

    model: str
    messages: list[Message]
    options: ChatOptions
    questions: list[Question]
    terms: Terms
    ignored: Sequence[str]


def parse_decisions(parser: Parser, raw: Mapping[str, Any]) -> DecisionRequest:
    """Return the request of a body; raise InvalidRequest, with the client's name of the field, if it is refused."""
    ignored = Ignored(parser.unknown_fields)
    body = read(DecisionBody, raw, ignored=ignored)
    items = [_with_json(item, f"input[{i}]") for i, item in enumerate(input_items(body.input, MAX_MESSAGES))]
    asked = TokenizeBody(
        messages=chat_messages("", items), chat_template_kwargs=body.chat_template_kwargs, reasoning_effort="none"
    )
    try:
        messages, options = parser.conversation(asked, ignored)
    except InvalidRequest as error:
        raise renamed(error, {"messages": "input"}, ()) from None
    return DecisionRequest(
        model=parser.model(body.model),
        messages=messages,
        options=options,
        questions=read_questions(body.questions, ignored.add),
        terms=Terms(body.priority, body.cache_salt),
        ignored=ignored.names,
    )


def _with_json(item: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return an item of the input with its parts of type ``input_json`` as text."""
    if not isinstance(parts := item.get("content"), list):
        return item
    content = [
        {"type": "input_text", "text": json_text(part.get("data"), f"{where}.content[{i}].data")}
        if isinstance(part, dict) and part.get("type") == "input_json"
        else part
        for i, part in enumerate(parts)
    ]
    return {**item, "content": content}


async def decisions(server: Server, request: Request) -> ASGIApp:
    server.require_generation(request.scope["path"])
    parsed, body = await read_json(request, server.texts, lambda raw: parse_decisions(server.parser, raw))
    thinking, options = server.settings.thinking, parsed.options
    await options.images.read(server.settings.images)

    def encode() -> Decisions:
        markers = thinking.start, thinking.end
        asker = Asker(parsed.messages, options, server.text_in, server.engine, markers)
        return Decisions([asker.ask(question) for question in parsed.questions])

    try:
        made = await server.conversations.run(len(body), options, encode)
    except InvalidRequest as error:
        raise renamed(error, {"messages": "input"}, ()) from None
    return DecisionResponse(server, parsed, made, new_request_id(server, "decision-", request))


ROUTES = (Row("POST", "/v1/decisions", decisions, DecisionBody),)


class _ReadInputs:
    """The reads of one stage."""

    are_checked = True

    def __init__(self, model: str, reads: Sequence[Read]) -> None:
        self.model = model
        self._reads = reads

    def __len__(self) -> int:
        return len(self._reads)

    def num_chars(self, index: int) -> int:
        return 0

    def prompt(self, index: int) -> Prompt:
        return self._reads[index].whole_prompt()

    def size(self, prompt: Prompt) -> int:
        return 4 * len(prompt.token_ids)

    def request(self, request_id: str, index: int, prompt: Prompt, terms: Terms) -> AddRequest:
        return terms.request(request_id, prompt, self._reads[index].params, 0)

    def outcome(self, update: Update) -> list[TokenLogprobs] | str:
        return update.detail or update.logprobs or []


class DecisionResponse:
    """Reads what the questions of a request need, and writes the answers."""

    def __init__(self, server: Server, request: DecisionRequest, made: Decisions, request_id: str) -> None:
        self._server, self._request, self._made, self._request_id = server, request, made, request_id
        self._num_cached_tokens = 0
        self._finish = "abort"
        self._arrival = server.metrics.now()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        server, request, made = self._server, self._request, self._made
        scope["state"][IGNORED_FIELDS] = request.ignored
        log.info("request", id=self._request_id, questions=len(request.questions), prompt_tokens=made.num_tokens)
        try:
            await run_until_disconnect(receive, self._run(server.of_client(request.terms, scope)))
            self._finish = "stop"
        except InvalidRequest as refused:
            server.metrics.rejected(refused.code)
            raise
        finally:
            span = RequestSpan(
                request_id=self._request_id,
                model=request.model,
                params=SamplingParams(),
                prompt_tokens=made.num_tokens,
                output_tokens=0,
                finish_reasons=[self._finish],
                arrival=self._arrival,
                end=server.metrics.now(),
                clocks=[],
            )
            server.note_end(scope, span)
        usage = token_counts(made.num_tokens, self._num_cached_tokens, 0, 0)
        response = json_response({"model": request.model, "answers": made.answers(), "usage": usage})
        response.headers["x-request-id"] = self._request_id
        await response(scope, receive, send)

    async def _run(self, terms: Terms) -> None:
        for number, reads in enumerate(self._made.stages):
            inputs = _ReadInputs(self._request.model, reads)
            run = PooledRun(self._server, inputs, f"{self._request_id}-{number}", terms, fails_together=True)
            async for batch in run.results():
                for index, found in batch:
                    assert isinstance(found, list)
                    self._made.note(reads[index], found)
            if not number:
                self._num_cached_tokens = run.num_cached_tokens
