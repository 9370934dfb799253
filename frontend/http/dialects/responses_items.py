"""Output items of the Responses API while they are written: their events, and the finished item."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import msgspec

from quire.frontend.http.dialects.parts import Part
from quire.frontend.http.dialects.responses_input import THOUGHT, sealed
from quire.frontend.http.dialects.responses_tools import ToolName
from quire.frontend.http.routes.chat import ContentLogprob

Events = list[tuple[str, dict[str, Any]]]
"""Types of events, and their fields beside the item's place and the number."""


class OpenItem(ABC):
    """An item that is being written. ``item``: the finished item, after ``end``."""

    def __init__(self, item_id: str, kind: str, **fields: Any) -> None:
        self.item = {"id": item_id, "type": kind, "status": "in_progress", **fields}
        self._texts: list[str] = []

    def begin(self) -> Events:
        return [("response.output_item.added", {"item": self.item})]

    @abstractmethod
    def add(self, text: str, logprobs: Sequence[ContentLogprob]) -> Events: ...

    @abstractmethod
    def end(self, status: str) -> Events:
        """Return the last events. ``status``: completed, or incomplete for an item that was cut off."""

    def _finish(self, status: str, **fields: Any) -> tuple[str, dict[str, Any]]:
        self.item = {**self.item, "status": status, **fields}
        return "response.output_item.done", {"item": self.item}


CALL_ID_LENGTH = 9
"""Characters of the id of a call, all letters and digits: what the templates of Mistral take in the next turn."""


def response_of(item_id: str) -> str:
    """Return the id of the response that has an item, whose own id begins with the digits of that one."""
    return f"resp_{item_id.partition('_')[2][:32]}"


def new_item(part: Part, tool: ToolName, seals_thoughts: bool, response_id: str, number: int) -> OpenItem:
    """Return the item that a part begins. Its ids depend on its response and its number only.

    Args:
        tool: the client's name of the tool, if the part is a call.
    """
    digits = f"{response_id.removeprefix('resp_')}{number:02x}"
    call_id = part.id or hashlib.sha256(digits.encode()).hexdigest()[:CALL_ID_LENGTH]
    match part.kind:
        case "text":
            return _TextItem(f"msg_{digits}", "message", role="assistant", content=[])
        case "thought":
            return _ThoughtItem(f"rs_{digits}", "reasoning", summary=[], content=[], seals=seals_thoughts)
        case "call" if tool.is_custom:
            return _CustomCallItem(f"ctc_{digits}", tool, call_id)
        case "call":
            return _CallItem(f"fc_{digits}", "function_call", **_call(tool, call_id), arguments="")


class _TextItem(OpenItem):
    """The text of an answer, which is sent as it comes."""

    kind = "output_text"

    def __init__(self, item_id: str, kind: str, **fields: Any) -> None:
        super().__init__(item_id, kind, **fields)
        self._logprobs: list[ContentLogprob] = []
        self._place = {"item_id": item_id, "content_index": 0}

    def begin(self) -> Events:
        return [*super().begin(), ("response.content_part.added", {**self._place, "part": self._part()})]

    def add(self, text: str, logprobs: Sequence[ContentLogprob]) -> Events:
        self._texts.append(text)
        self._logprobs += logprobs
        return [(f"response.{self.kind}.delta", {**self._place, "delta": text, **self._beside(logprobs)})]

    def end(self, status: str) -> Events:
        part = self._part()
        done = {**self._place, "text": part["text"], **self._beside(self._logprobs)}
        return [
            (f"response.{self.kind}.done", done),
            ("response.content_part.done", {**self._place, "part": part}),
            self._finish(status, content=[part]),
        ]

    def _beside(self, logprobs: Sequence[ContentLogprob]) -> dict[str, Any]:
        """Return what events have beside the text."""
        return {"logprobs": logprobs}

    def _part(self) -> dict[str, Any]:
        text = "".join(self._texts)
        return {"type": self.kind, "text": text, "annotations": [], "logprobs": list(self._logprobs)}


class _ThoughtItem(_TextItem):
    kind = "reasoning_text"

    def __init__(self, item_id: str, kind: str, *, seals: bool, **fields: Any) -> None:
        super().__init__(item_id, kind, **fields)
        self._seals = seals

    def _finish(self, status: str, **fields: Any) -> tuple[str, dict[str, Any]]:
        more = {"encrypted_content": sealed(THOUGHT, "".join(self._texts))} if self._seals else {}
        return super()._finish(status, **fields, **more)

    def _beside(self, logprobs: Sequence[ContentLogprob]) -> dict[str, Any]:
        return {}

    def _part(self) -> dict[str, Any]:
        return {"type": self.kind, "text": "".join(self._texts)}


class _CallItem(OpenItem):
    def add(self, text: str, logprobs: Sequence[ContentLogprob]) -> Events:
        if not text:
            return []
        self._texts.append(text)
        return [("response.function_call_arguments.delta", {"item_id": self.item["id"], "delta": text})]

    def end(self, status: str) -> Events:
        arguments = "".join(self._texts)
        done = {"item_id": self.item["id"], "name": self.item["name"], "arguments": arguments}
        return [("response.function_call_arguments.done", done), self._finish(status, arguments=arguments)]


class _CustomCallItem(OpenItem):
    """The call of a custom tool. Its text is the one argument of a function, so it is sent when that is complete."""

    def __init__(self, item_id: str, tool: ToolName, call_id: str) -> None:
        super().__init__(item_id, "custom_tool_call", **_call(tool, call_id), input="")
        self._is_raw = tool.is_raw

    def add(self, text: str, logprobs: Sequence[ContentLogprob]) -> Events:
        self._texts.append(text)
        return []

    def end(self, status: str) -> Events:
        text, place = "".join(self._texts), {"item_id": self.item["id"]}
        text = text if self._is_raw else _custom_input(text)
        return [
            ("response.custom_tool_call_input.delta", {**place, "delta": text}),
            ("response.custom_tool_call_input.done", {**place, "input": text}),
            self._finish(status, input=text),
        ]


def _custom_input(arguments: str) -> str:
    """Return the text for a custom tool. Arguments of another form, or cut off, are returned as they are."""
    try:
        found = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return arguments
    text = found.get("input") if isinstance(found, dict) else None
    return text if isinstance(text, str) else arguments


def _call(tool: ToolName, call_id: str) -> dict[str, str]:
    fields = {"call_id": call_id, "name": tool.name}
    return {**fields, "namespace": tool.namespace} if tool.namespace else fields
