"""Tool calls as they are written: each class turns the text of one region to names and arguments as JSON.

What has been reported cannot be taken back, so ``finish`` compares it with the value of the whole text. If they differ,
or the text is not a call, the caller returns the text instead.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, Protocol

from quire.frontend.text.parsing.literals import Extent, bare_json
from quire.frontend.text.parsing.object_reader import WHITESPACE, CallPart, ObjectReader
from quire.frontend.text.parsing.scanner import FoundDelimiter, Scanner
from quire.frontend.text.parsing.templates import Region
from quire.frontend.text.parsing.values import (
    ANY_TYPES,
    NAME,
    Malformed,
    ParsedCall,
    as_json,
    calls_of,
    decode_json,
    placeholder,
    schema_types,
    typed,
)

SIGNS = re.compile(r"[{}\[\],:]")
"""What ends a key or a word that is in no quotes."""
Properties = Mapping[str, Any]
"""The ``properties`` of a tool's parameters."""


class CallText(Protocol):
    """Parser of the text between the markers that begin and end tool calls in an answer."""

    rest: str | None
    """What followed the end of a value that ends its region, in the text pushed last; None before the end."""

    def push(self, text: str) -> list[CallPart]: ...

    def ends(self, *, is_sure: bool) -> bool:
        """Return whether a closing of the region ends it here; otherwise the closing is text of an argument.

        ``is_sure``: it is unlikely in the text of an argument.
        """
        ...

    def finish(self, *, is_closed: bool) -> list[CallPart]:
        """Return what is missing; raise Malformed if the text is not a call. ``is_closed``: a closing follows."""
        ...


def call_text(region: Region, captures: Mapping[str, str], tools: Mapping[str, Properties]) -> CallText:
    """Return the parser of a region that has just been opened. ``tools``: the properties of each tool by name."""
    function = region.transform.get("function") if isinstance(region.transform, dict) else None
    name, arguments = _sources(function)
    captured = captures.get(name[0]) if name is not None and len(name) == 1 and not region.transform_each else None
    args = region.args or {}
    if region.tags is not None:
        return TaggedArguments(region, captured or "", tools.get(captured or "", {}))
    is_followed = len(args.get("string_delims", ())) == 1 or not (
        args.get("string_delims") or args.get("unquoted_keys")
    )
    if region.content == "json" and captured and arguments == ["content"] and is_followed:
        return WholeArguments(region, captures, captured)
    if region.content in ("json", "python") and not args.get("string_delims") and not args.get("unquoted_keys"):
        if function == "{content}" or (name == ["content", NAME] and arguments and arguments[0] == "content"):
            return ObjectCalls(region, captures)
        if region.transform_each and name == [NAME] and arguments and len(arguments) == 1:
            return ObjectCalls(region, captures)
    return LateCalls(region, captures)


def _sources(function: Any) -> tuple[list[str] | None, list[str] | None]:
    if not isinstance(function, dict):
        return None, None
    return placeholder(function.get(NAME)), placeholder(function.get("arguments"))


class HeldBlanks:
    """Holds back the last blanks of a text, which the end may follow."""

    def __init__(self) -> None:
        self._held: list[str] = []

    def push(self, text: str) -> str:
        kept = text.rstrip()
        whole = "".join((*self._held, kept)) if kept else ""
        if kept:
            self._held.clear()
        self._held.append(text[len(kept) :])
        return whole


class LateCalls:
    """Calls that are reported only once their text is complete."""

    def __init__(self, region: Region, captures: Mapping[str, str]) -> None:
        self._region = region
        self._captures = captures
        self._body: list[str] = []
        self._sent: list[tuple[str, list[str]]] = []
        """Name and arguments of each call that was reported."""
        self._extent = Extent(region.content) if region.content in ("json", "python") else None
        self.rest: str | None = None

    def push(self, text: str) -> list[CallPart]:
        end = None if self._extent is None else self._extent.push(text, stops=self._region.ends_with_value)
        if end is not None:
            text, self.rest = text[:end], text[end:]
        self._body.append(text)
        return self._read(text)

    def ends(self, *, is_sure: bool) -> bool:
        return self._extent is None or not self._extent.in_string

    def finish(self, *, is_closed: bool) -> list[CallPart]:
        calls = calls_of("".join(self._body), self._region, self._captures)
        pieces = self._rest()
        if len(self._sent) > len(calls):
            raise Malformed
        for (name, texts), call in zip(self._sent, calls, strict=False):
            if name != call.name or decode_json("".join(texts)) != call.arguments:
                raise Malformed
        missing = calls[len(self._sent) :]
        return pieces + [_whole(call, number) for number, call in enumerate(missing, len(self._sent))]

    def _read(self, text: str) -> list[CallPart]:
        return []

    def _rest(self) -> list[CallPart]:
        """Return what is still held back of the calls that were reported."""
        return []

    def _send(self, number: int, name: str, arguments: str) -> list[CallPart]:
        is_new = number == len(self._sent)
        if is_new:
            self._sent.append((name, []))
        self._sent[number][1].append(arguments)
        return [CallPart(number, name if is_new else None, arguments)]


def _whole(call: ParsedCall, number: int) -> CallPart:
    return CallPart(number, call.name, as_json(call.arguments))


class ObjectCalls(LateCalls):
    """One object with a name and arguments, or a list of such objects."""

    def __init__(self, region: Region, captures: Mapping[str, str]) -> None:
        super().__init__(region, captures)
        self._objects = ObjectReader()
        self._first = ""
        """The first character, which tells JSON from Python."""

    def _read(self, text: str) -> list[CallPart]:
        self._first = self._first or text.lstrip()[:1]
        if self._region.content == "python" and self._first != "{":
            return []
        pieces: list[CallPart] = []
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
        self._held: list[str] = []
        """What may begin a key, a word or a delimiter of a string."""
        self._blanks = HeldBlanks()
        self._tail = ""
        self._in_string = False
        self._is_object: bool | None = None

    def ends(self, *, is_sure: bool) -> bool:
        return super().ends(is_sure=is_sure) if self._quotes is None else not self._in_string

    def _read(self, text: str) -> list[CallPart]:
        return self._report(self._plain(text, last=False))

    def _rest(self) -> list[CallPart]:
        return self._report(self._plain("", last=True))

    def _report(self, text: str) -> list[CallPart]:
        if self._is_object is None and text:
            text = text.lstrip(WHITESPACE)
            if text:
                self._is_object = text[0] == "{"
        return self._send(0, self._name, text) if self._is_object and text else []

    def _plain(self, text: str, *, last: bool) -> str:
        """Return the text as JSON, as far as it is certain."""
        if self._quotes is None:
            return self._blanks.push(text)
        opens, closes = self._quotes
        self._held.append(text)
        # Text without a sign decides nothing. Looking at what is held each time would take quadratic time.
        seen, self._tail = self._tail + text, (self._tail + text)[-len(opens) :]
        decides = last or self._in_string or opens in seen or SIGNS.search(text)
        if self._bare_keys and not decides:
            return ""
        text = "".join(self._held)
        self._held.clear()
        parts: list[str] = []
        while text:
            delimiter = closes if self._in_string else opens
            place = text.find(delimiter)
            cut = place if place >= 0 else len(text) - (0 if last else _overlap(text, delimiter))
            part, rest = text[:cut], text[cut:]
            if self._in_string:
                parts.append(escaped(part))
            else:
                held = "" if last or place >= 0 else self._bare_tail(part)
                part, rest = part[: len(part) - len(held)], held + rest
                parts.append(bare_json(part) if self._bare_keys else part)
            if place < 0:
                self._held.append(rest)
                break
            parts.append('"')
            self._in_string = not self._in_string
            text = rest[len(delimiter) :]
        return "".join(parts)

    def _bare_tail(self, text: str) -> str:
        """Return the end of a text outside of strings that may be the beginning of a key, or of a word."""
        return SIGNS.split(text)[-1] if self._bare_keys else ""


def _overlap(text: str, delimiter: str) -> int:
    """Return the number of last characters that may be the beginning of the delimiter."""
    return next((size for size in range(len(delimiter) - 1, 0, -1) if text.endswith(delimiter[:size])), 0)


class TaggedArguments:
    """Arguments, each in tags of its own. Those of type string are reported as they are written."""

    rest: str | None = None

    def __init__(self, region: Region, name: str, properties: Properties) -> None:
        assert region.tags is not None
        self._tags = region.tags
        self._name: str | None = name
        self._properties = properties
        self._scanner = Scanner([region.tags.opens])
        self._types: tuple[str, ...] = ()
        self._value: list[str] | None = None
        """What is not reported of the current argument's value; None outside of any tag."""
        self._is_streamed = False
        self._given: set[str] = set()
        self._out: list[str] = []
        """The arguments as JSON, as far as they are not reported."""
        self._is_malformed = not name

    def push(self, text: str) -> list[CallPart]:
        if not self._is_malformed:
            self._scanner.push(text)
            self._read(last=False)
        return self._report()

    def ends(self, *, is_sure: bool) -> bool:
        if self._value is None or is_sure or self._is_malformed:
            return True
        before, found = self._scanner.next(last=True)
        self._value.append(before)
        if found is not None and found.text.strip():  # a closing tag, which may have waited for what follows
            self._close()
            return True
        self._value.append("" if found is None else found.text)
        self._scanner.watch([self._tags.closes])
        return False

    def finish(self, *, is_closed: bool) -> list[CallPart]:
        self._read(last=True, is_closed=is_closed)
        if self._is_malformed or self._value is not None:
            raise Malformed
        self._out.append("}" if self._given else "{}")
        return self._report()

    def _read(self, *, last: bool, is_closed: bool = False) -> None:
        while not self._is_malformed:
            before, found = self._scanner.next(last=last)
            if self._value is not None:
                self._value.append(before)
            elif before.strip():
                self._is_malformed = True
            if found is None or self._is_malformed:
                break
            if self._value is None:
                self._open(found.groups)
            elif self._closes(found, is_closed):
                self._close()
            else:
                self._value.append(found.text or self._scanner.take(1))
                self._scanner.watch([self._tags.closes])

    def _closes(self, found: FoundDelimiter, is_closed: bool) -> bool:
        """Return whether a value ends. Instead of its tag, a next argument or the end of the call ends it as well."""
        if "next" in found.groups:
            key = found.groups["next"]
            return key not in self._given and (not self._properties or key in self._properties)
        return is_closed or bool(found.text.strip())

    def _open(self, groups: Mapping[str, str]) -> None:
        key = groups["key"]
        self._types = schema_types(self._properties.get(key))
        if "is_text" in groups:
            self._types = ("string",) if groups["is_text"] == "true" else self._types or ANY_TYPES
        self._value = []
        self._is_streamed = not set(self._types) - {"string"}
        self._scanner.watch([self._tags.closes])
        before = f"{', ' if self._given else '{'}{json.dumps(key, ensure_ascii=False)}: "
        self._out.append(before + ('"' if self._is_streamed else ""))
        self._given.add(key)

    def _close(self) -> None:
        value, self._value = "".join(self._value or ()), None
        self._scanner.watch([self._tags.opens])
        if self._is_streamed:
            self._out.append(escaped(value) + '"')
        else:
            self._out.append(as_json(typed(value, self._types)))

    def _report(self) -> list[CallPart]:
        if self._is_streamed and self._value:
            self._out.append(escaped("".join(self._value)))
            self._value = []
        arguments = "".join(self._out)
        self._out = []
        if not arguments:
            return []
        name, self._name = self._name, None
        return [CallPart(0, name, arguments)]


def escaped(text: str) -> str:
    """Return the text as written inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1] if text else ""
