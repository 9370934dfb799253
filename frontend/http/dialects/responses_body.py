"""Bodies of the Responses API, translated to bodies of chat."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from msgspec import structs

from quire.frontend.http.dialects.chat_fields import PASSED_FIELDS, passed, renamed
from quire.frontend.http.dialects.responses_input import Item, chat_messages, input_items
from quire.frontend.http.dialects.responses_tools import Tools, chat_choice, enforce_grammars, read_tools
from quire.frontend.http.dialects.text_parts import encoded, string_at
from quire.frontend.http.schema.bodies import Effort, Name
from quire.frontend.http.schema.reading import read
from quire.frontend.http.schema.schema import ChatRequest, Parser
from quire.frontend.http.schema.unknown_fields import Ignored
from quire.frontend.http.stored.stored_response import StoredResponse
from quire.frontend.text.chat_template import Message
from quire.frontend.text.message_checks import MAX_MESSAGES
from quire.frontend.text.message_form import INSTRUCTIONS
from quire.protocol.errors import InvalidRequest, wrong_value

UNSUPPORTED = {
    "conversation": "use previous_response_id",
    "prompt": "send its text as instructions",
    "session": "use previous_response_id",
}
UNSET_OF_FUNCTION = {"description": None, "parameters": None, "strict": None}
"""Fields that clients expect of each function that a response repeats."""
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


class TextFormat(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    schema: dict[str, Any] | None = None
    name: Name = "output"
    description: str = ""
    strict: bool = False


class ResponsesBody(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of ``/v1/responses``."""

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
        generate: false to compute the prompt only, so that it is in the prefix cache.
        chain: id of the first response of the chain that it continues, or "".
        before: items of the conversation that ``previous_response_id`` names, as JSON.
        input: the request's own items, as JSON.
        background: it runs without the client, which asks for it later.
        echo: fields that the response repeats.
    """

    chat: ChatRequest
    tools: Tools
    generate: bool
    chain: str
    before: tuple[bytes, ...]
    input: tuple[bytes, ...]
    store: bool
    background: bool
    seals_thoughts: bool
    echo: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Lookup:
    """Access to what this client has stored. Both raise for an id that is not stored.

    Attributes:
        response: one response.
        item: one output item, as JSON.
    """

    response: Callable[[str], StoredResponse]
    item: Callable[[str, str], bytes]


def parse_responses(parser: Parser, raw: Mapping[str, Any], lookup: Lookup) -> ResponsesRequest:
    """Translate a body to a chat request.

    Raises:
        InvalidRequest: a field is malformed or not supported, with the client's name of the field.
        ApiError: an id is not stored.
    """
    ignored = Ignored(parser.unknown_fields)
    body = read(ResponsesBody, raw, besides=BESIDES_BODY, ignored=ignored)
    _check_supported(body)
    previous_id = body.previous_response_id
    previous = None if previous_id is None else lookup.response(previous_id)
    before = () if previous is None else previous.conversation
    chain = "" if previous is None else previous.chain or previous_id or ""
    own = _own_items(body, before, lookup)
    items = [*(msgspec.json.decode(item) for item in before), *own]
    if len(items) > MAX_MESSAGES:
        raise InvalidRequest(f"a conversation must have at most {MAX_MESSAGES} items (got {len(items)})", "input")
    tools = read_tools(body.tools or [], ignored)
    reasoning = read(Reasoning, body.reasoning or {}, "reasoning", ignored=ignored)
    chat: dict[str, Any] = passed(raw) | {
        "model": body.model,
        "stream": body.stream,
        "stop": raw.get("stop"),
        "max_completion_tokens": body.max_output_tokens,
        "messages": _messages(body, items, len(before)),
        "tools": tools.functions or None,
        "parallel_tool_calls": body.parallel_tool_calls,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning_effort": reasoning.effort,
        "response_format": _format(read(TextOptions, body.text or {}, "text", ignored=ignored), ignored),
    }
    if tools.functions or body.tool_choice not in (None, "auto", "none"):
        chat["tool_choice"] = chat_choice(body.tool_choice, tools)
    if LOGPROBS in (body.include or ()) or body.top_logprobs:
        chat |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    try:
        parsed = enforce_grammars(parser.chat(chat), tools, ignored)
    except InvalidRequest as error:
        raise renamed(error, CHAT_NAMES, tools.places) from None
    parsed.options.images.stored += () if previous is None else previous.images
    names = [*ignored.names, *(name for name in parsed.ignored if name not in ignored.names)]
    terms = replace(parsed.terms, job=parsed.terms.job.or_by("response", chain))
    parsed = replace(parsed, ignored=names, terms=terms)
    if not body.generate:
        # The engine always generates a token, which the response leaves out.
        parsed = replace(parsed, params=structs.replace(parsed.params, max_tokens=1), prompt_only=True)
    return ResponsesRequest(
        chat=parsed,
        tools=tools,
        generate=body.generate,
        chain=chain,
        before=before,
        input=tuple(encoded(item, f"input[{i}]") for i, item in enumerate(own)),
        store=body.store is not False,
        background=body.background,
        seals_thoughts=SEALED_THOUGHTS in (body.include or ()),
        echo=_echo(body, parsed),
    )


def _messages(body: ResponsesBody, items: Sequence[Item], num_before: int) -> list[Message]:
    messages = chat_messages(body.instructions, items, num_before)
    if not body.generate and all(message["role"] in INSTRUCTIONS for message in messages):
        # A prompt needs a turn. The text before it is the same with the later turn.
        messages.append({"role": "user", "content": ""})
    return messages


def _check_supported(body: ResponsesBody) -> None:
    for name, instead in UNSUPPORTED.items():
        if getattr(body, name):
            raise InvalidRequest(f"{name} is not supported: {instead}", name, "unsupported")
    if body.background and body.store is False:
        raise InvalidRequest("background needs store to be true: the response is asked for later", "store")
    if body.truncation not in ("auto", "disabled"):
        raise wrong_value("truncation", "auto or disabled", body.truncation)


def _own_items(body: ResponsesBody, before: Sequence[bytes], lookup: Lookup) -> list[Item]:
    """Return the request's own items, with references replaced by the items themselves."""
    if body.input is None and not before and body.generate:
        raise InvalidRequest("input is required", "input", "missing_required_parameter")
    items = [] if body.input is None else input_items(body.input, MAX_MESSAGES)
    own: list[Item] = []
    for i, item in enumerate(items):
        # OpenAI's clients may leave out the type of a reference.
        if item.get("type") == "item_reference" or item.keys() == {"id"}:
            where = f"input[{i}]"
            own.append(msgspec.json.decode(lookup.item(string_at(item, "id", where), f"{where}.id")))
        else:
            own.append(item)
    return own


def _format(options: TextOptions, ignored: Ignored) -> dict[str, Any] | None:
    """Return ``response_format`` for ``text.format``."""
    if options.format is None:
        return None
    given = read(TextFormat, options.format, "text.format", ignored=ignored)
    if given.type != "json_schema":
        return {"type": given.type}
    if given.schema is None:
        raise InvalidRequest("text.format.schema is required", "text.format.schema", "missing_required_parameter")
    described = {"name": given.name, "schema": given.schema, "description": given.description, "strict": given.strict}
    return {"type": "json_schema", "json_schema": described}


def _echo(body: ResponsesBody, parsed: ChatRequest) -> dict[str, Any]:
    """Return the fields that a response repeats, with the values that were used."""
    params = parsed.params
    return {
        "background": body.background,
        "frequency_penalty": params.frequency_penalty,
        "instructions": body.instructions or None,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls,
        "presence_penalty": params.presence_penalty,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": None, "summary": None, **(body.reasoning or {})},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "temperature": params.temperature,
        "text": {"format": {"type": "text"}, **(body.text or {})},
        "tool_choice": body.tool_choice or "auto",
        "tools": [
            {**UNSET_OF_FUNCTION, **tool} if tool.get("type") == "function" else tool for tool in body.tools or ()
        ],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": body.truncation,
        "user": body.user or None,
    }
