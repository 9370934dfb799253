"""Objects of JSON schemas that allow no further properties."""

import json
from typing import Any

import llguidance
import pytest
from grammar_cases import demo_config

from quire.protocol.request.grammar_checks import check_schema
from quire.protocol.request.structured_outputs import StructuredOutputs
from quire.scheduler_proc.structured.backends import make_backend
from quire.scheduler_proc.structured.closed_objects import close_objects

A, B = {"properties": {"a": {}}}, {"properties": {"b": {}}}
CLOSED: dict[str, Any] = {"additionalProperties": False}


def closed(schema: Any) -> Any:
    return json.loads(close_objects(json.dumps(schema)))


def test_an_object_that_names_its_properties_is_closed() -> None:
    assert closed(A) == A | CLOSED
    assert closed({"type": "object", "properties": {}}) == {"type": "object", "properties": {}} | CLOSED
    nested = {"properties": {"x": {"type": ["object", "null"], **A}, "y": {"items": B}, "z": {"prefixItems": [A]}}}
    found = closed(nested)
    x, y, z = found["properties"].values()
    assert [each["additionalProperties"] for each in (found, x, y["items"], z["prefixItems"][0])] == [False] * 4


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"type": "object"},
        {"type": "object", "required": ["a"]},
        {**A, "additionalProperties": True},
        {**A, "additionalProperties": {"type": "string"}},
        {**A, "unevaluatedProperties": True},
        {**A, "required": ["a", "b"]},
        {**A, "minProperties": 2},
        {"enum": [A], "const": A, "default": A, "examples": [A]},
        {"allOf": [A, B]},
        {**A, "allOf": [B]},
        {**A, "anyOf": [{"required": ["a"]}, B]},
        {**A, "$ref": "#/$defs/b", "$defs": {"b": B}},
        {
            "allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
            "$defs": {"a": A, "b": {"$ref": "#/$defs/c"}, "c": B},
        },
        {"not": A},
        {"if": A, "then": B, "else": A},
        {**A, "dependentSchemas": {"a": B}},
        {"contains": A},
        {"allOf": [{"properties": {"x": A}}, {"properties": {"x": B}}]},
    ],
    ids=lambda value: json.dumps(value)[:50],
)
def test_an_object_that_has_further_parts_stays_open(schema: Any) -> None:
    assert closed(schema) == schema


def test_alternatives_and_definitions_are_closed() -> None:
    schema = {"anyOf": [A, {"$ref": "#/$defs/b"}, {"type": "null"}], "$defs": {"b": B, "c": {"allOf": [A]}}}
    assert closed(schema) == {
        "anyOf": [A | CLOSED, {"$ref": "#/$defs/b"}, {"type": "null"}],
        "$defs": {"b": B | CLOSED, "c": {"allOf": [A | CLOSED]}},
    }


def test_a_property_may_be_named_like_a_keyword() -> None:
    schema = {"properties": {"properties": {"type": "string"}, "allOf": A, "$ref": {"type": "string"}}}
    found = closed(schema)
    assert found["additionalProperties"] is False and found["properties"]["allOf"] == A | CLOSED
    assert found["properties"]["properties"] == {"type": "string"}


def test_recursive_schemas_end() -> None:
    tree = {"properties": {"next": {"$ref": "#"}, "all": {"allOf": [{"$ref": "#/$defs/t"}, A]}}}
    tree["$defs"] = {"t": {"properties": {"t": {"$ref": "#/$defs/t"}}}}
    found = closed(tree)
    assert found["additionalProperties"] is False and found["$defs"] == tree["$defs"]


def test_large_schemas_take_linear_time() -> None:
    definitions: dict[str, Any] = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}, A]} for i in range(900)}
    schema = {"$defs": definitions, "allOf": [{"$ref": "#/$defs/d0"} for _ in range(3000)], "properties": {"x": {}}}
    text = json.dumps(schema)
    check_schema(text)
    assert json.loads(close_objects(text)) == schema


@pytest.mark.parametrize("is_closed", [True, False])
def test_the_setting_decides_what_the_model_can_write(is_closed: bool) -> None:
    """Behind the last named property, a comma is allowed only in an open object."""
    backend: Any = make_backend(demo_config(closed_objects=is_closed))
    schema = {"type": "object", "properties": {"city": {"type": "integer"}}, "required": ["city"]}
    matcher = backend.compile(StructuredOutputs(json=schema)).matcher()
    tokenizer: llguidance.LLTokenizer = backend._tokenizer
    results = [matcher.accept(token) for token in tokenizer.tokenize_str('{"city":1,"more":2}')]
    assert all(results) is not is_closed
