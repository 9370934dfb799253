"""Incremental parsing of outputs that are constrained to be tool calls."""

import json
import uuid
from dataclasses import dataclass
from enum import Enum, auto

from quire.launch.text.text_out import StopStrings

WHITESPACE = " \t\n\r"


@dataclass(frozen=True, slots=True)
class CallDelta:
    """The text added to call ``index``. Only the first delta of a call has its ``name``."""

    index: int
    name: str | None
    arguments: str


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


class NamedCall:
    """Parser of an output that is the arguments of one call."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def push(self, text: str) -> list[CallDelta]:
        name, self._name = self._name, None
        return [CallDelta(0, name, text)] if text or name is not None else []


class CallsAfterReasoning:
    """Parser of calls after reasoning: all text before the end marker is reasoning.

    Args:
        end: the marker's text, or "" if the output starts with its calls.
    """

    def __init__(self, calls: "NamedCall | AnyCalls", end: str) -> None:
        self._calls = calls
        self._end = StopStrings([end]) if end else None
        self._end_length = len(end)
        self._held = ""
        """Text that may be the start of the marker."""

    def push(self, text: str, *, last: bool) -> tuple[str, list[CallDelta]]:
        """Return the reasoning and the calls that ``text`` adds. ``last``: it ends the output."""
        if self._end is None:
            return "", self._calls.push(text)
        found = self._end.find(text)
        before, self._held = self._held, ""
        text = before + text
        if found is None:
            cut = len(text) - (0 if last else self._end.held)
            self._held = text[cut:]
            return text[:cut], []
        end = len(before) + found[1]
        self._end = None
        return text[: end - self._end_length], self._calls.push(text[end:])


class _State(Enum):
    OUTSIDE = auto()
    """Outside of any call."""
    MEMBER = auto()
    """In a call, before a key."""
    KEY = auto()
    COLON = auto()
    """Between a key and its value."""
    VALUE = auto()


class AnyCalls:
    """Parser of a JSON list of ``{"name": ..., "parameters": ...}``, in time linear in the text.

    The output is constrained to this form, so nothing is validated: other text makes no call. If the output was cut
    off, its last call is incomplete.
    """

    def __init__(self) -> None:
        self._state = _State.OUTSIDE
        self._index = -1
        self._begin_call()

    def _begin_call(self) -> None:
        self._token: list[str] = []
        """Characters of the current key or name, with quotes."""
        self._key = ""
        self._name: str | None = None
        self._name_sent = False
        self._arguments: list[str] = []
        """Parsed and not sent."""
        self._depth = 0
        self._in_string = self._escaped = False

    def push(self, text: str) -> list[CallDelta]:
        """Return the deltas of ``text``, at most one per call."""
        deltas: list[CallDelta] = []
        for char in text:
            ended = self._step(char)
            if ended:
                self._add_delta(deltas)
                self._begin_call()
        self._add_delta(deltas)
        return deltas

    def _add_delta(self, deltas: list[CallDelta]) -> None:
        """Move parsed arguments to a new delta, once the name is known."""
        if self._name is None:
            return
        arguments = "".join(self._arguments)
        self._arguments.clear()
        name = None if self._name_sent else self._name
        self._name_sent = True
        if arguments or name is not None:
            deltas.append(CallDelta(self._index, name, arguments))

    def _step(self, char: str) -> bool:
        """Consume one character; return True if it ends a call."""
        if self._state is _State.VALUE:
            return self._step_in_value(char)
        if self._state is _State.KEY:
            self._token.append(char)
            if self._closes_string(char):
                self._key, self._state = _decoded(self._token), _State.COLON
                self._token = []
            return False
        if self._state is _State.OUTSIDE:
            if char == "{":
                self._index += 1
                self._state = _State.MEMBER
        elif self._state is _State.COLON:
            if char == ":":
                self._state = _State.VALUE
                self._token = []
        elif char == '"':
            self._token, self._in_string, self._state = ['"'], True, _State.KEY
        elif char == "}":
            self._state = _State.OUTSIDE
            return True
        return False

    def _step_in_value(self, char: str) -> bool:
        """Consume a character of a member's value, or the first one after it."""
        if not self._in_string and not self._depth and char in ",}":
            if self._key == "name" and self._name is None:
                self._name = _decoded(self._token)
            self._state = _State.OUTSIDE if char == "}" else _State.MEMBER
            return char == "}"
        if self._in_string:
            self._closes_string(char)
        elif char == '"':
            self._in_string = True
        elif char in "[{":
            self._depth += 1
        elif char in "]}":
            self._depth -= 1
        elif char in WHITESPACE and not self._depth:
            return False
        if self._key == "parameters":
            self._arguments.append(char)
        elif self._key == "name":
            self._token.append(char)
        return False

    def _closes_string(self, char: str) -> bool:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False
        return not self._in_string


def _decoded(token: list[str]) -> str:
    try:
        decoded = json.loads("".join(token))
    except ValueError:
        return ""
    return decoded if isinstance(decoded, str) else ""
