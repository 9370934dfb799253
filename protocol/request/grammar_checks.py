"""What is refused before a grammar library sees it: what libraries refuse unclearly, slowly, or by crashing.

The sizes bound a library's time and memory: its recursion follows chains of rules and references, and its automata
grow with literals. Each was measured against ``llguidance``; see ``scheduler_proc/structured/README.md``.
"""

import re
import sys
from collections.abc import Iterator
from typing import Any

import msgspec

from quire.protocol.request.structured_outputs import StructuredOutputs

MAX_REASON = 240
MAX_SCHEMA_DEPTH = 64
MAX_SCHEMA_OBJECTS = 10_000
MAX_PROPERTIES = 1000
MAX_OPTIONAL = 400
"""Properties of one object that may be left out: after each of them, all the later ones may come."""
MAX_PATTERN_PROPERTIES = 50
MAX_REFERENCES = 1000
"""Different definitions that a schema refers to: how long a chain of them can be."""
MAX_LITERAL = 8192
"""Characters of a regular expression, of a choice, and of any string in a schema."""
MAX_NUMBER = int(sys.float_info.max)
"""Python's integers go on behind it; libraries read them as floats."""
MAX_GRAMMAR_LINE = 16_384
MAX_GRAMMAR_RULES = 2000
MAX_GBNF = 16_384

_DATA = ("const", "enum", "default", "examples")
"""Keywords below which there is no schema."""
_RECURSION = re.compile(r"\(\?(?:R|[0-9]|&|P>)")
_RULE = re.compile(r"^[ \t]*[?!]?[\w-]+(?:\[[^\]\n]*\])?(?:\.\d+)?[ \t]*:", re.MULTILINE)
_ROOT = re.compile(r"^[ \t]*root[ \t]*::=", re.MULTILINE)


class GrammarRefused(Exception):
    """What a request asks for can never be kept; the text is one line, for the client."""

    def __init__(self, text: str) -> None:
        line = " ".join(text.split())
        super().__init__(line if len(line) <= MAX_REASON else line[: MAX_REASON - 3] + "...")


def check(wanted: StructuredOutputs) -> None:
    """Raise GrammarRefused where ``wanted`` cannot be given to a library."""
    match wanted.kind:
        case "json":
            check_schema(str(wanted.json))
        case "regex":
            check_regex(str(wanted.regex))
        case "choice":
            if max(map(len, wanted.choice or [])) > MAX_LITERAL:
                raise GrammarRefused(f"each choice must have at most {MAX_LITERAL} characters")
        case "grammar":
            check_grammar(str(wanted.grammar))


def check_regex(regex: str) -> None:
    if len(regex) > MAX_LITERAL:
        raise GrammarRefused(f"the regular expression must have at most {MAX_LITERAL} characters")
    if _RECURSION.search(regex):
        raise GrammarRefused("the regular expression calls itself, which is not supported")
    if (len(regex) - len(regex.rstrip("\\"))) % 2:
        raise GrammarRefused("the regular expression ends with a backslash that escapes nothing")


def is_gbnf(grammar: str) -> bool:
    return "::=" in grammar


def check_grammar(grammar: str) -> None:
    if max(map(len, grammar.splitlines()), default=0) > MAX_GRAMMAR_LINE:
        raise GrammarRefused(f"each line of the grammar must have at most {MAX_GRAMMAR_LINE} characters")
    if is_gbnf(grammar):
        if len(grammar) > MAX_GBNF:
            raise GrammarRefused(f"a GBNF grammar must have at most {MAX_GBNF} characters")
        if not _ROOT.search(grammar):
            raise GrammarRefused("a GBNF grammar must have a rule called root")
        rules = grammar.count("::=")
    else:
        rules = len(_RULE.findall(grammar))
    if rules > MAX_GRAMMAR_RULES:
        raise GrammarRefused(f"the grammar must have at most {MAX_GRAMMAR_RULES} rules; it has {rules}")


def check_schema(text: str) -> Any:
    """The schema in ``text``, if a library can be given it."""
    try:
        schema = msgspec.json.decode(text)
    except (msgspec.MsgspecError, ValueError) as error:
        place = re.search(r"\(byte (\d+)\)", str(error))
        where = f" (at byte {place[1]})" if place else ""
        raise GrammarRefused(f"the JSON schema is not valid JSON{where}") from None
    except RecursionError:
        raise GrammarRefused(_too_deep()) from None
    if schema is False:
        raise GrammarRefused("the JSON schema allows no text: it is false")
    if not isinstance(schema, dict | bool):
        raise GrammarRefused("the JSON schema must be an object or true")
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
            raise GrammarRefused(f"each string in the JSON schema must have at most {MAX_LITERAL} characters")
        elif isinstance(node, int) and not -MAX_NUMBER <= node <= MAX_NUMBER:
            raise GrammarRefused(f"numbers in the JSON schema must be from -{MAX_NUMBER:g} to {MAX_NUMBER:g}")
    for count, most, name in (
        (num_objects, MAX_SCHEMA_OBJECTS, "objects"),
        (num_patterns, MAX_PATTERN_PROPERTIES, "patternProperties"),
        (len(references), MAX_REFERENCES, "definitions that are referred to"),
    ):
        if count > most:
            raise GrammarRefused(f"the JSON schema must have at most {most} {name}; it has {count}")
    return schema


def _check_object(node: dict[str, Any], references: set[str]) -> int:
    """Returns how many patternProperties it has."""
    _check_keywords(node)
    properties = node.get("properties")
    if isinstance(properties, dict):
        _check_properties(properties, node.get("required"))
    reference = node.get("$ref")
    if isinstance(reference, str):
        if not reference.startswith("#"):
            raise GrammarRefused("$ref must refer to the JSON schema itself (#...): nothing is fetched")
        references.add(reference)
    patterns = node.get("patternProperties")
    return len(patterns) if isinstance(patterns, dict) else 0


def _check_keywords(node: dict[str, Any]) -> None:
    """Those whose wrong values a library takes, or whose refusal comes only where a call is demanded."""
    kinds = node.get("type", "object")
    named = kinds if isinstance(kinds, list) else [kinds]
    if not isinstance(kinds, dict) and not all(isinstance(kind, str) for kind in named):
        raise GrammarRefused("type must be a string or a list of strings")
    pattern = node.get("pattern")
    if isinstance(pattern, str):
        check_regex(pattern)
    step = node.get("multipleOf")
    if isinstance(step, int | float) and step <= 0:
        raise GrammarRefused("multipleOf must be more than 0")


def _check_properties(properties: dict[str, Any], required: Any) -> None:
    if len(properties) > MAX_PROPERTIES:
        raise GrammarRefused(f"an object of the JSON schema must have at most {MAX_PROPERTIES} properties")
    names = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    if len(properties.keys() - names) > MAX_OPTIONAL:
        raise GrammarRefused(f"an object of the JSON schema must have at most {MAX_OPTIONAL} optional properties")


def _walk(schema: Any) -> Iterator[tuple[Any, int]]:
    """(value, how deep it lies) of everything in ``schema``; of data, which refers to nothing, only the values."""
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
                left.append((value, depth + 1, is_data or key in _DATA))
        elif isinstance(node, list):
            left.extend((value, depth + 1, is_data) for value in node)


def _too_deep() -> str:
    return f"the JSON schema must be nested at most {MAX_SCHEMA_DEPTH} levels deep"
