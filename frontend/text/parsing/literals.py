"""JSON and what models write instead: where a value ends, and the JSON for Python's and Gemma's notations."""

import json
import re

OUTSIDE = {"json": re.compile(r'["\[\]{}]'), "python": re.compile(r"[\"'()\[\]{}]")}
INSIDE = {
    "json": {'"': re.compile(r'["\\\n]')},
    "python": {'"': re.compile(r'["\\]'), "'": re.compile(r"['\\]")},
}
NEVER = re.compile(r"(?!)")
WORDS = {"None": "null", "True": "true", "False": "false"}
# A quote ends a text only before the end of a value: templates write texts between quotes without escapes.
PYTHON = re.compile(
    r'"((?:[^"\\]|\\.)*)"?|'
    r"'((?:[^'\\]|\\.|'(?!\s*(?:[,:)\]}]|\Z)))*)'?|"
    r"([A-Za-z_][\w.-]*)(\(|\s*=)?|,(?=\s*[)\]}])|[()]",
    re.DOTALL,
)
TO_ESCAPE = re.compile(r'\\(?:x([0-9a-fA-F]{2})|(.))|["\x00-\x1f]', re.DOTALL)
BARE = re.compile(r"([^{}\[\],:]+)(:?)")


class Extent:
    """Follows the strings and brackets of values of JSON or Python while they are written."""

    def __init__(self, content: str) -> None:
        self._outside, self._inside = OUTSIDE[content], INSIDE[content]
        self._quote = ""
        self._escapes = False
        self._depth = 0

    @property
    def in_string(self) -> bool:
        return bool(self._quote)

    def push(self, text: str, *, stops: bool) -> int | None:
        """Return where in ``text`` a value that ``stops`` ends, or cannot be one; None before that."""
        at, self._escapes = int(self._escapes and bool(text)), self._escapes and not text
        while found := (self._inside[self._quote] if self._quote else self._outside).search(text, at):
            char, at = found[0], found.end()
            if char == "\\":
                self._escapes, at = at == len(text), at + 1
            elif char == "\n":
                self._quote, self._outside, self._depth = "", NEVER, 0
            elif self._quote or char in self._inside:
                self._quote = "" if self._quote else char
                continue
            else:
                self._depth += 1 if char in "[{(" else -1
            if stops and self._depth <= 0 and char != "\\":
                return at
        return None


def python_json(text: str) -> str:
    """Return JSON for Python literals. A call ``f(a=1)`` becomes an object with its name and arguments."""
    closings: list[str] = []

    def convert(found: re.Match[str]) -> str:
        double, single, word, opens = found.groups()
        if word is None:
            quoted = single if double is None else double
            if quoted is not None:
                return f'"{TO_ESCAPE.sub(_escape, quoted)}"'
            if found[0] == "(":
                closings.append("]")
                return "["
            return "" if found[0] == "," else closings.pop() if closings else ")"
        if opens is None:
            return WORDS.get(word, word)
        if opens != "(":
            return f'"{word}":'
        closings.append("}}")
        return f'{{"name": "{word}", "arguments": {{'

    return PYTHON.sub(convert, text)


def _escape(found: re.Match[str]) -> str:
    code, char = found.groups()
    if code is not None:
        return rf"\u00{code}"
    if char is None:
        return json.dumps(found[0])[1:-1]
    return char if char == "'" else "" if char == "\n" else found[0] if char in '"\\/bfnrtu' else rf"\{found[0]}"


def bare_json(text: str) -> str:
    """Return JSON for a text without strings whose keys have no quotes."""
    return BARE.sub(_quote, text)


def _quote(found: re.Match[str]) -> str:
    text = found[1].strip()
    if not found[2]:
        return WORDS.get(text, found[1])
    return found[0] if text[:1] in ('"', "\x01") else f"{json.dumps(text, ensure_ascii=False)}:"
