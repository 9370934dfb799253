"""Output items of the Responses API while they are written: their events, and the finished item."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from quire.frontend.http.dialects.parts import Part
from quire.frontend.http.dialects.responses_input import sealed_thought
from quire.frontend.http.dialects.responses_tools import ToolName
from quire.frontend.http.routes.chat import ContentLogprob
from quire.frontend.http.routes.tool_calls import new_call_id

Events = list[tuple[str, dict[str, Any]]]
"""Types of events, and their fields beside the item's place and the number."""


class OpenItem(Protocol):
    """An item that is being written. ``item``: the finished item, after ``end``."""

    item: dict[str, Any]

    def begin(self) -> Events: ...

    def add(self, text: str, logprobs: Sequence[ContentLogprob]) -> Events: ...

    def end(self, status: str) -> Events:
        """Return the last events. ``status``: completed, or incomplete for an item that was cut off."""
        ...


NewId = Callable[[str], str]


def new_item(part: Part, tool: ToolName, seals_thoughts: bool, new_id: NewId) -> OpenItem:
    """Return the item that a part begins.

    Args:
        tool: the client's name of the tool, if the part is a call.
        new_id: returns an id, given its prefix.
    """
    match part.kind:
        case "text":
            return _MessageItem(new_id)
        case "thought":
            return _ThoughtItem(new_id, seals_thoughts)
        case "call" if tool.is_custom:
            return _CustomCallItem(new_id, tool, part.id)
        case "call":
            return _CallItem(new_id, tool, part.id)


class _MessageItem:
    def __init__(self, new_id: NewId) -> None:
        self.item = _begun(new_id("msg_"), "message", role="assistant", content=[])
        self._texts: list[str] = []
        self._logprobs: list[ContentLogprob] = []
        self._place = {"item_id": self.item["id"], "content_index": 0}

    def begin(self) -> Events:
        return [
            ("response.output_item.added", {"item": self.item}),
            ("response.content_part.added", {**self._place, "part": self._part()}),
        ]

    def add(self, text: str, logprobs: Sequence[ContentLogprob]) -> Events:
        self._texts.append(text)
        self._logprobs += logprobs
        return [("response.output_text.delta", {**self._place, "delta": text, "logprobs": logprobs})]

    def end(self, status: str) -> Events:
        part = self._part()
        self.item = {**self.item, "status": status, "content": [part]}
        return [
            ("response.output_text.done", {**self._place, "text": part["text"], "logprobs": self._logprobs}),
            ("response.content_part.done", {**self._place, "part": part}),
            ("response.output_item.done", {"item": self.item}),
        ]

    def _part(self) -> dict[str, Any]:
        text = "".join(self._texts)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self._logprobs)}


class _ThoughtItem:
    def __init__(self, new_id: NewId, seals: bool) -> None:
        self._seals = seals
        self.item = _begun(new_id("rs_"), "reasoning", summary=[], content=[])
        self._texts: list[str] = []
        self._place = {"item_id": self.item["id"], "content_index": 0}

    def begin(self) -> Events:
        return [
            ("response.output_item.added", {"item": self.item}),
            ("response.content_part.added", {**self._place, "part": self._part()}),
        ]

    def add(self, text: str, logprobs: Sequence[ContentLogprob]) -> Events:
        self._texts.append(text)
        return [("response.reasoning_text.delta", {**self._place, "delta": text})]

    def end(self, status: str) -> Events:
        part = self._part()
        self.item = {**self.item, "status": status, "content": [part]}
        if self._seals:
            self.item["encrypted_content"] = sealed_thought(part["text"])
        return [
            ("response.reasoning_text.done", {**self._place, "text": part["text"]}),
            ("response.content_part.done", {**self._place, "part": part}),
            ("response.output_item.done", {"item": self.item}),
        ]

    def _part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": "".join(self._texts)}


class _CallItem:
    def __init__(self, new_id: NewId, tool: ToolName, call_id: str) -> None:
        self.item = _begun(new_id("fc_"), "function_call", **_call(tool, call_id), arguments="")
        self._texts: list[str] = []

    def begin(self) -> Events:
        return [("response.output_item.added", {"item": self.item})]

    def add(self, text: str, logprobs: Sequence[ContentLogprob]) -> Events:
        if not text:
            return []
        self._texts.append(text)
        return [("response.function_call_arguments.delta", {"item_id": self.item["id"], "delta": text})]

    def end(self, status: str) -> Events:
        arguments = "".join(self._texts)
        self.item = {**self.item, "status": status, "arguments": arguments}
        done = {"item_id": self.item["id"], "name": self.item["name"], "arguments": arguments}
        return [
            ("response.function_call_arguments.done", done),
            ("response.output_item.done", {"item": self.item}),
        ]


class _CustomCallItem:
    """The call of a custom tool. Its text is the one argument of a function, so it is sent when that is complete."""

    def __init__(self, new_id: NewId, tool: ToolName, call_id: str) -> None:
        self.item = _begun(new_id("ctc_"), "custom_tool_call", **_call(tool, call_id), input="")
        self._is_raw = tool.is_raw
        self._texts: list[str] = []

    def begin(self) -> Events:
        return [("response.output_item.added", {"item": self.item})]

    def add(self, text: str, logprobs: Sequence[ContentLogprob]) -> Events:
        self._texts.append(text)
        return []

    def end(self, status: str) -> Events:
        text = "".join(self._texts)
        text = text if self._is_raw else _custom_input(text)
        self.item = {**self.item, "status": status, "input": text}
        place = {"item_id": self.item["id"]}
        return [
            ("response.custom_tool_call_input.delta", {**place, "delta": text}),
            ("response.custom_tool_call_input.done", {**place, "input": text}),
            ("response.output_item.done", {"item": self.item}),
        ]


def _custom_input(arguments: str) -> str:
    """Return the text for a custom tool. Arguments of another form, or cut off, are returned as they are."""
    try:
        found = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return arguments
    text = found.get("input") if isinstance(found, dict) else None
    return text if isinstance(text, str) else arguments


def _begun(item_id: str, kind: str, **fields: Any) -> dict[str, Any]:
    return {"id": item_id, "type": kind, "status": "in_progress", **fields}


def _call(tool: ToolName, call_id: str) -> dict[str, str]:
    fields = {"call_id": call_id or new_call_id(), "name": tool.name}
    return {**fields, "namespace": tool.namespace} if tool.namespace else fields
