"""Bodies of the Responses API, translated to bodies of chat."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import msgspec
from msgspec import structs

from quire.frontend.http.dialects.chat_fields import PASSED_FIELDS, passed, renamed
from quire.frontend.http.dialects.responses_input import Item, chat_messages, input_items
from quire.frontend.http.dialects.responses_items import response_of
from quire.frontend.http.dialects.responses_tools import Tools, chat_choice, enforce_grammars, read_tools
from quire.frontend.http.schema.bodies import Effort, JsonSchema
from quire.frontend.http.schema.errors import ApiError, shorten
from quire.frontend.http.schema.reading import members, read
from quire.frontend.http.schema.schema import ChatRequest, Parser
from quire.frontend.http.schema.unknown_fields import Ignored
from quire.frontend.http.stored.response_store import OwnResponses
from quire.frontend.http.stored.stored_response import StoredResponse
from quire.frontend.text.message_checks import MAX_MESSAGES
from quire.frontend.text.message_form import INSTRUCTIONS
from quire.frontend.text.text_parts import encoded, string_at
from quire.protocol.errors import InvalidRequest, wrong_value

UNSUPPORTED = {
    "conversation": "use previous_response_id",
    "prompt": "send its text as instructions",
    "session": "use previous_response_id",
}
UNSET_OF_FUNCTION = {"description": None, "parameters": None, "strict": None}
"""Fields that clients expect of each function that a response repeats."""
ECHOED = (
    *("background", "max_output_tokens", "max_tool_calls", "parallel_tool_calls", "previous_response_id"),
    *("prompt_cache_key", "safety_identifier", "truncation"),
)
ECHOED_PARAMS = ("frequency_penalty", "presence_penalty", "temperature", "top_p")
"""Fields of the body, and of SamplingParams, that a response repeats."""
LOGPROBS, SEALED_THOUGHTS = "message.output_text.logprobs", "reasoning.encrypted_content"
BESIDES_BODY = (*PASSED_FIELDS, "stop")
"""Fields beside those of ResponsesBody."""
CHAT_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    r"response_format\.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    r"tool_choice\.allowed_tools": "tool_choice",
    r"tool_choice\.function": "tool_choice",
    "messages": "input",
}


class Reasoning(msgspec.Struct, frozen=True, kw_only=True):
    effort: Effort | None = None
    # Ignored:
    summary: str = ""
    generate_summary: str = ""
    context: str = ""


class TextOptions(msgspec.Struct, frozen=True, kw_only=True):
    format: dict[str, Any] | None = None
    # Ignored:
    verbosity: str = ""


class ResponsesBody(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of ``/v1/responses``.

    Attributes:
        background: compute it without the client, which asks for it later.
        generate: false to compute the prompt only, so that it is in the prefix cache.
    """

    input: Any = None
    model: str | None = None
    instructions: str = ""
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool = False
    include: list[str] | None = None
    max_output_tokens: Any = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    truncation: str = "disabled"
    background: bool = False
    conversation: Any = None
    prompt: Any = None
    prompt_cache_key: str | None = None
    session: Any = None
    metadata: dict[str, Any] | None = None
    generate: bool = True
    # Ignored, and returned in the response:
    max_tool_calls: int | None = None
    safety_identifier: str | None = None
    service_tier: str = ""
    user: str = ""
    # Ignored:
    stream_options: dict[str, Any] | None = None
    client_metadata: dict[str, Any] | None = None
    prompt_cache_retention: str = ""
    context_management: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesRequest:
    """A request as chat, and what its response needs.

    Attributes:
        body: all fields but ``input``, which may be large.
        chain: id of the first response of the chain that it continues, or "".
        before: items of the conversation that ``previous_response_id`` names, as JSON.
        input: the request's own items, as JSON.
    """

    body: ResponsesBody
    chat: ChatRequest
    tools: Tools
    chain: str
    before: tuple[bytes, ...]
    input: tuple[bytes, ...]

    @property
    def is_stored(self) -> bool:
        return self.body.store is not False

    @property
    def echo(self) -> dict[str, Any]:
        """The fields that the response repeats, with the values that were used."""
        body, tools = self.body, self.body.tools or ()
        return {
            **{name: getattr(body, name) for name in ECHOED},
            **{name: getattr(self.chat.params, name) for name in ECHOED_PARAMS},
            "instructions": body.instructions or None,
            "metadata": body.metadata or {},
            "reasoning": {"effort": None, "summary": None, **(body.reasoning or {})},
            "service_tier": "default",
            "text": {"format": {"type": "text"}, **(body.text or {})},
            "tool_choice": body.tool_choice or "auto",
            "tools": [{**UNSET_OF_FUNCTION, **each} if each.get("type") == "function" else each for each in tools],
            "top_logprobs": body.top_logprobs or 0,
            "user": body.user or None,
        }

    def store_in(
        self,
        own: OwnResponses,
        response_id: str,
        body: bytes,
        output: Sequence[Item],
        events: tuple[bytes, ...] | None = None,
    ) -> None:
        """Store the response, which has ended, for its connection only unless ``is_stored``.

        ``body``: the response as JSON; ``events``: as in StoredResponse.
        """
        conversation = (*self.before, *self.input, *map(msgspec.json.encode, output))
        sizes, images = (len(self.before), len(self.input)), tuple(self.chat.options.images.stored)
        only_for = None if self.is_stored else own.connection
        response = StoredResponse(own.tenant, body, conversation, *sizes, only_for, self.chain, images, events)
        own.store.add(response_id, response)


def parse_responses(parser: Parser, raw: Mapping[str, Any], stored: OwnResponses) -> ResponsesRequest:
    """Translate a body to a chat request. ``stored``: the responses to which it may refer.

    Raises:
        InvalidRequest: a field is malformed or not supported, with the client's name of the field.
        ApiError: an id is not stored, or the response has not ended.
    """
    ignored = Ignored(parser.unknown_fields)
    body = read(ResponsesBody, raw, besides=BESIDES_BODY, ignored=ignored)
    _check_supported(body)
    previous_id = body.previous_response_id
    previous = None if previous_id is None else stored.ended(previous_id, "previous_response_id")
    before = () if previous is None else previous.conversation
    chain = "" if previous is None else previous.chain or previous_id or ""
    own = _own_items(body, before, stored)
    items = [*(msgspec.json.decode(item) for item in before), *own]
    if len(items) > MAX_MESSAGES:
        raise InvalidRequest(f"a conversation must have at most {MAX_MESSAGES} items (got {len(items)})", "input")
    messages = chat_messages(body.instructions, items, len(before))
    if not body.generate and all(message["role"] in INSTRUCTIONS for message in messages):
        # A prompt needs a turn. The text before it is the same with the later turn.
        messages.append({"role": "user", "content": ""})
    tools = read_tools(body.tools or [], ignored)
    reasoning = read(Reasoning, body.reasoning or {}, "reasoning", ignored=ignored)
    chat: dict[str, Any] = passed(raw) | {
        "model": body.model,
        "stream": body.stream,
        "stop": raw.get("stop"),
        "max_completion_tokens": body.max_output_tokens,
        "messages": messages,
        "tools": tools.functions or None,
        "parallel_tool_calls": body.parallel_tool_calls,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning_effort": reasoning.effort,
        "response_format": _format(read(TextOptions, body.text or {}, "text", ignored=ignored).format, ignored),
    }
    if tools.functions or body.tool_choice not in (None, "auto", "none"):
        chat["tool_choice"] = chat_choice(body.tool_choice, tools)
    if LOGPROBS in (body.include or ()) or body.top_logprobs:
        chat |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    try:
        parsed = enforce_grammars(parser.chat(chat, ignored), tools, ignored)
    except InvalidRequest as error:
        raise renamed(error, CHAT_NAMES, tools.places) from None
    parsed.options.images.stored += () if previous is None else previous.images
    parsed = replace(parsed, terms=replace(parsed.terms, job=parsed.terms.job.or_by("response", chain)))
    if not body.generate:
        # The engine always generates a token, which the response leaves out.
        parsed = replace(parsed, params=structs.replace(parsed.params, max_tokens=1), prompt_only=True)
    return ResponsesRequest(
        body=structs.replace(body, input=None),
        chat=parsed,
        tools=tools,
        chain=chain,
        before=before,
        input=tuple(encoded(item, f"input[{i}]") for i, item in enumerate(own)),
    )


def _check_supported(body: ResponsesBody) -> None:
    for name, instead in UNSUPPORTED.items():
        if getattr(body, name):
            raise InvalidRequest(f"{name} is not supported: {instead}", name, "unsupported")
    if body.background and body.store is False:
        raise InvalidRequest("background needs store to be true: the response is asked for later", "store")
    if body.truncation not in ("auto", "disabled"):
        raise wrong_value("truncation", "auto or disabled", body.truncation)


def _own_items(body: ResponsesBody, before: Sequence[bytes], stored: OwnResponses) -> list[Item]:
    """Return the request's own items, with references replaced by the items themselves."""
    if body.input is None and not before and body.generate:
        raise InvalidRequest("input is required", "input", "missing_required_parameter")

    @cache
    def output(response_id: str) -> dict[str, Item]:
        found = stored.find(response_id)
        items = map(msgspec.json.decode, found.output) if isinstance(found, StoredResponse) else ()
        return {item["id"]: item for item in items}

    own: list[Item] = []
    for i, item in enumerate([] if body.input is None else input_items(body.input, MAX_MESSAGES)):
        # OpenAI's clients may leave out the type of a reference.
        if item.get("type") == "item_reference" or item.keys() == {"id"}:
            item_id = string_at(item, "id", f"input[{i}]")
            if (found := output(response_of(item_id)).get(item_id)) is None:
                text = f"item {shorten(item_id)} not found: send the item itself"
                raise ApiError(404, text, f"input[{i}].id", "not_found")
            item = found
        own.append(item)
    return own


def _format(given: dict[str, Any] | None, ignored: Ignored) -> dict[str, Any] | None:
    """Return ``response_format`` for ``text.format``."""
    if given is None or given.get("type") != "json_schema":
        return given
    described = members(JsonSchema, given, "text.format", ("type",), ignored=ignored)
    return {"type": "json_schema", "json_schema": {"name": "output", **described}}
