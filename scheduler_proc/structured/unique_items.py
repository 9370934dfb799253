"""``uniqueItems``: forbids the tokens that would complete an item a second time.

Grammars cannot say it. So the text of an output is read beside its matcher: which arrays are open, which of them have
``uniqueItems`` by any schema that may describe them, and which items they have. Where few tokens are allowed, as in an
array of an ``enum``, those are forbidden too after which only such items could follow.
"""

import json
import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import llguidance
import msgspec
import numpy as np

from quire.protocol.request.plain_schema import target
from quire.scheduler_proc.structured.backend import Masks

FEW_TOKENS = 64
MAX_TRIED = 256
"""Most positions that are tried for one mask; the tokens that are left then are allowed."""
_LEXEME = re.compile(rb'"(?:[^"\\]|\\.)*(?:"|\\?\Z)|[\[\]{}]|[,:] ?', re.DOTALL)
Path = tuple[str | int, ...]
Place = tuple[list[bytes], bytes]
"""The items of an open array, and what is written of the next one."""


@dataclass(slots=True)
class _Container:
    """An open array or object: where the current item begins and the items before it, or the newest key."""

    is_array: bool
    start: int = 0
    items: list[bytes] = field(default_factory=list)
    key: bytes = b""


class VocabularyTexts:
    """The bytes of all tokens, and those tokens that begin with given ones."""

    def __init__(self, texts: list[bytes]) -> None:
        self.of = texts
        self._order = sorted(range(len(texts)), key=texts.__getitem__)
        self._sorted = [texts[token] for token in self._order]

    def starting(self, text: bytes) -> list[int]:
        return self._order[bisect_left(self._sorted, text) : bisect_left(self._sorted, text + b"\xff" * 64)]


class UniqueItems:
    """The schema of a grammar, with ``uniqueItems``, for all its outputs."""

    def __init__(self, schema: Any, texts: VocabularyTexts) -> None:
        self._schema = schema
        self._texts = texts
        self._are_unique: dict[Path, bool] = {}
        self._known: dict[bytes, bool] = {}

    def narrow(self, ids: "llguidance.LLMatcher", tokens: list[int], mask: Masks) -> None:
        """Clear the bits of ``mask`` of the tokens that may not follow ``tokens``."""
        text = _LEXEME.sub(_without_blank, b"".join([self._texts.of[token] for token in tokens]))
        places = self._places(text)
        if not places:
            return
        allowed, self._known = self._allowed(places, mask), {}
        if len(allowed) <= FEW_TOKENS:
            allowed = [token for token in allowed if self._leads_on(ids, text, token)]
        bits = np.zeros(mask.size * 32, np.uint8)
        bits[allowed] = 1
        mask[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def _leads_on(self, ids: "llguidance.LLMatcher", text: bytes, token: int) -> bool:
        """Whether a new item, or the end of the array, can follow the token."""
        text = _LEXEME.sub(_without_blank, text + self._texts.of[token])
        if text not in self._known:
            self._known[text] = len(self._known) >= MAX_TRIED or self._is_open(ids, text, token)
        return self._known[text]

    def _is_open(self, ids: "llguidance.LLMatcher", text: bytes, token: int) -> bool:
        places = self._places(text)
        if not any(item.startswith(part) for items, part in places for item in items):
            return True
        after = ids.deep_copy()
        after.try_consume_tokens([token])
        mask = np.frombuffer(after.compute_bitmask(), np.int32)
        allowed = self._allowed(places, mask)
        return len(allowed) > FEW_TOKENS or any(self._leads_on(after, text, each) for each in allowed)

    def _allowed(self, places: list[Place], mask: Masks) -> list[int]:
        """Return the tokens of a mask that complete no item for the second time."""
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        for items, part in places:
            forms = {*map(_form, items)} - {None}
            for end in (b"", b'"', b"}", b"]"):
                if _form(part + end) in forms:
                    for following in (end,) if end else (b",", b"]"):
                        bits[self._texts.starting(following)] = 0
            blanks = (b"", b" ") if not part or part.endswith((b",", b":")) else (b"",)
            for rest in {item[len(part) :] for item in items if item.startswith(part)}:  # completed by one long token
                for end in (b"",) if rest.endswith((b'"', b"]", b"}")) else (b",", b"]"):
                    for written in {rest, _LEXEME.sub(_with_blank, rest)}:
                        for blank in blanks:
                            bits[self._texts.starting(blank + written + end)] = 0
        found: list[int] = np.flatnonzero(bits).tolist()
        return found

    def _places(self, text: bytes) -> list[Place]:
        """Return the open arrays with ``uniqueItems``."""
        opened: list[_Container] = []
        for lexeme in _LEXEME.finditer(text):
            mark, top = lexeme[0][:1], opened[-1] if opened else _Container(is_array=True)
            if mark in (b"[", b"{"):
                opened.append(_Container(is_array=mark == b"[", start=lexeme.end()))
            elif mark in (b"]", b"}"):
                opened.pop()
            elif top.is_array and mark == b",":
                top.items.append(text[top.start : lexeme.start()])
                top.start = lexeme.end()
            elif mark == b"," or (mark == b'"' and not top.key):
                top.key = lexeme[0] if mark == b'"' else b""
        path: Path = ()
        found: list[Place] = []
        for container in opened:
            if not container.is_array:
                path += (msgspec.json.decode(container.key),) if container is not opened[-1] else ()
                continue
            if self._is_unique(path):
                found.append((container.items, text[container.start :]))
            path += (len(container.items),)
        return found

    def _is_unique(self, path: Path) -> bool:
        known = self._are_unique.get(path)
        if known is None:
            nodes = self._described([self._schema])
            for step in path:
                nodes = self._described([each for node in nodes for each in _children(node, step)])
            known = self._are_unique[path] = any(node.get("uniqueItems") is True for node in nodes)
        return known

    def _described(self, left: list[Any]) -> list[dict[str, Any]]:
        """Return these schemas and all that may describe the same value."""
        found: dict[int, dict[str, Any]] = {}
        while left:
            node = left.pop()
            if isinstance(node, dict) and id(node) not in found:
                found[id(node)] = node
                left += [target(self._schema, node.get("$ref"))]
                left += [part for key in ("allOf", "anyOf", "oneOf") for part in node.get(key, ())]
        return list(found.values())


@lru_cache(maxsize=4096)
def _form(text: bytes) -> str | None:
    """Return a text that equal values have in common; None if ``text`` is not a value."""
    try:
        return json.dumps(json.loads(text, parse_int=float), sort_keys=True)
    except (ValueError, RecursionError):
        return None


def _without_blank(lexeme: "re.Match[bytes]") -> bytes:
    return lexeme[0][:1] if lexeme[0][:1] in (b",", b":") else lexeme[0]


def _with_blank(lexeme: "re.Match[bytes]") -> bytes:
    return lexeme[0] + b" " if lexeme[0] in (b",", b":") else lexeme[0]


def _children(node: dict[str, Any], step: str | int) -> Iterator[Any]:
    """Yield the schemas that may describe a property or an item."""
    if isinstance(step, str):
        named = node.get("properties", {})
        yield from (named[step],) if step in named else (node.get("additionalProperties"),)
        yield from node.get("patternProperties", {}).values()
        return
    items = node.get("items")
    first = node.get("prefixItems", items if isinstance(items, list) else [])
    yield first[step] if step < len(first) else node.get("additionalItems") if isinstance(items, list) else items
