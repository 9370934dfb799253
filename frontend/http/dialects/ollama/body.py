"""Bodies of /api/chat and /api/generate, translated to bodies of chat and of completions."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from quire.frontend.http.dialects.chat_fields import PASSED_FIELDS, passed, renamed, set_thinking
from quire.frontend.http.schema.foreign_fields import UNSUPPORTED, check_supported
from quire.frontend.http.schema.reading import read
from quire.frontend.http.schema.schema import ChatRequest, CompletionRequest, Parser
from quire.frontend.http.schema.unknown_fields import Ignored
from quire.frontend.text.chat_template import Message
from quire.frontend.text.image_parts import PartAt
from quire.frontend.text.message_checks import joined
from quire.frontend.text.text_parts import list_at, object_at, string_at
from quire.protocol.errors import InvalidRequest, wrong_value
from quire.protocol.request.sampling_params import MAX_LOGPROBS, MAX_TOKENS_LIMIT, check_int

RENAMED_OPTIONS = {"repeat_penalty": "repetition_penalty"}
ALL_TOKENS: dict[str, Any] = {"repeat_last_n": -1, "penalize_newline": True}
"""Options that say which tokens penalties count, and the value of each that is true here: they count all."""
NO_PENALTY = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
INSTEAD_OF = {
    r"response_format\.json_schema\.schema": "format",
    "response_format": "format",
    "max_tokens": "options.num_predict",
}
"""Fields by their names in chat and completions."""
SAME_TEXTS = {"thinking": "reasoning_content", "tool_name": "name", "tool_call_id": "tool_call_id"}
"""Members of a message, and their names in chat."""
Format = Annotated[dict[str, Any] | Literal["json", ""], Meta(description='"json" or an object with a JSON schema')]
Think = Annotated[
    bool | Literal["low", "medium", "high", "max"], Meta(description="true, false or one of low, medium, high, max")
]
Fields = dict[str, Any]


class AnswerBody(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of both routes."""

    model: str | None = None
    stream: bool = True
    format: Format = ""
    options: Fields | None = None
    think: Think | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] = 0
    # Ignored: the model stays loaded, and neither prompts nor answers are shortened.
    keep_alive: Any = None
    truncate: Any = None
    shift: Any = None

    def chat(self, parser: Parser, ignored: Ignored, fields: Fields, messages: Sequence[Message]) -> ChatRequest:
        fields |= {"messages": messages, "logprobs": self.logprobs, "top_logprobs": self.top_logprobs}
        if isinstance(self.think, bool):
            set_thinking(fields, thinks=self.think)
        elif self.think is not None:
            fields["reasoning_effort"] = self.think
        return parser.chat(fields, ignored)


class ChatBody(AnswerBody, frozen=True, kw_only=True):
    """``tool_choice``, ``parallel_tool_calls``: as in chat; Ollama has no fields for them."""

    messages: list[Any] | None = None
    tools: list[Fields] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool = True

    def request(self, parser: Parser, ignored: Ignored, fields: Fields) -> ChatRequest:
        """Return the request for an answer, from these ``fields`` of chat and its own."""
        messages = chat_messages(self.messages or ())
        if messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]:
            fields |= {"continue_final_message": True, "add_generation_prompt": False}
        tools = {"tools": self.tools, "tool_choice": self.tool_choice, "parallel_tool_calls": self.parallel_tool_calls}
        return self.chat(parser, ignored, fields | tools, messages)


class GenerateBody(AnswerBody, frozen=True, kw_only=True):
    """``raw``: the prompt is sent to the model as it is; otherwise it is a conversation."""

    prompt: str = ""
    system: str = ""
    images: list[str] | None = None
    raw: bool = False

    def request(self, parser: Parser, ignored: Ignored, fields: Fields) -> ChatRequest | CompletionRequest:
        """Return the request for an answer, from these ``fields`` of chat and completions and its own."""
        if not self.raw:
            system = [{"role": "system", "content": self.system}] if self.system else []
            user = {"role": "user", "content": _content(self.prompt, self.images or (), "images")}
            return self.chat(parser, ignored, fields, [*system, user])
        for name in ("system", "images", "think"):
            if getattr(self, name):
                text = f"{name} cannot be combined with raw: write it into prompt"
                raise InvalidRequest(text, name, "unsupported_value")
        own = {"prompt": self.prompt, "logprobs": self.top_logprobs if self.logprobs else None}
        return parser.completion({"max_tokens": parser.limits.max_model_len} | fields | own, ignored)


@dataclass(frozen=True, slots=True)
class OllamaRequest:
    """A parsed request.

    Attributes:
        model, served: the name as the client wrote it, and as the server has it.
        asked: None: there is nothing to answer, by which a client asks Ollama to load or unload the model.
        began: when the body had arrived, in nanoseconds of the monotonic clock.
    """

    model: str
    served: str
    is_chat: bool
    asked: ChatRequest | CompletionRequest | None
    began: int = field(default_factory=time.monotonic_ns)


def parse_body(kind: type[ChatBody | GenerateBody], parser: Parser, raw: Mapping[str, Any]) -> OllamaRequest:
    """Translate a body.

    Raises:
        InvalidRequest: a field is malformed or not supported, with the client's name of the field.
    """
    ignored = Ignored(parser.unknown_fields)
    body = read(kind, raw, besides=PASSED_FIELDS, ignored=ignored)
    served = served_name(parser, body.model)
    fields = passed(raw) | {"model": served, "stream": body.stream}
    fields |= _options(body.options or {}, parser.limits.max_model_len, ignored)
    if isinstance(body.format, dict):
        fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "output", "schema": body.format}}
    elif body.format:
        fields["response_format"] = {"type": "json_object"}
    asked = None
    if body.messages if isinstance(body, ChatBody) else body.prompt:
        try:
            asked = replace(body.request(parser, ignored, fields), clamp_max_tokens=True)
        except InvalidRequest as error:
            own = {RENAMED_OPTIONS.get(name, name): f"options.{name}" for name in body.options or ()}
            tools = [f"tools[{i}].function" for i in range(len(raw.get("tools") or ()))]
            raise renamed(error, INSTEAD_OF | own, tools) from None
    if isinstance(asked, ChatRequest):  # there an image is a member of a part
        sources = asked.options.images.sources
        sources[:] = [replace(each, where=each.where.removesuffix(".image")) for each in sources]
    return OllamaRequest(body.model or served, served, kind is ChatBody, asked)


def served_name(parser: Parser, name: str | None) -> str:
    """Return the served name, or the adapter's, that a client names with or without the tag ``latest``."""
    bare = None if name is None else name.removesuffix(":latest")
    return parser.model(next((each for each in (name, bare, f"{name}:latest") if each in parser.served_names), bare))


def _options(given: Mapping[str, Any], max_model_len: int, ignored: Ignored) -> Fields:
    """Return the options as fields of chat. Those that only chat has are read, too."""
    options = {name: value for name, value in given.items() if value is not None}
    fields: Fields = {}
    for name, value in options.items():
        if name in ("stop", *RENAMED_OPTIONS, *PASSED_FIELDS):
            fields[RENAMED_OPTIONS.get(name, name)] = value
        elif name not in ("num_predict", *ALL_TOKENS):
            check_supported(name, value, "options.")
            if name not in UNSUPPORTED:
                ignored.add(f"options.{name}", ())
    if fields.get("seed") == -1:  # a random one
        del fields["seed"]
    most = check_int("options.num_predict", options.get("num_predict", -1), -2, MAX_TOKENS_LIMIT)
    if most == 0:
        raise wrong_value("options.num_predict", "at least 1, or -1 for no limit", most)
    if most > 0:
        fields["max_tokens"] = min(most, max_model_len)
    if any(fields.get(name, value) != value for name, value in NO_PENALTY.items()):
        for name, value in ALL_TOKENS.items():
            if options.get(name, value) != value:
                raise wrong_value(f"options.{name}", f"{value} with a penalty, which counts all tokens", options[name])
    return fields


def chat_messages(given: Sequence[Any]) -> list[Message]:
    """Return a conversation as messages of chat.

    Calls and results without ids get some, which templates may require: a result answers the first open call of its
    tool.
    """
    found: list[Message] = []
    open_calls: dict[str, str] = {}
    numbers = count()
    for i, message in enumerate(given):
        where = f"messages[{i}]"
        fields = object_at(message, where)
        texts = {ours: string_at(fields, theirs, where, default="") for theirs, ours in SAME_TEXTS.items()}
        made: Message = {name: text for name, text in texts.items() if text}
        made["role"] = string_at(fields, "role", where).lower()
        images = list_at(fields.get("images") or [], f"{where}.images")
        made["content"] = _content(string_at(fields, "content", where, default=""), images, f"{where}.images")
        for j, call in enumerate(list_at(fields.get("tool_calls") or [], f"{where}.tool_calls")):
            at = f"{where}.tool_calls[{j}]"
            function = object_at(object_at(call, at).get("function"), f"{at}.function")
            call_id = string_at(call, "id", at, default="") or f"call{next(numbers):05}"
            open_calls[call_id] = string_at(function, "name", f"{at}.function")
            made.setdefault("tool_calls", []).append({"id": call_id, "function": function})
        if made["role"] == "tool":
            first = next((call_id for call_id, name in open_calls.items() if name == made.get("name", name)), "")
            open_calls.pop(made.setdefault("tool_call_id", first), None)
        found.append(made)
    return found


def _content(text: str, images: Sequence[Any], where: str) -> Any:
    """Return the content of a message: its images, each base64 of a file of any type, and then its text."""
    parts = [{"type": "image", "image": f"data:image/any;base64,{image}"} for image in images]
    return joined([*(PartAt(f"{where}[{i}]", part) for i, part in enumerate(parts)), *([text] if text else [])])
