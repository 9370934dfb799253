"""Bodies of Anthropic's Messages API, translated to bodies of chat."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from quire.frontend.http.dialects.chat_fields import PASSED_FIELDS, passed, renamed, set_thinking
from quire.frontend.http.dialects.messages_blocks import chat_messages
from quire.frontend.http.schema.bodies import Effort
from quire.frontend.http.schema.errors import THREAD_UNSUPPORTED
from quire.frontend.http.schema.reading import read
from quire.frontend.http.schema.schema import ChatRequest, Parser
from quire.frontend.http.schema.unknown_fields import Ignored
from quire.frontend.text.text_parts import object_at, string_at
from quire.protocol.errors import InvalidRequest, wrong_value
from quire.protocol.request.sampling_params import MAX_TOKENS_LIMIT, check_int

CHOICES = {"auto": "auto", "any": "required", "none": "none"}
THINKING = ("enabled", "adaptive", "between_tools", "disabled")
CHAT_NAMES = {
    "stop": "stop_sequences",
    "max_completion_tokens": "max_tokens",
    r"response_format\.json_schema\.schema": "output_config.format.schema",
    "response_format": "output_config.format",
    "thinking_token_budget": "thinking.budget_tokens",
    r"tool_choice\.function": "tool_choice",
}


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True):
    effort: Effort | None = None
    format: dict[str, Any] | None = None


class MessagesBody(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of ``/v1/messages`` and ``/v1/messages/count_tokens``."""

    messages: Any
    model: str | None = None
    max_tokens: Any = None
    system: Any = None
    stream: bool = False
    stop_sequences: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    # Refused:
    thread: Any = None
    compaction: Any = None
    # Ignored:
    metadata: dict[str, Any] | None = None
    service_tier: str = ""
    cache_control: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class MessagesRequest:
    """A request as chat. ``max_tokens``: as the client wrote it, which may exceed the context; 0 for a count."""

    chat: ChatRequest
    max_tokens: int


def parse_messages(parser: Parser, raw: Mapping[str, Any], *, count_only: bool = False) -> MessagesRequest:
    """Translate a body to a chat request. ``count_only``: ``max_tokens`` may be missing, and nothing is generated.

    Raises:
        InvalidRequest: a field is malformed or not supported, with the client's name of the field.
    """
    ignored = Ignored(parser.unknown_fields)
    body = read(MessagesBody, raw, besides=PASSED_FIELDS, ignored=ignored)
    if body.thread is not None:
        raise InvalidRequest("thread is not supported: send the whole conversation", "thread", THREAD_UNSUPPORTED)
    if body.compaction is not None:
        raise InvalidRequest("compaction is not supported: shorten the conversation", "compaction", "unsupported")
    if body.max_tokens is None and not count_only:
        raise InvalidRequest("max_tokens is required", "max_tokens", "missing_required_parameter")
    max_tokens = 0 if body.max_tokens is None else check_int("max_tokens", body.max_tokens, 1, MAX_TOKENS_LIMIT)
    chat: dict[str, Any] = passed(raw)
    chat |= {"model": body.model, "stream": body.stream, "stop": body.stop_sequences}
    if max_tokens:
        chat["max_completion_tokens"] = min(max_tokens, parser.limits.max_model_len)
    chat["messages"], continues = chat_messages(body.system, body.messages)
    if continues:
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    tools = _tools(body.tools or [], ignored)
    chat["tools"] = list(tools.values()) or None
    if body.tool_choice is not None:
        chat["tool_choice"], chat["parallel_tool_calls"] = _choice(body.tool_choice)
    _set_thinking(chat, body)
    _set_output(chat, body, ignored)
    try:
        parsed = parser.chat(chat, ignored)
    except InvalidRequest as error:
        raise renamed(error, CHAT_NAMES, list(tools), "input_schema") from None
    return MessagesRequest(replace(parsed, clamp_max_tokens=True), max_tokens)


def _tools(given: list[dict[str, Any]], ignored: Ignored) -> dict[str, dict[str, Any]]:
    """Return the tools that the client runs, by their paths.

    Tools that only Anthropic's servers know are ignored: without their schema, they cannot be described to the model.
    """
    tools: dict[str, dict[str, Any]] = {}
    for i, tool in enumerate(given):
        where = f"tools[{i}]"
        kind = tool.get("type")
        if kind not in (None, "custom") and "input_schema" not in tool:
            ignored.add(f"tools.{kind}", ())
            continue
        function: dict[str, Any] = {"name": string_at(tool, "name", where)}
        if tool.get("description") is not None:
            function["description"] = string_at(tool, "description", where)
        schema = object_at(tool.get("input_schema"), f"{where}.input_schema")
        tools[where] = {"type": "function", "function": {**function, "parameters": schema}}
    return tools


def _choice(given: dict[str, Any]) -> tuple[Any, bool]:
    """Return chat's ``tool_choice`` and ``parallel_tool_calls``."""
    kind = given.get("type")
    parallel = given.get("disable_parallel_tool_use") is not True
    if kind == "tool":
        name = string_at(given, "name", "tool_choice")
        return {"type": "function", "function": {"name": name}}, parallel
    if not isinstance(kind, str) or kind not in CHOICES:
        raise wrong_value("tool_choice.type", "one of auto, any, tool, none", kind)
    return CHOICES[kind], parallel


def _set_thinking(chat: dict[str, Any], body: MessagesBody) -> None:
    """Express ``thinking`` as variables of the chat template, and its budget as a sampling parameter."""
    if body.thinking is None:
        return
    kind, budget = body.thinking.get("type"), body.thinking.get("budget_tokens")
    if kind not in THINKING:
        raise wrong_value("thinking.type", f"one of {', '.join(THINKING)}", kind)
    thinks = kind != "disabled"
    set_thinking(chat, thinks=thinks)
    if budget is not None and thinks:
        chat.setdefault("thinking_token_budget", check_int("thinking.budget_tokens", budget, 0, MAX_TOKENS_LIMIT))


def _set_output(chat: dict[str, Any], body: MessagesBody, ignored: Ignored) -> None:
    """Express ``output_config`` and its older form ``output_format``."""
    config = read(OutputConfig, body.output_config or {}, "output_config", ignored=ignored)
    if config.effort is not None:
        chat["reasoning_effort"] = config.effort
    wanted = config.format or body.output_format
    if wanted is None:
        return
    where = "output_config.format" if config.format else "output_format"
    if wanted.get("type") != "json_schema":
        raise wrong_value(f"{where}.type", "json_schema", wanted.get("type"))
    schema = object_at(wanted.get("schema"), f"{where}.schema")
    chat["response_format"] = {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}
