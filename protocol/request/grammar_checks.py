"""Rejects grammars before a library gets them, if libraries reject them unclearly, are slow, or crash.

The size limits bound a library's time and memory: its recursion follows chains of rules and references, and its
automata grow with literals. The limits were measured with ``llguidance``; see ``scheduler_proc/structured/README.md``.
"""

import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import msgspec

from quire.protocol.errors import printable
from quire.protocol.request.output_form import schemas_in
from quire.protocol.request.structured_outputs import StructuredOutputs

MAX_REASON = 240
MAX_SCHEMA_DEPTH = 64
MAX_SCHEMA_OBJECTS = 10_000
MAX_PROPERTIES = 1000
MAX_OPTIONAL = 400
"""Optional properties of one object: after each of them, any later one may follow."""
MAX_PATTERN_PROPERTIES = 50
MAX_REFERENCES = 1000
"""Distinct definitions that a schema refers to, which bounds the length of a reference chain."""
MAX_LITERAL = 8192
"""Characters of a regular expression, of a choice, and of any string in a schema."""
MAX_NUMBER = int(sys.float_info.max)
"""Largest number in a schema: libraries read numbers as floats, which Python's integers can exceed."""
MAX_GRAMMAR_LINE = 16_384
MAX_GRAMMAR_RULES = 2000
MAX_GBNF = 16_384

DATA = ("const", "enum", "default", "examples")
"""Keywords with values that are data, not schemas."""
_RECURSION = re.compile(r"\(\?(?:R|[0-9]|&|P>)")
_RULE = re.compile(r"^[ \t]*[?!]?[\w-]+(?:\[[^\]\n]*\])?(?:\.\d+)?[ \t]*:", re.MULTILINE)
_LARK_PARTS = re.compile(r'"(?:\\.|[^"\\\n])*"|(?://|#)[^\n]*|/(?:\\.|[^/\\])+/|%json\s*', re.DOTALL)
"""A string, a comment, a regular expression, or the keyword before a JSON schema."""
_ROOT = re.compile(r"^[ \t]*root[ \t]*::=", re.MULTILINE)


class GrammarRefused(Exception):
    """The grammar of a request is not supported; the text is one line for the client."""

    def __init__(self, text: str) -> None:
        line = " ".join(text.split())
        super().__init__(line if len(line) <= MAX_REASON else line[: MAX_REASON - 3] + "...")


def check(constraint: StructuredOutputs) -> None:
    """Raise GrammarRefused if the constraint must not be passed to a library."""
    match constraint.kind:
        case "json":
            check_schema(str(constraint.json))
        case "regex":
            check_regex(str(constraint.regex))
        case "choice":
            for index, choice in enumerate(constraint.choice or []):
                if len(choice) > MAX_LITERAL:
                    raise GrammarRefused(
                        f"choice {index} must have at most {MAX_LITERAL} characters (got {len(choice)})"
                    )
        case "grammar":
            check_grammar(str(constraint.grammar))
        case "form" if constraint.form is not None:
            for schema in schemas_in(constraint.form):
                check_schema(schema)


def check_regex(regex: str) -> None:
    if len(regex) > MAX_LITERAL:
        raise GrammarRefused(f"the regular expression must have at most {MAX_LITERAL} characters (got {len(regex)})")
    if _RECURSION.search(regex):
        raise GrammarRefused("recursion in the regular expression is not supported")
    if (len(regex) - len(regex.rstrip("\\"))) % 2:
        raise GrammarRefused("the regular expression ends with an incomplete escape (\\)")


def is_gbnf(grammar: str) -> bool:
    return "::=" in grammar


def check_grammar(grammar: str) -> None:
    for number, line in enumerate(grammar.splitlines(), 1):
        if len(line) > MAX_GRAMMAR_LINE:
            raise GrammarRefused(
                f"line {number} of the grammar has {len(line)} characters, more than {MAX_GRAMMAR_LINE}"
            )
    if is_gbnf(grammar):
        if len(grammar) > MAX_GBNF:
            raise GrammarRefused(f"a GBNF grammar must have at most {MAX_GBNF} characters (got {len(grammar)})")
        if not _ROOT.search(grammar):
            raise GrammarRefused("a GBNF grammar must have a rule named root")
        rules = grammar.count("::=")
    else:
        rules = len(_RULE.findall(grammar))
        for begin, end in schemas_in_lark(grammar):
            check_schema(grammar[begin:end])
    if rules > MAX_GRAMMAR_RULES:
        raise GrammarRefused(f"the grammar must have at most {MAX_GRAMMAR_RULES} rules; it has {rules}")


def schemas_in_lark(grammar: str) -> list[tuple[int, int]]:
    """Return the places of the JSON schemas in a Lark grammar, behind ``%json``. Raises GrammarRefused."""
    found: list[tuple[int, int]] = []
    end = 0
    while (part := _LARK_PARTS.search(grammar, end)) is not None:
        end = part.end()
        if part[0].startswith("%json"):
            try:
                _, end = json.JSONDecoder().raw_decode(grammar, end)
            except (ValueError, RecursionError):
                raise GrammarRefused("the grammar cannot be used: the JSON behind its %json is not valid") from None
            found.append((part.end(), end))
    return found


def check_schema(text: str) -> Any:
    """Return the decoded schema if it may be passed to a library. Raises GrammarRefused."""
    try:
        schema = msgspec.json.decode(text)
    except (msgspec.MsgspecError, ValueError) as error:
        place = re.search(r"\(byte (\d+)\)", str(error))
        where = f" (at byte {place[1]})" if place else ""
        raise GrammarRefused(f"the JSON schema is not valid JSON{where}") from None
    except RecursionError:
        raise GrammarRefused(_too_deep()) from None
    if schema is False:
        raise GrammarRefused("the JSON schema is false, which allows no text")
    if not isinstance(schema, dict | bool):
        kind = "null" if schema is None else "a list" if isinstance(schema, list) else "a string or a number"
        raise GrammarRefused(f"the JSON schema must be an object or true (got {kind})")
    if isinstance(schema, dict) and "x-guidance" in schema:
        raise GrammarRefused("the JSON schema uses x-guidance, which is not supported")
    references: set[str] = set()
    num_objects = num_patterns = 0
    for node, depth in _walk(schema):
        if depth > MAX_SCHEMA_DEPTH:
            raise GrammarRefused(_too_deep())
        if isinstance(node, dict):
            num_objects += 1
            num_patterns += _check_object(node, references)
        elif isinstance(node, str) and len(node) > MAX_LITERAL:
            raise GrammarRefused(f"a string in the JSON schema has {len(node)} characters, more than {MAX_LITERAL}")
        elif isinstance(node, int) and not -MAX_NUMBER <= node <= MAX_NUMBER:
            raise GrammarRefused(f"numbers in the JSON schema must be from -{MAX_NUMBER:g} to {MAX_NUMBER:g}")
    for count, most, name in (
        (num_objects, MAX_SCHEMA_OBJECTS, "objects"),
        (num_patterns, MAX_PATTERN_PROPERTIES, "patternProperties"),
        (len(references), MAX_REFERENCES, "referenced definitions"),
    ):
        if count > most:
            raise GrammarRefused(f"the JSON schema must have at most {most} {name}; it has {count}")
    return schema


def _check_object(node: dict[str, Any], references: set[str]) -> int:
    """Check one object of a schema; return its number of patternProperties."""
    _check_keywords(node)
    properties = node.get("properties")
    if isinstance(properties, dict):
        _check_properties(properties, node.get("required"))
    reference = node.get("$ref")
    if isinstance(reference, str):
        if not reference.startswith("#"):
            raise GrammarRefused(
                f"$ref must start with # (got {reference[:40]!r}): references outside the JSON schema are not supported"
            )
        references.add(reference)
    patterns = node.get("patternProperties")
    return len(patterns) if isinstance(patterns, dict) else 0


def _check_keywords(node: dict[str, Any]) -> None:
    """Check keywords with invalid values that a library accepts, or rejects only when a tool call is required."""
    kinds = node.get("type", "object")
    named = kinds if isinstance(kinds, list) else [kinds]
    if not isinstance(kinds, dict) and not all(isinstance(kind, str) for kind in named):
        raise GrammarRefused(f"type must be a string or a list of strings (got {printable(kinds)})")
    pattern = node.get("pattern")
    if isinstance(pattern, str):
        check_regex(pattern)
    step = node.get("multipleOf")
    if isinstance(step, int | float) and step <= 0:
        raise GrammarRefused(f"multipleOf must be greater than 0 (got {printable(step)})")


def _check_properties(properties: dict[str, Any], required: Any) -> None:
    if len(properties) > MAX_PROPERTIES:
        raise GrammarRefused(
            f"an object of the JSON schema has {len(properties)} properties, more than {MAX_PROPERTIES}"
        )
    names = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    num_optional = len(properties.keys() - names)
    if num_optional > MAX_OPTIONAL:
        raise GrammarRefused(
            f"an object of the JSON schema has {num_optional} optional properties, more than {MAX_OPTIONAL}"
        )


def _walk(schema: Any) -> Iterator[tuple[Any, int]]:
    """Yield (value, depth) of everything in ``schema`` except objects inside data, which refer to nothing."""
    left: list[tuple[Any, int, bool]] = [(schema, 1, False)]
    while left:
        node, depth, is_data = left.pop()
        if not (is_data and isinstance(node, dict)):
            yield node, depth
        if depth > MAX_SCHEMA_DEPTH:
            continue
        if isinstance(node, dict):
            for key, value in node.items():
                yield key, depth
                left.append((value, depth + 1, is_data or key in DATA))
        elif isinstance(node, list):
            left.extend((value, depth + 1, is_data) for value in node)


def _too_deep() -> str:
    return f"the JSON schema must be nested at most {MAX_SCHEMA_DEPTH} levels deep"
