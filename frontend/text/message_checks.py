"""Checks the messages of a conversation, and brings them into the form that chat templates expect."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import msgspec

from quire.frontend.images.source import ImageSource
from quire.frontend.text.chat_template import Message
from quire.frontend.text.image_parts import PartAt, image_source, is_image
from quire.protocol.errors import InvalidRequest, printable, wrong_value

MAX_MESSAGES = 8192
ROLES = ("system", "developer", "user", "assistant", "tool")
IMAGE_ROLES = ("user", "tool")
TEXT_ONLY = "this server reads text only"


def check_messages(value: Any, param: str = "messages", images: list[ImageSource] | None = None) -> list[Message]:
    """Validate OpenAI's messages, and join the text parts of each to one string.

    The content of a message with images stays a list, in which neighbouring text parts are one.

    Args:
        images: gets the images in order; None: they are refused.

    Fields that are null or unknown are left out: clients send back what other servers wrote into an answer. Content
    stays null beside calls, because templates distinguish it from "". Results of tools get the name of the function.

    Raises:
        InvalidRequest: not a list of messages with known roles and text.
    """
    if not isinstance(value, list) or not value:
        raise wrong_value(param, "a list of at least one message", value)
    if len(value) > MAX_MESSAGES:
        raise InvalidRequest(f"{param} must hold at most {MAX_MESSAGES} messages (got {len(value)})", param)
    messages = [_message(message, f"{param}[{i}]", images) for i, message in enumerate(value)]
    names: dict[str, str] = {}
    for message in messages:
        names |= {call.get("id", ""): call["function"]["name"] for call in message.get("tool_calls", ())}
        name = names.get(message.get("tool_call_id", ""))
        if message["role"] == "tool" and name:
            message.setdefault("name", name)
    return messages


def _message(given: Any, where: str, images: list[ImageSource] | None) -> Message:
    if not isinstance(given, dict):
        raise wrong_value(where, "an object", given)
    role = given.get("role")
    if role == "function":
        raise InvalidRequest(f"{where}.role function is not supported: use tool", f"{where}.role", "unsupported")
    if role not in ROLES:
        raise wrong_value(f"{where}.role", f"one of {', '.join(ROLES)}", role)
    for name, instead in (("function_call", "use tool_calls"), ("audio", TEXT_ONLY)):
        if given.get(name) is not None:
            raise InvalidRequest(f"{where}.{name} is not supported: {instead}", f"{where}.{name}", "unsupported")
    message: Message = {"role": role}
    texts = {name: _text(given, name, where) for name in ("name", "tool_call_id", "refusal", "reasoning_content")}
    message |= {name: text for name, text in texts.items() if text is not None and name != "reasoning_content"}
    calls = _calls(given.get("tool_calls"), f"{where}.tool_calls")
    if calls:
        message["tool_calls"] = calls
    content = given.get("content")
    if role in ("assistant", "tool") and content in (None, "", []):
        message["content"] = message.get("refusal", None if calls and content is None else "")
    else:
        message["content"] = _content(content, f"{where}.content", role, images)
    reasoning = texts["reasoning_content"] or given.get("reasoning")
    if role == "assistant" and reasoning and isinstance(reasoning, str):
        message |= _reasoning(reasoning, message)
    return message


def _text(given: Mapping[str, Any], name: str, where: str) -> str | None:
    value = given.get(name)
    if not isinstance(value, str | None):
        raise wrong_value(f"{where}.{name}", "a string", value)
    return value


def _reasoning(text: str, message: Message) -> Message:
    """Return an earlier answer's reasoning under the names that templates use.

    The template of gpt-oss reads ``thinking``, and refuses a tool call that has it together with content.
    """
    named = {"reasoning_content": text, "reasoning": text}
    return named if message["content"] and "tool_calls" in message else {**named, "thinking": text}


def _calls(value: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list | None):
        raise wrong_value(where, "a list of objects", value)
    return [_call(call, f"{where}[{i}]") for i, call in enumerate(value or ())]


def _call(given: Any, where: str) -> dict[str, Any]:
    """Return an earlier tool call with its arguments decoded from JSON text to an object, as templates expect."""
    if not isinstance(given, dict):
        raise wrong_value(where, "an object", given)
    if given.get("type") not in (None, "function"):
        raise wrong_value(f"{where}.type", "function", given["type"], "unsupported")
    function = given.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not name:
        raise wrong_value(f"{where}.function.name", "a non-empty string", name)
    call: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": _arguments(function, where)}}
    call_id = _text(given, "id", where)
    return call if call_id is None else {"id": call_id, **call}


def _arguments(function: Mapping[str, Any], where: str) -> dict[str, Any] | str:
    """Return the arguments as an object; as text if the text is not a JSON object."""
    arguments = function.get("arguments")
    if not arguments:
        return {}
    if isinstance(arguments, dict):
        return arguments
    if not isinstance(arguments, str):
        raise wrong_value(f"{where}.function.arguments", "a string with a JSON object", arguments)
    try:
        found = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments


def _content(content: Any, where: str, role: str, images: list[ImageSource] | None) -> str | list[Any]:
    """Return a message's text, or its parts if one is an image. Text is joined by newlines, as vLLM does for templates
    that expect a string."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        allowed = "text parts" if images is None else "parts"
        raise wrong_value(where, f"a string or a list of {allowed}", content)
    return joined([_part(part, f"{where}[{i}]", role, images) for i, part in enumerate(content)])


def joined(parts: Sequence[Any]) -> str | list[Any]:
    """Return texts as one string; if there is anything between them, as a list with text parts."""
    if all(isinstance(part, str) for part in parts):
        return "\n".join(parts)
    runs = [(kind is str, list(run)) for kind, run in groupby(parts, type)]
    made: list[Any] = []
    for is_text, run in runs:
        made += [{"type": "text", "text": "\n".join(run)}] if is_text else run
    return made


def _part(part: Any, where: str, role: str, images: list[ImageSource] | None) -> str | dict[str, str]:
    """Return a text, or what a template reads of an image, which is added to ``images``."""
    if isinstance(part, PartAt):
        part, where = part.part, part.where
    fields: Mapping[str, Any] = part if isinstance(part, dict) else {}
    kind = fields.get("type")
    if isinstance(kind, str) and kind not in ("text", "refusal"):
        why = TEXT_ONLY if images is None else "this server reads text and images only"
        if images is not None and is_image(part):
            if role in IMAGE_ROLES:
                images.append(image_source(fields, where))
                return {"type": "image"}
            why = "images are read in messages of user and tool only"
        raise InvalidRequest(f"{where}.type must be text (got {printable(kind)}): {why}", f"{where}.type")
    text = fields.get(kind) if isinstance(kind, str) else None
    if not isinstance(text, str):
        raise wrong_value(where, 'a text part, {"type": "text", "text": "..."}', part)
    return text
