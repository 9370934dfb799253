"""Arrays with ``uniqueItems``, and keywords that only annotate: random outputs of the demo's vocabulary."""

import json
import random
from typing import Any

import pytest
from grammar_cases import EOS, allowed, demo_backend, fits, text_of, tokens_of

from quire.protocol.request.grammar_checks import GrammarRefused
from quire.protocol.request.structured_outputs import StructuredOutputs

COLOURS = ["red", "green", "blue", "grey"]


def unique(items: Any, **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, "uniqueItems": True, **more}


SCHEMAS: list[dict[str, Any]] = [
    unique({"enum": COLOURS}),
    unique({"enum": COLOURS}, minItems=4),
    unique({"type": "boolean"}),
    unique({"enum": [1, 12, 123, 2, 2.5]}, minItems=3),
    unique({"type": "integer", "minimum": 0, "maximum": 3}, minItems=4),
    unique({"type": "string"}),
    unique(unique({"enum": ["a", "b"]}), minItems=2),
    unique({"type": "object", "properties": {"a": {"enum": [1, 2]}}, "additionalProperties": False}, minItems=3),
    {"$ref": "#/$defs/s", "$defs": {"s": {"anyOf": [unique({"enum": COLOURS[:2]}, minItems=2)]}}},
    {
        "type": "object",
        "properties": {
            "a, [b": unique({"enum": COLOURS}, minItems=2),
            "free": {"type": "array", "items": {"const": 1}},
        },
        "required": ["a, [b", "free"],
    },
]


def is_unique(value: Any) -> bool:
    parts = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    if not all(map(is_unique, parts)):
        return False
    return not isinstance(value, list) or all(a != b for i, a in enumerate(value) for b in value[:i])


def walk(schema: dict[str, Any], seed: int) -> str:
    """Return a random output; drafts are read and rolled back on the way."""
    rng, backend = random.Random(seed), demo_backend()
    matcher = backend.compile(StructuredOutputs(json=schema)).matcher()
    tokens: list[int] = []
    while True:
        following = sorted(allowed(backend, matcher))
        assert following, f"{text_of(tokens)}: {matcher.error}"
        ends = [token for token in following if token in EOS or text_of([token])[:1] in ("]", '"')]
        token = rng.choice(ends if ends and rng.random() < 0.3 else following)
        if token not in EOS and rng.random() < 0.3:
            assert matcher.accept(token)
            allowed(backend, matcher)
            matcher.rollback(1)
            assert sorted(allowed(backend, matcher)) == following
        assert matcher.accept(token)
        if token in EOS:
            return text_of(tokens)
        tokens.append(token)


@pytest.mark.parametrize("schema", SCHEMAS)
def test_no_output_has_an_item_twice_and_none_is_stuck(schema: dict[str, Any]) -> None:
    for seed in range(4):
        value = json.loads(walk(schema, seed))
        assert is_unique(value["a, [b"] if isinstance(value, dict) else value), value


def test_other_arrays_may_have_an_item_twice() -> None:
    free = {"type": "array", "items": {"type": "integer"}}
    schema = {"type": "object", "properties": {"a": unique({}), "b": free}, "required": ["a", "b"]}
    assert fits('{"a": ["]", 1], "b": [1, 1]}', json=schema)
    assert not fits('{"a": [1, 1], "b": []}', json=schema)
    assert not fits('{"a": [1.0, 1], "b": []}', json=schema)
    assert fits('{"a": [[1, 1], {"a": 1}], "b": []}', json=schema)
    assert not fits('{"a": [{"x":1, "y": 2}, {"y":2.0,"x": 1}], "b": []}', json=schema)
    placed = {"type": "array", "prefixItems": [unique({"const": 1})], "items": unique({"enum": [1, 2]})}
    assert fits("[[1], [1, 2], [2, 1]]", json=placed) and not fits("[[1], [2, 2]]", json=placed)


def test_an_array_without_a_way_out_says_why() -> None:
    backend = demo_backend()
    matcher = backend.compile(StructuredOutputs(json=unique({"const": "x"}, minItems=2))).matcher()
    for token in tokens_of('["x"'):
        assert matcher.accept(token)
    assert allowed(backend, matcher) == set() and "uniqueItems" in matcher.error


@pytest.mark.parametrize(
    "keys",
    [
        {"$schema": "https://json-schema.org/draft-07/schema"},
        {"$schema": "anything"},
        {"format": "password"},
        {"format": "x-my-own"},
        {"$id": "http://x/y#", "$ref": "#/$defs/s", "$defs": {"s": {"format": "path", "$schema": "x"}}},
        {"type": "string", "uniqueItems": False},
    ],
)
def test_keywords_that_allow_every_value_are_accepted(keys: dict[str, Any]) -> None:
    assert fits('"x"', json=keys)


def test_properties_with_the_names_of_keywords_stay() -> None:
    names = {"$schema": {"const": "a"}, "format": {"const": "b"}, "enum": {"type": "string", "format": "own"}}
    schema = {"type": "object", "properties": names, "required": list(names)}
    assert fits('{"$schema": "a", "format": "b", "enum": "c"}', json=schema)
    with pytest.raises(GrammarRefused, match="propertyNames"):
        demo_backend().compile(StructuredOutputs(json={"type": "object", "propertyNames": {"format": "own"}}))
