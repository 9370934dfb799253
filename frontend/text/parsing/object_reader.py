"""Reads objects with a name and arguments as JSON while they are written."""

import json
import re
from typing import NamedTuple

from quire.frontend.text.parsing.values import ARGUMENTS, NAME

WHITESPACE = " \t\n\r"
OUTSIDE, MEMBER, KEY, COLON, VALUE = range(5)
PLAIN_RUN = re.compile(r'[^"\\]+')
"""Characters of a string that end nothing."""
NESTED_RUN = re.compile(r'[^"\[\]{}]+')
"""Characters of a nested value outside of strings that end nothing."""


class CallPart(NamedTuple):
    """Text added to the arguments of call ``number`` of a region. Only the first one has the name."""

    number: int
    name: str | None
    arguments: str


class ObjectReader:
    """Reads objects ``{"name": ..., "arguments": {...}}`` as they are written, in time linear in the text.

    Nothing is validated: other text makes no call, or a wrong one, which the value of the whole text tells.
    """

    def __init__(self, *, is_constrained: bool = False) -> None:
        """``is_constrained``: the text is certainly calls: each is reported with its name, before its arguments."""
        self._is_constrained = is_constrained
        self._state = OUTSIDE
        self._number = -1
        self._begin()

    def _begin(self) -> None:
        self._token: list[str] = []
        """The current key or name, with quotes."""
        self._key = ""
        self._name: str | None = None
        self._is_sent = False
        self._arguments: list[str] = []
        """Read and not reported."""
        self._has_arguments = False
        self._depth = 0
        self._in_string = self._escaped = False

    def push(self, text: str) -> list[CallPart]:
        pieces: list[CallPart] = []
        at, end = 0, len(text)
        while at < end:
            if self._state == VALUE and (self._in_string or self._depth):
                # Most of the text is inside of strings, where only quotes and backslashes matter.
                run = None if self._escaped else (PLAIN_RUN if self._in_string else NESTED_RUN).match(text, at)
                if run is not None:
                    self._keep(run[0])
                    at = run.end()
                    continue
            ended = self._step(text[at])
            at += 1
            if ended:
                self._report(pieces)
                self._begin()
        self._report(pieces)
        return pieces

    def _report(self, pieces: list[CallPart]) -> None:
        """Move what was read to a new piece, once the name and the start of the arguments are known."""
        if self._name is None or not (self._has_arguments or self._is_constrained):
            return
        arguments = "".join(self._arguments)
        self._arguments.clear()
        if arguments or (self._is_constrained and not self._is_sent):
            pieces.append(CallPart(self._number, None if self._is_sent else self._name, arguments))
            self._is_sent = True

    def _step(self, char: str) -> bool:
        """Consume one character; return True if it ends a call."""
        if self._state == VALUE:
            return self._step_in_value(char)
        if self._state == KEY:
            self._token.append(char)
            if self._closes_string(char):
                self._key, self._state = _text_of(self._token), COLON
                self._token = []
        elif self._state == OUTSIDE:
            if char == "{":
                self._number += 1
                self._state = MEMBER
        elif self._state == COLON:
            if char == ":":
                self._state = VALUE
                self._token = []
        elif char == '"':
            self._token, self._in_string, self._state = ['"'], True, KEY
        elif char == "}":
            self._state = OUTSIDE
            return True
        return False

    def _step_in_value(self, char: str) -> bool:
        """Consume a character of a member's value, or the first one after it."""
        if not self._in_string and not self._depth and char in ",}":
            if self._key == NAME and self._name is None:
                self._name = _text_of(self._token) or None
            self._state = OUTSIDE if char == "}" else MEMBER
            return char == "}"
        if not self._in_string and not self._depth and self._key in ARGUMENTS and char not in WHITESPACE:
            self._has_arguments = self._has_arguments or self._is_constrained or char == "{"
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
        self._keep(char)
        return False

    def _keep(self, text: str) -> None:
        if self._key == NAME:
            self._token.append(text)
        elif self._has_arguments and self._key in ARGUMENTS:
            self._arguments.append(text)

    def _closes_string(self, char: str) -> bool:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False
        return not self._in_string


def _text_of(token: list[str]) -> str:
    try:
        decoded = json.loads("".join(token))
    except ValueError:
        return ""
    return decoded if isinstance(decoded, str) else ""
