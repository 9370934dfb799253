"""Outputs that are constrained to be tool calls, as events."""

import secrets
import string

from quire.frontend.http.schema.tools import ToolUse
from quire.frontend.text.parsing.answer_parser import CallDelta, Event, Thought
from quire.frontend.text.parsing.object_reader import ObjectReader
from quire.frontend.text.text_out import StopStrings


def new_call_id() -> str:
    """Return an id that every template takes in the next turn: those of Mistral refuse other forms."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class NamedCall:
    """Parser of an output that is the arguments of one call."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def push(self, text: str) -> list[CallDelta]:
        name, self._name = self._name, None
        return [CallDelta(0, name, text)] if text or name is not None else []


class RequiredCalls:
    """Reader of an answer that must be calls, after thoughts that end with the text ``end`` unless it is ""."""

    def __init__(self, use: ToolUse, end: str) -> None:
        self._calls = AnyCalls() if use.function is None else NamedCall(use.function)
        self._end = StopStrings([end]) if end else None
        self._end_length = len(end)
        self._held = ""
        """Text that may be the start of the marker."""

    def push(self, text: str, *, last: bool) -> list[Event]:
        if self._end is None:
            return [*self._calls.push(text)]
        found = self._end.find(text)
        before, self._held = self._held, ""
        text = before + text
        if found is None:
            cut = len(text) - (0 if last else self._end.held)
            text, self._held = text[:cut], text[cut:]
            return [Thought(text)] if text else []
        end, self._end = len(before) + found[1], None
        reasoning = text[: end - self._end_length]
        return [*([Thought(reasoning)] if reasoning else []), *self._calls.push(text[end:])]


class AnyCalls:
    """Parser of a JSON list of ``{"name": ..., "parameters": ...}``.

    The output is constrained to this form, so nothing is validated. If it was cut off, its last call is incomplete.
    """

    def __init__(self) -> None:
        self._objects = ObjectReader(is_constrained=True)

    def push(self, text: str) -> list[CallDelta]:
        """Return the deltas of ``text``, at most one per call."""
        return [CallDelta(*piece) for piece in self._objects.push(text)]
