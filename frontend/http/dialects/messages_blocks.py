"""Content blocks of Anthropic's messages, translated to messages of chat."""

from collections.abc import Mapping
from typing import Any

from quire.frontend.text.chat_template import Message
from quire.frontend.text.image_parts import PartAt, is_image
from quire.frontend.text.message_checks import MAX_MESSAGES, joined
from quire.frontend.text.text_parts import encoded, list_at, object_at, string_at
from quire.protocol.errors import InvalidRequest, printable, wrong_value

ROLES = ("user", "assistant", "system")
ACCOUNTING_HEADER = "x-anthropic-billing-header:"
"""Begins a block that Claude Code sends before its system prompt. It is different in each request, for accounting at
Anthropic only: left in the prompt, nothing after it would be found in the prefix cache."""


def chat_messages(system: Any, messages: Any) -> tuple[list[Message], bool]:
    """Return the conversation as messages of chat, and whether the answer continues its last message.

    Raises:
        InvalidRequest: a message or block is malformed, or of a kind that this server does not read.
    """
    given = list_at(messages, "messages")
    if not 1 <= len(given) <= MAX_MESSAGES:
        raise InvalidRequest(f"messages must hold 1 to {MAX_MESSAGES} messages (got {len(given)})", "messages")
    found: list[Message] = []
    text = _system(system)
    if text:
        found.append({"role": "system", "content": text})
    for i, message in enumerate(given):
        where = f"messages[{i}]"
        fields = object_at(message, where)
        role = fields.get("role")
        if role not in ROLES:
            raise wrong_value(f"{where}.role", f"one of {', '.join(ROLES)}", role)
        blocks = _blocks(fields.get("content"), f"{where}.content")
        if role == "assistant":
            found.append(_assistant(blocks))
        else:
            found += _user(role, blocks)
    last = found[-1] if found else {}
    continues = last.get("role") == "assistant"
    if continues and last.get("tool_calls"):
        text = "the last message has a tool_use: send its tool_result in a further message"
        raise InvalidRequest(f"messages[{len(given) - 1}]: {text}", "messages")
    return found, continues


def _system(system: Any) -> str:
    texts = [] if system is None else [string_at(block, "text", at) for block, at in _blocks(system, "system")]
    return "\n".join(text for text in texts if text and not text.startswith(ACCOUNTING_HEADER))


def _blocks(content: Any, where: str) -> list[tuple[Mapping[str, Any], str]]:
    """Return the blocks of a content with their paths. A string is one block."""
    if isinstance(content, str):
        return [({"type": "text", "text": content}, where)]
    if not isinstance(content, list):
        raise wrong_value(where, "a string or a list of content blocks", content, "invalid_type")
    return [(object_at(block, f"{where}[{i}]"), f"{where}[{i}]") for i, block in enumerate(content)]


def _user(role: str, blocks: list[tuple[Mapping[str, Any], str]]) -> list[Message]:
    """Return the results of tools as messages of their own, before the rest of the message."""
    found: list[Message] = []
    rest: list[str | PartAt] = []
    for block, where in blocks:
        if block.get("type") == "tool_result" and role == "user":
            call_id = string_at(block, "tool_use_id", where)
            content = block.get("content")
            parts = [] if content is None else _blocks(content, f"{where}.content")
            result = joined([_text_or_image(*part) for part in parts])
            found.append({"role": "tool", "tool_call_id": call_id, "content": result})
        else:
            rest.append(_text_or_image(block, where))
    if rest or not found:
        found.append({"role": role, "content": joined(rest)})
    return found


def _text_or_image(block: Mapping[str, Any], where: str) -> str | PartAt:
    return PartAt(where, block) if is_image(block) else _text(block, where)


def _assistant(blocks: list[tuple[Mapping[str, Any], str]]) -> Message:
    """Return an earlier answer. Without text, its content is null beside calls."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block, where in blocks:
        match block.get("type"):
            case "thinking":
                thoughts.append(string_at(block, "thinking", where))
            case "redacted_thinking":
                pass  # written by another server, and only readable there
            case "tool_use":
                call_id, name = string_at(block, "id", where), string_at(block, "name", where)
                arguments = encoded(object_at(block.get("input"), f"{where}.input"), f"{where}.input").decode()
                calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})
            case _:
                texts.append(_text(block, where))
    message: Message = {"role": "assistant", "content": "".join(texts) if texts or not calls else None}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _text(block: Mapping[str, Any], where: str) -> str:
    match block.get("type"):
        case "text":
            return string_at(block, "text", where)
        case "document" if isinstance(block.get("source"), dict) and block["source"].get("type") == "text":
            title = string_at(block, "title", where, default="")
            text = string_at(block["source"], "data", f"{where}.source")
            return f"{title}\n{text}" if title else text
        case "search_result":
            head = [string_at(block, name, where, default="") for name in ("title", "source")]
            body = [_text(*part) for part in _blocks(block.get("content"), f"{where}.content")]
            return "\n".join(each for each in (*head, *body) if each)
        case kind:
            allowed = f"text, tool_use, tool_result or thinking (got {printable(kind)})"
            text = f"{where}.type must be {allowed}: this server reads text only"
            raise InvalidRequest(text, f"{where}.type", "unsupported")
