"""Input items of the Responses API, translated to messages of chat."""

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

from quire.frontend.http.dialects.responses_tools import ToolName
from quire.frontend.text.chat_template import Message
from quire.frontend.text.message_form import INSTRUCTIONS
from quire.frontend.text.text_parts import encoded, joined_parts, joined_text, list_at, object_at, string_at
from quire.protocol.errors import InvalidRequest, wrong_value

Item = Mapping[str, Any]

ROLES = ("user", "assistant", "system", "developer")
TEXT_KINDS = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text", "input_json")
THOUGHT, SUMMARY = "quire-thought:", "quire-summary:"
"""Prefixes of sealed text. It hides nothing: clients that keep no state send it back as it is."""


def sealed(prefix: str, text: str) -> str:
    """Return the ``encrypted_content`` of a thought, or of the summary of a conversation."""
    return prefix + base64.b64encode(text.encode()).decode()


def _opened(prefix: str, given: str) -> str:
    """Return the text that was sealed; "" if another server sealed it."""
    if not given.startswith(prefix):
        return ""
    try:
        return base64.b64decode(given.removeprefix(prefix), validate=True).decode()
    except (binascii.Error, ValueError):
        return ""


def chat_messages(instructions: str, items: Sequence[Item], num_before: int = 0) -> list[Message]:
    """Return a conversation as messages of chat.

    The thoughts, the text and the calls of one answer are items of their own here, and one message there.

    Args:
        num_before: the items that precede the request's own.

    Raises:
        InvalidRequest: an item is malformed, or of a kind that this server does not read.
    """
    conversation = _MessageBuilder(instructions)
    for i, item in enumerate(items):
        conversation.add(item, f"input[{i - num_before}]")
    return conversation.messages()


class _MessageBuilder:
    def __init__(self, instructions: str) -> None:
        self._messages: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
        self._answer: Message | None = None
        """The assistant's message that further items may still extend."""
        self._call_ids: set[str] = set()

    def messages(self) -> list[Message]:
        self._end_answer()
        return self._messages

    def add(self, item: Item, where: str) -> None:
        kind = item.get("type", "message" if "role" in item else None)
        match kind:
            case "message":
                self._add_message(item, where)
            case "reasoning":
                self._add_thought(item, where)
            case "function_call":
                arguments = string_at(item, "arguments", where)
                self._add_call(item, arguments or "{}", where)
            case "custom_tool_call":
                text = string_at(item, "input", where)
                self._add_call(item, encoded({"input": text}, f"{where}.input").decode(), where)
            case "function_call_output" | "custom_tool_call_output":
                self._add_result(item, where)
            case "compaction":
                self._add_summary(item, where)
            case _:
                allowed = "message, reasoning, function_call, function_call_output, custom_tool_call, "
                allowed += "custom_tool_call_output, compaction or item_reference"
                raise wrong_value(f"{where}.type", allowed, kind, "unsupported")

    def _add_message(self, item: Item, where: str) -> None:
        role = item.get("role")
        if role not in ROLES:
            raise wrong_value(f"{where}.role", f"one of {', '.join(ROLES)}", role)
        content = item.get("content")
        if content is None:
            raise InvalidRequest(f"{where}.content is required", f"{where}.content", "missing_required_parameter")
        made = joined_parts(content, f"{where}.content", TEXT_KINDS)
        if role == "assistant":
            answer = self._open_answer(may_have=())
            answer["content"] = made
            return
        self._end_answer()
        self._messages.append({"role": role, "content": made})

    def _add_thought(self, item: Item, where: str) -> None:
        text = ""
        for name in ("content", "summary"):
            parts = item.get(name)
            text = text or joined_text(parts, f"{where}.{name}", TEXT_KINDS)
        text = text or _opened(THOUGHT, string_at(item, "encrypted_content", where, default=""))
        if text:
            answer = self._open_answer(may_have=())
            answer["reasoning_content"] = answer.get("reasoning_content", "") + text

    def _add_summary(self, item: Item, where: str) -> None:
        summary = _opened(SUMMARY, string_at(item, "encrypted_content", where))
        if not summary:
            text = f"{where}.encrypted_content was not written by this server: send the conversation itself"
            raise InvalidRequest(text, f"{where}.encrypted_content")
        self._end_answer()
        text = f"Summary of the conversation before this point:\n{summary}"
        is_begun = any(message["role"] not in INSTRUCTIONS for message in self._messages)
        self._messages.append({"role": "user" if is_begun else "system", "content": text})

    def _add_call(self, item: Item, arguments: str, where: str) -> None:
        call_id = string_at(item, "call_id", where)
        tool = ToolName(string_at(item, "name", where), string_at(item, "namespace", where, default=""))
        function = {"name": tool.in_chat, "arguments": arguments}
        answer = self._open_answer(may_have=("content", "tool_calls"))
        answer.setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})
        self._call_ids.add(call_id)

    def _add_result(self, item: Item, where: str) -> None:
        call_id = string_at(item, "call_id", where)
        result = joined_parts(item.get("output"), f"{where}.output", TEXT_KINDS)
        if call_id not in self._call_ids:
            raise wrong_value(f"{where}.call_id", "the call_id of a call before it", call_id)
        self._end_answer()
        self._messages.append({"role": "tool", "tool_call_id": call_id, "content": result})

    def _open_answer(self, may_have: Sequence[str]) -> Message:
        """Return the message to extend. An answer that has more than thoughts and ``may_have`` already is ended."""
        answer = self._answer
        if answer is not None and any(answer.get(name) for name in ("content", "tool_calls") if name not in may_have):
            self._end_answer()
            answer = None
        if answer is None:
            answer = self._answer = {"role": "assistant", "content": None}
        return answer

    def _end_answer(self) -> None:
        if self._answer is not None:
            self._messages.append(self._answer)
            self._answer = None


def input_items(value: Any, most: int) -> list[Item]:
    """Return the items of ``input``: a list, or one user's message that is given as a string.

    Raises:
        InvalidRequest: another type, or more than ``most`` items.
    """
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    items = list_at(value, "input")
    if len(items) > most:
        raise InvalidRequest(f"input must hold at most {most} items (got {len(items)})", "input")
    return [object_at(item, f"input[{i}]") for i, item in enumerate(items)]
