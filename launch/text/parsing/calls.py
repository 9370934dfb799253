"""Tool calls as they are written: each class turns the text of one region to names and arguments as JSON.

What has been reported cannot be taken back, so ``finish`` compares it with the value of the whole text. If they differ,
or the text is not a call, the caller returns the text instead.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, Protocol

from quire.launch.text.parsing.object_reader import WHITESPACE, ObjectReader, Piece
from quire.launch.text.parsing.scanner import Scanner
from quire.launch.text.parsing.templates import Region
from quire.launch.text.parsing.values import (
    NAME,
    UNQUOTED_KEY,
    Call,
    Malformed,
    calls_of,
    decode_json,
    placeholder,
    schema_types,
    typed,
)

Properties = Mapping[str, Any]
"""The ``properties`` of a tool's parameters."""


class CallText(Protocol):
    """The text of one region with calls."""

    def push(self, text: str) -> list[Piece]: ...

    def finish(self) -> list[Piece]:
        """Return what is missing; raise Malformed if the text is not a call."""
        ...


class NoCalls:
    """The rest of a text that turned out not to be a call."""

    def push(self, text: str) -> list[Piece]:
        return []

    def finish(self) -> list[Piece]:
        raise Malformed


def call_text(region: Region, captures: Mapping[str, str], tools: Mapping[str, Properties]) -> CallText:
    """Return the parser of a region that has just been opened. ``tools``: the properties of each tool by name."""
    function = region.transform.get("function") if isinstance(region.transform, dict) else None
    name, arguments = _sources(function)
    captured = captures.get(name[0]) if name is not None and len(name) == 1 and not region.transform_each else None
    args = region.args or {}
    if region.tags is not None:
        return TaggedArguments(region, captured or "", tools.get(captured or "", {}))
    few_quotes = len(args.get("string_delims", ())) <= 1
    if region.content == "json" and captured and arguments == ["content"] and few_quotes:
        return WholeArguments(region, captures, captured)
    if region.content == "json" and not args.get("string_delims") and not args.get("unquoted_keys"):
        if function == "{content}" or (name == ["content", NAME] and arguments and arguments[0] == "content"):
            return ObjectCalls(region, captures)
        if region.transform_each and name == [NAME] and arguments and len(arguments) == 1:
            return ObjectCalls(region, captures)
    return LateCalls(region, captures)


def _sources(function: Any) -> tuple[list[str] | None, list[str] | None]:
    if not isinstance(function, dict):
        return None, None
    return placeholder(function.get(NAME)), placeholder(function.get("arguments"))


class LateCalls:
    """Calls that are reported only once their text is complete."""

    def __init__(self, region: Region, captures: Mapping[str, str]) -> None:
        self._region = region
        self._captures = captures
        self._body: list[str] = []
        self._sent: list[tuple[str, list[str]]] = []
        """Name and arguments of each call that was reported."""

    def push(self, text: str) -> list[Piece]:
        self._body.append(text)
        return self._read(text)

    def finish(self) -> list[Piece]:
        calls = calls_of("".join(self._body), self._region, self._captures)
        pieces = self._rest()
        if len(self._sent) > len(calls):
            raise Malformed
        for (name, texts), call in zip(self._sent, calls, strict=False):
            if name != call.name or decode_json("".join(texts)) != call.arguments:
                raise Malformed
        missing = calls[len(self._sent) :]
        return pieces + [_whole(call, number) for number, call in enumerate(missing, len(self._sent))]

    def _read(self, text: str) -> list[Piece]:
        return []

    def _rest(self) -> list[Piece]:
        """Return what is still held back of the calls that were reported."""
        return []

    def _send(self, number: int, name: str, arguments: str) -> list[Piece]:
        is_new = number == len(self._sent)
        if is_new:
            self._sent.append((name, []))
        self._sent[number][1].append(arguments)
        return [Piece(number, name if is_new else None, arguments)]


def _whole(call: Call, number: int) -> Piece:
    return Piece(number, call.name, json.dumps(call.arguments, ensure_ascii=False))


class ObjectCalls(LateCalls):
    """One object with a name and arguments, or a list of such objects."""

    def __init__(self, region: Region, captures: Mapping[str, str]) -> None:
        super().__init__(region, captures)
        self._objects = ObjectReader()

    def _read(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        for piece in self._objects.push(text):
            # After a call that cannot be reported yet, later ones wait as well.
            if piece.number <= len(self._sent) - (piece.name is None):
                name = piece.name or self._sent[piece.number][0]
                pieces += self._send(piece.number, name, piece.arguments)
        return pieces


class WholeArguments(LateCalls):
    """Arguments of a call whose name precedes the region, as JSON or in a dialect of it."""

    def __init__(self, region: Region, captures: Mapping[str, str], name: str) -> None:
        super().__init__(region, captures)
        self._name = name
        args = region.args or {}
        self._quotes = next(iter(args.get("string_delims", ())), None)
        self._bare_keys = bool(args.get("unquoted_keys"))
        self._held = ""
        self._before = ""
        """The last character outside of strings."""
        self._in_string = False
        self._is_object: bool | None = None

    def _read(self, text: str) -> list[Piece]:
        return self._report(self._plain(text, last=False))

    def _rest(self) -> list[Piece]:
        return self._report(self._plain("", last=True))

    def _report(self, text: str) -> list[Piece]:
        if self._is_object is None and text:
            text = text.lstrip(WHITESPACE)
            if text:
                self._is_object = text[0] == "{"
        return self._send(0, self._name, text) if self._is_object and text else []

    def _plain(self, text: str, *, last: bool) -> str:
        """Return the text as JSON, as far as it is certain."""
        if self._quotes is None:
            return self._outside(text, last=last)
        opens, closes = self._quotes
        text, self._held = self._held + text, ""
        parts: list[str] = []
        while text:
            delimiter = closes if self._in_string else opens
            place = text.find(delimiter)
            cut = place if place >= 0 else len(text) - (0 if last else _overlap(text, delimiter))
            part, rest = text[:cut], text[cut:]
            if self._in_string:
                parts.append(escaped(part))
            else:
                held = "" if last or place >= 0 else _bare_tail(part, self._before)
                part, rest = part[: len(part) - len(held)], held + rest
                parts.append(self._keys(part))
            if place < 0:
                self._held = rest
                break
            parts.append('"')
            self._in_string = not self._in_string
            self._before = '"'
            text = rest[len(delimiter) :]
        return "".join(parts)

    def _outside(self, text: str, *, last: bool) -> str:
        text, self._held = self._held + text, ""
        if not last:
            cut = len(text.rstrip(WHITESPACE))
            if self._bare_keys:
                cut = min(cut, len(text) - len(_bare_tail(text, self._before)))
            text, self._held = text[:cut], text[cut:]
        else:
            text = text.rstrip(WHITESPACE)
        return self._keys(text)

    def _keys(self, text: str) -> str:
        if not self._bare_keys or not text:
            return text
        before, self._before = self._before, text[-1]
        return UNQUOTED_KEY.sub(r'"\1":', before + text)[len(before) :]


def _overlap(text: str, delimiter: str) -> int:
    """Return the number of last characters that may be the beginning of the delimiter."""
    return next((size for size in range(len(delimiter) - 1, 0, -1) if text.endswith(delimiter[:size])), 0)


def _bare_tail(text: str, before: str) -> str:
    """Return the end of the text that may be the beginning of a key without quotes."""
    found = re.search(r"[{,](\w*)\Z", before + text)
    return found[1] if found else ""


class TaggedArguments:
    """Arguments, each in tags of its own. Those of type string are reported as they are written."""

    def __init__(self, region: Region, name: str, properties: Properties) -> None:
        assert region.tags is not None
        self._tags = region.tags
        self._args = region.args or {}
        self._name: str | None = name
        self._has_name = bool(name)
        self._properties = properties
        self._scanner = Scanner([region.tags.opens])
        self._types: tuple[str, ...] = ()
        self._value: list[str] | None = None
        """The value so far of an argument that is not reported as it is written; None outside of any tag."""
        self._is_streamed = False
        self._num_arguments = 0
        self._is_malformed = not name

    def push(self, text: str) -> list[Piece]:
        return self._read(text, last=False)

    def finish(self) -> list[Piece]:
        pieces = self._read("", last=True)
        if self._is_malformed or self._value is not None:
            raise Malformed
        return [*pieces, *self._send("}" if self._num_arguments else "{}")]

    def _read(self, text: str, *, last: bool) -> list[Piece]:
        if self._is_malformed:
            return []
        self._scanner.push(text)
        out: list[str] = []
        while not self._is_malformed:
            before, found = self._scanner.next(last=last)
            if self._value is None:
                self._is_malformed = bool(before.strip())
            elif self._is_streamed:
                out.append(escaped(before))
            else:
                self._value.append(before)
            if found is None:
                break
            if self._is_malformed:
                continue
            out.append(self._open(found.groups["key"]) if self._value is None else self._close())
        return self._send("".join(out))

    def _open(self, key: str) -> str:
        self._types = schema_types(self._properties.get(key))
        self._value = []
        self._is_streamed = not set(self._types) - {"string"}
        self._scanner.watch([self._tags.closes])
        comma = ", " if self._num_arguments else "{"
        self._num_arguments += 1
        return f"{comma}{json.dumps(key, ensure_ascii=False)}: " + ('"' if self._is_streamed else "")

    def _close(self) -> str:
        value, self._value = "".join(self._value or ()), None
        self._scanner.watch([self._tags.opens])
        return '"' if self._is_streamed else json.dumps(typed(value, self._types), ensure_ascii=False)

    def _send(self, arguments: str) -> list[Piece]:
        if not arguments:
            return []
        name, self._name = self._name, None
        return [Piece(0, name, arguments)]


def escaped(text: str) -> str:
    """Return the text as written inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1] if text else ""
