"""An answer that has to be tool calls, turned into them as it grows."""

import json
import uuid
from dataclasses import dataclass
from enum import Enum, auto

from quire.launch.text.text_out import StopStrings

WHITESPACE = " \t\n\r"


@dataclass(frozen=True, slots=True)
class CallDelta:
    """What a piece of text adds to call ``index``; ``name`` is set once, when the call begins."""

    index: int
    name: str | None
    arguments: str


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


class NamedCall:
    """The whole answer is the arguments of one call."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def push(self, text: str) -> list[CallDelta]:
        name, self._name = self._name, None
        return [CallDelta(0, name, text)] if text or name is not None else []


class AfterThought:
    """Calls that come behind thinking: all up to the end marker is thought, and none of it a call.

    Args:
        end: the marker's text; empty where the answer begins with its calls.
    """

    def __init__(self, calls: "NamedCall | AnyCalls", end: str) -> None:
        self._calls = calls
        self._end = StopStrings([end]) if end else None
        self._end_length = len(end)
        self._held = ""
        """What may be the beginning of the marker."""

    def push(self, text: str, *, last: bool) -> tuple[str, list[CallDelta]]:
        """The thought and the calls that ``text`` adds; ``last``: nothing follows."""
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


class _At(Enum):
    OUTSIDE = auto()
    """Between calls, and before and behind the list."""
    MEMBER = auto()
    """In a call, before a key."""
    KEY = auto()
    COLON = auto()
    """Behind a key, before its value."""
    VALUE = auto()


class AnyCalls:
    """The answer is a JSON list of ``{"name": ..., "parameters": ...}``; each character is looked at once.

    It was constrained to be that, so nothing here checks it: what does not fit makes no call. An answer that was cut
    short gives what there is of its last call.
    """

    def __init__(self) -> None:
        self._at = _At.OUTSIDE
        self._index = -1
        self._begin_call()

    def _begin_call(self) -> None:
        self._token: list[str] = []
        """The key or the name that is being read, quotes included."""
        self._key = ""
        self._name: str | None = None
        self._named = False
        """Its name was sent."""
        self._arguments: list[str] = []
        """Read and not sent."""
        self._depth = 0
        self._in_string = self._escaped = False

    def push(self, text: str) -> list[CallDelta]:
        """What ``text`` adds: at most one delta for each call that it touches."""
        deltas: list[CallDelta] = []
        for char in text:
            ended = self._step(char)
            if ended:
                self._tell(deltas)
                self._begin_call()
        self._tell(deltas)
        return deltas

    def _tell(self, deltas: list[CallDelta]) -> None:
        """Add what was read; the arguments wait for the name."""
        if self._name is None:
            return
        arguments = "".join(self._arguments)
        self._arguments.clear()
        name = None if self._named else self._name
        self._named = True
        if arguments or name is not None:
            deltas.append(CallDelta(self._index, name, arguments))

    def _step(self, char: str) -> bool:
        """Take one character; true when it ends a call."""
        if self._at is _At.VALUE:
            return self._value(char)
        if self._at is _At.KEY:
            self._token.append(char)
            if self._closes_string(char):
                self._key, self._at = _decoded(self._token), _At.COLON
                self._token = []
            return False
        if self._at is _At.OUTSIDE:
            if char == "{":
                self._index += 1
                self._at = _At.MEMBER
        elif self._at is _At.COLON:
            if char == ":":
                self._at = _At.VALUE
                self._token = []
        elif char == '"':
            self._token, self._in_string, self._at = ['"'], True, _At.KEY
        elif char == "}":
            self._at = _At.OUTSIDE
            return True
        return False

    def _value(self, char: str) -> bool:
        """A character of a member's value, or the first one behind it."""
        if not self._in_string and not self._depth and char in ",}":
            if self._key == "name" and self._name is None:
                self._name = _decoded(self._token)
            self._at = _At.OUTSIDE if char == "}" else _At.MEMBER
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
