"""Malicious constraints: refused with a reason, or enforced, without delaying the grammars of others."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from abuse import COMPLETIONS, AbusedServer, assert_refused, check_error, short
from abused_app import AbusedApp

CODE = "invalid_structured_outputs"
OUTPUTS = "structured_outputs"


def nested(depth: int, inner: Any = True) -> Any:
    schema: Any = inner
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def rules(count: int) -> str:
    return "start: r0\n" + "\n".join(f'r{i}: "a" r{i + 1} | "b"' for i in range(count)) + f'\nr{count}: "z"'


REGEXES = [
    *("(?R)", "(?1)", "(?&x)", "(?P>x)", "[", "(", ")", "*", "+a", "?", "a{2", "a{3,1}", "[z-a]", "\\", "a\\"),
    *("(?=a)b", "(?!a)b", "(?<=a)b", "(?<!a)b", r"(a)\1", r"\k<x>", "(?P=x)", "(?>a+)b", "(?(1)a|b)", "(?#"),
    *(r"\p{Nonsense}", r"\x{110000}", r"\u{d800}", "(?z)a", "(?<>a)", "(?P<1>a)", r"\8"),
    *(r"[^\s\S]", "()", "^$", "a^b", "a$b", r"\bb\b", r"a\Bb"),
    *("(" * 3000 + "x" + ")" * 3000, "a" * 100_000, "(a|b|ab)*(c|d)*" * 500, "[" * 5000),
    *("x" * (2**20), "(?i)" * 2000 + "[", "(((a{1,1000}){1,1000}){1,1000}){1,1000}[", "\x00(", "\u2028["),
]
WORKING_REGEXES = [
    *("(a+)+$", "(a|a)*b", "(a|aa)+", "(.*)*", "(.*a){20}", ".{1,1000000}", "((a{1,100}){1,100}){1,100}"),
    *("(x+x+)+y", "([a-z]+)*1", "(.*){1,200}", r"[\s\S]*", "a{0,65535}", "(a?){100}a{100}", "(a{0,50}){50}"),
    *(r"\d{1,500}(\.\d{1,500})*", "[^a]*" * 50, "(.|.|.)*", "(ab|a|b)*c", "(a*)*b{3}", r"(\w+\s?)*!", "(0|1(0|1)*)*"),
    "a++",
    *(r"[[:nonsense:]]", "a|" * 4000 + "b"),
]
SCHEMAS: list[Any] = [
    {"$ref": "#"},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    {"$ref": "https://example.com/x.json"},
    {"$ref": "http://169.254.169.254/latest"},
    {"items": {"$ref": "file:///etc/passwd"}},
    {"$ref": "//host/x"},
    {"$ref": "other.json#/a"},
    {"$ref": "#/$defs/q"},
    {"$ref": "#nonsense"},
    {"$ref": ""},
    {"$ref": 7},
    {"$dynamicRef": "#x"},
    {"$id": "x", "$recursiveRef": "#", "$ref": "x"},
    nested(65),
    nested(180),
    {"type": "string", "pattern": "["},
    {"type": "string", "pattern": "(?=a)b"},
    {"type": "string", "pattern": "a" * 9000},
    {"type": "string", "pattern": 7},
    {"patternProperties": {"[": {}}},
    {"patternProperties": {f"^a{i}": {} for i in range(200)}},
    {"type": 7},
    {"type": "foo"},
    {"type": ["string", "foo"]},
    {"type": []},
    {"type": None},
    {"minLength": -1},
    {"type": "string", "minLength": 5, "maxLength": 3},
    {"type": "string", "maxLength": 1.5},
    {"type": "string", "maxLength": "x"},
    {"type": "array", "minItems": -1},
    {"type": "array", "minItems": 5, "maxItems": 3},
    {"type": "object", "properties": 7},
    {"type": "object", "properties": {"a": 7}},
    {"type": "object", "required": "a"},
    {"type": "object", "required": ["a"], "additionalProperties": False},
    {"type": "integer", "minimum": 5, "maximum": 3},
    {"type": "integer", "minimum": "x"},
    {"type": "integer", "minimum": 1.2, "maximum": 1.8},
    {"type": "number", "multipleOf": 0},
    {"type": "number", "multipleOf": -2},
    {"enum": []},
    {"enum": 7},
    {"enum": ["x" * 10_000]},
    {"const": "a" * 10_000},
    {"anyOf": []},
    {"anyOf": 7},
    {"allOf": [{"type": "string"}, {"type": "integer"}]},
    {"allOf": [{"const": 1}, {"const": 2}]},
    {"oneOf": [{"minLength": 1}, {"minLength": 2}]},
    {"not": {"minLength": 2}},
    {"if": {"minLength": 2}, "then": {"minLength": 3}},
    {"type": "array", "uniqueItems": "x"},
    {"type": "array", "contains": {"type": "string"}},
    {"type": "object", "propertyNames": {"pattern": "["}},
    {"type": "object", "dependentRequired": ["a"]},
    {"type": "array", "items": [{"type": "string"}, {"type": "foo"}]},
    {"x-guidance": {"lenient": True}},
    {"properties": {f"p{i}": {} for i in range(5000)}},
    {"properties": {f"p{i}": {} for i in range(900)}},
    {"type": "object", "properties": {"a": False}, "required": ["a"]},
    *({"type": "integer", name: value} for name in ("minimum", "const", "default") for value in (10**400, -(10**309))),
    *({"enum": [1, {"a": [10**400]}]}, {"properties": {"a": {"type": "string", "minLength": 10**1000}}}),
    False,
]
NOT_SCHEMAS = ["{", "[]", "7", '"x"', "null", "nul", "{'a': 1}", "{}{}", "[" * 20_000, "\x00", "NaN", '{"a": 1e999}']
GRAMMARS = [
    *('start: start "a"', 'start: foo "a"', 'foo: "a"', "start: a\na: b |\nb: a", "start: ((", "start: <|nonono|>"),
    *("start: @foo", rules(20_000), 'start: "' + "a" * 20_000 + '"', "start: " + "(" * 8000 + '"a"' + ")" * 8000),
    *("root ::= foo", 'start ::= "a"', 'root ::= ("a"', 'root ::= root "a"', "root ::= " + '"a"\n |' * 20_000 + '"b"'),
    *('start: "a', "start: /[/", "start: /(?=a)b/", "start:", ":", "start", "start: a\na: a", "%import common.WORD"),
    *('start: "a"{1,', 'start: "a"{3,1}', "start: A\nA: B\nB: A", "start: [", "%ignore /[/\nstart: /a/", "\x00"),
    *("%json {", 'start: %json {"type": 7}', 'start: %json {"$ref": "http://x"}', "start: %lark {", "%regex x", "{}"),
    *('root ::= "\\', "root ::= [", "root ::= [z-a]", "root ::= a\na ::= b\nb ::= a", 'root ::= "a"{2,1}', "::="),
    *('start: x{1,1000}\nx: y{1,1000}\ny: z{1,1000}\nz: "', 'start[capture: "a"', "start: $x", "start: ~", "?: a"),
]
WORKING_GRAMMARS = [
    *(
        'start: start "a" | "b"',
        'start: e\ne: e e | e e e | "a" | "b" | "ab"',
        'start: a{1,1000}\na: b{1,1000}\nb: "x"',
    ),
    *('start: s\ns: s s | "a" | "aa" | ""', "start: s+\ns: t+ | t\nt: /[a-z ]/ | /[a-z]{2}/ | /.{1,3}/", rules(500)),
    *('root ::= "a" root | "b"', 'root ::= [a-z]* " " root | [a-z]', 'root ::= ("a" | "b")* "c"'),
]


def test_invalid_regexes(app: AbusedApp) -> None:
    for regex in REGEXES:
        assert_refused(app.complete(structured_outputs={"regex": regex}), 400, OUTPUTS)


def test_invalid_schemas(app: AbusedApp) -> None:
    for schema in SCHEMAS:
        error = assert_refused(app.complete(structured_outputs={"json": schema}), 400, OUTPUTS)
        assert error["code"] == CODE


def test_invalid_schema_texts(app: AbusedApp) -> None:
    for text in NOT_SCHEMAS:
        assert_refused(app.complete(structured_outputs={"json": text}), 400, OUTPUTS)


def test_invalid_grammars(app: AbusedApp) -> None:
    for grammar in GRAMMARS:
        assert_refused(app.complete(structured_outputs={"grammar": grammar}), 400, OUTPUTS)
    assert_refused(app.complete(structured_outputs={"choice": ["x" * 9000]}), 400, OUTPUTS)


# ---- on a running server, which also matches compiled grammars


@pytest.mark.full
@pytest.mark.parametrize("outputs", [{"regex": "["}, {"json": {"$ref": "#"}}, {"grammar": "::="}], ids=short)
def test_a_refusal_of_the_scheduler_reaches_the_client(outputs: Any, server: AbusedServer) -> None:
    error = assert_refused(server.complete(structured_outputs=outputs), 400, OUTPUTS)
    assert error["code"] == CODE


@pytest.mark.full
@pytest.mark.parametrize("regex", WORKING_REGEXES, ids=short)
def test_odd_but_valid_regexes(regex: str, server: AbusedServer) -> None:
    answered(server.complete(structured_outputs={"regex": regex}))


@pytest.mark.full
@pytest.mark.parametrize("grammar", WORKING_GRAMMARS, ids=short)
def test_odd_but_valid_grammars(grammar: str, server: AbusedServer) -> None:
    answered(server.complete(structured_outputs={"grammar": grammar}))


# ---- grammars that end


ENDS = [
    *("a", "yes", "\n", "é", "漢", "\x01", "\u200d", "a b", '"', "\\", "0", "  ", "\t", "😀", "a\u0301", "~", "''"),
    *("#", "x" * 30, "ab" * 10),
]


@pytest.mark.full
@pytest.mark.parametrize("text", ENDS, ids=ascii)
def test_complete_output_stops(text: str, server: AbusedServer) -> None:
    """The grammar allows nothing more, so the output ends, regardless of the model's logits."""
    body = {"structured_outputs": {"choice": [text]}, "max_tokens": 100, "ignore_eos": False}
    choice = answered(server.complete(**body))["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (text, "stop")


IMPOSSIBLE: list[dict[str, Any]] = [
    *({"regex": regex} for regex in (r"[^\s\S]", r"[^\s\S]{3}", r"a[^\s\S]", r"(a[^\s\S])+", r"[^\s\S]|[^\d\D]")),
    *({"json": schema} for schema in ({"$ref": "#"}, False, {"enum": []}, {"items": False, "minItems": 1})),
    *({"json": {"type": "integer", "minimum": a, "maximum": a - 1}} for a in (0, 5, -7, 10**6)),
    *({"json": {"type": kind, "enum": [[]]}} for kind in ("string", "integer", "boolean", "null")),
    *({"json": {"allOf": [{"const": 1}, {"const": value}]}} for value in (2, "1", None, [1])),
    *({"grammar": f"start: {rule}"} for rule in ("start", 'start "a"', '"a" start', "x\nx: x", "x\nx: y\ny: x")),
]


@pytest.mark.full
@pytest.mark.parametrize("outputs", IMPOSSIBLE, ids=short)
def test_unsatisfiable_constraints_are_reported(outputs: Any, server: AbusedServer) -> None:
    response = server.complete(structured_outputs=outputs, max_tokens=20, temperature=1.0, seed=3)
    if response.status_code == 200:  # an empty array is still valid, for example
        assert response.json()["choices"][0]["finish_reason"] in ("stop", "length")
        return
    assert response.status_code in (400, 422), response.text
    check_error(response)


@pytest.mark.full
@pytest.mark.parametrize(
    "stuck",
    [{"regex": "abc[\x80-\xff]"}, {"choice": ["zzz"]}, {"json": {"const": "x"}}, {"json_object": True}],
    ids=short,
)
def test_unsatisfiable_combination_fails_alone(stuck: Any, server: AbusedServer) -> None:
    """No token is allowed by both the grammar and allowed_token_ids."""
    for ids in ([5], [7, 9], [300], [1000], [20, 21, 22, 23]):
        response = server.complete(structured_outputs=stuck, allowed_token_ids=ids)
        assert response.status_code in (200, 400, 422), response.text
        assert response.status_code == 200 or check_error(response)


# ---- many of them

NUM_DISTINCT = 60


@pytest.mark.full
def test_distinct_schemas_do_not_accumulate(server: AbusedServer) -> None:
    """Size and eviction of the grammar cache are tested in test_manager.py."""
    with ThreadPoolExecutor(8) as pool:
        bodies = [{"structured_outputs": {"regex": f"[ab]{{{i + 1}}}"}, "max_tokens": 1} for i in range(NUM_DISTINCT)]
        statuses = list(pool.map(lambda body: _status(server, body), bodies))
    assert statuses == [200] * NUM_DISTINCT


@pytest.mark.slow
def test_hard_schemas_time_out_without_delaying_others(server: AbusedServer) -> None:
    hard = [{"allOf": [{"type": "string", "pattern": f"{j}{i}[a-z]*"} for i in range(30)]} for j in range(8)]
    with ThreadPoolExecutor(8) as pool:
        hostile = [pool.submit(_status, server, {"structured_outputs": {"json": schema}}) for schema in hard]
        easy = [_status(server, {"structured_outputs": {"regex": f"easy{i}"}, "max_tokens": 2}) for i in range(10)]
        still_hostile = sum(not future.done() for future in hostile)
        assert easy == [200] * 10 and still_hostile, "easy grammars were served while hard ones compiled"
        assert {future.result() for future in hostile} <= {400, 503}


def _status(server: AbusedServer, fields: dict[str, Any]) -> int:
    body = {"prompt": [5, 6, 7], "max_tokens": 4, **fields}
    return server.client.post(COMPLETIONS, content=json.dumps(body)).status_code


def answered(response: Any) -> Any:
    assert response.status_code == 200, response.text
    return response.json()
