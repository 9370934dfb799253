"""Hostile constraints: each is refused with one clear line, or works, within the longest wait of a request."""

import json
import os
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from engine_processes import engine_processes
from grammar_cases import demo_config
from tiers import thinned
from waits import wait_for

from quire.protocol.errors import InvalidRequest
from quire.protocol.request.grammar_checks import MAX_REASON, GrammarRefused
from quire.protocol.request.structured_outputs import MAX_GRAMMAR_BYTES, StructuredOutputs
from quire.scheduler_proc.structured.backend import GrammarBusy
from quire.scheduler_proc.structured.compile_pool import CompilePool
from quire.scheduler_proc.structured.guard import Guard

GENEROUS_S = 60.0
"""Time limit of a test; the product's limits are CPU time, which takes longer on a busy machine."""
GUARD = "quire.scheduler_proc.structured.guard"


def chain(length: int, link: str) -> dict[str, Any]:
    """Return definitions that each refer to the next through ``link``."""

    def refer(i: int) -> Any:
        reference = {"$ref": f"#/$defs/d{i}"}
        return {"$ref": reference, "allOf": {"allOf": [reference]}}.get(link, {link: reference})

    defs: dict[str, Any] = {f"d{i}": refer(i + 1) for i in range(length)}
    defs = {k: v["$ref"] if link == "$ref" and isinstance(v["$ref"], dict) else v for k, v in defs.items()}
    return {"$defs": defs | {f"d{length}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def nested(depth: int) -> str:
    return '{"items":' * depth + "{}" + "}" * depth


def rules(count: int) -> str:
    return "start: r0\n" + "\n".join(f'r{i}: "a" r{i + 1} | "b"' for i in range(count)) + f'\nr{count}: "z"'


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "regex calls itself": ({"regex": "(?R)"}, "recursion in the regular expression"),
    "regex open class": ({"regex": "["}, "unclosed character class"),
    "regex too long": ({"regex": "a" * 100_000}, "at most 8192 characters"),
    "regex look-ahead": ({"regex": "(?=a)b"}, "look-ahead"),
    "regex back reference": ({"regex": r"(a)\1"}, "backreferences are not supported"),
    "regex nested": ({"regex": "(" * 3000 + "x" + ")" * 3000}, "nest"),
    "regex of nothing": ({"regex": r"[^\s\S]"}, "allows no text"),
    "regex of the empty text": ({"regex": "()"}, "allows no text"),
    "regex too complex": ({"regex": "(a|b|ab)*(c|d)*" * 500}, "too complex"),
    "schema loop": ({"json": {"$ref": "#"}}, "allows no text"),
    "schema loop of two": (
        {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}},
        "allows no text",
    ),
    "schema elsewhere": ({"json": {"$ref": "https://example.com/x.json"}}, "references outside the JSON schema"),
    "schema of a file": ({"json": {"items": {"$ref": "file:///etc/passwd"}}}, "references outside the JSON schema"),
    "schema refers to nothing": ({"json": {"$ref": "#/$defs/q"}}, "'/\\$defs/q' does not exist"),
    "schema nested": ({"json": nested(65)}, "at most 64 levels"),
    "schema nested a lot": ({"json": nested(10_000)}, "at most 64 levels"),
    "schema pattern": ({"json": {"type": "string", "pattern": "["}}, "unclosed character class"),
    "schema type 7": ({"json": {"type": 7}}, "type must be a string"),
    "schema type unknown": ({"json": {"type": "foo"}}, "Invalid type: foo"),
    "schema number is a long text": ({"json": {"type": "integer", "minimum": "\U0010ffff" * 300}}, "it is not valid"),
    "schema number is too large": ({"json": f'{{"minimum": 1{"0" * 400}}}'}, "numbers in the JSON schema must be from"),
    "schema negative length": ({"json": {"type": "string", "minLength": -1}}, "minLength"),
    "schema of no length": ({"json": {"type": "string", "minLength": 5, "maxLength": 3}}, "minLength"),
    "schema is a list": ({"json": "[]"}, "must be an object"),
    "schema is false": ({"json": False}, "allows no text"),
    "schema is not JSON": ({"json": "{"}, "not valid JSON"),
    "schema not": ({"json": {"not": {"minLength": 2}}}, 'Unimplemented keys: \\["not"\\]'),
    "schema oneOf of the same": ({"json": {"oneOf": [{"minLength": 1}, {"minLength": 2}]}}, "exclude each other"),
    "schema x-guidance": ({"json": {"x-guidance": {"lenient": True}}}, "x-guidance"),
    "schema of many properties": (
        {"json": {"properties": {f"p{i}": {} for i in range(5000)}}},
        "has 5000 properties, more than 1000",
    ),
    "schema of many choices of properties": (
        {"json": {"properties": {f"p{i}": {} for i in range(900)}}},
        "900 optional properties, more than 400",
    ),
    "schema of many pattern properties": (
        {"json": {"patternProperties": {f"^a{i}": {} for i in range(200)}}},
        "at most 50",
    ),
    "schema of a long constant": ({"json": {"const": "a" * 10_000}}, "more than 8192"),
    "schema chain of items": ({"json": chain(4000, "items")}, "at most 1000 referenced definitions"),
    "schema chain of all": ({"json": chain(4000, "allOf")}, "at most 1000 referenced definitions"),
    "schema chain bare": ({"json": chain(4000, "$ref")}, "at most 1000 referenced definitions"),
    "grammar left recursion without an end": ({"grammar": 'start: start "a"'}, "allows no text"),
    "grammar undefined rule": ({"grammar": 'start: foo "a"'}, 'line 1: unknown name: "foo"'),
    "grammar without a start": ({"grammar": 'foo: "a"'}, "no start rule"),
    "grammar null loop": ({"grammar": "start: a\na: b |\nb: a"}, "allows no text"),
    "grammar unbalanced": ({"grammar": "start: (("}, "line 1: Expected token"),
    "grammar nested": ({"grammar": "start: " + "(" * 8000 + '"a"' + ")" * 8000}, "nested"),
    "grammar unknown special token": ({"grammar": "start: <|nonono|>"}, "unknown special token"),
    "grammar from elsewhere": ({"grammar": "start: @foo"}, "foo"),
    "grammar of many rules": ({"grammar": rules(20_000)}, "at most 2000 rules"),
    "grammar of a long line": (
        {"grammar": 'start: "' + "a" * 20_000 + '"'},
        "line 1 of the grammar has 20009 characters",
    ),
    "grammar with other whitespace": ({"grammar": 'start: "//" %json {"x-guidance": {}}'}, "uses x-guidance"),
    "grammar that looks like GBNF": (
        {"grammar": 'start: %json {"x-guidance": {}} | x\nx: /a\nroot ::= b/'},
        "the grammar cannot be used",
    ),
    "grammar with a nested schema": ({"grammar": f"start: /#/ %json {nested(65)}"}, "at most 64 levels"),
    "grammar with unique items": ({"grammar": 'start: %json\n{"uniqueItems": true}\n'}, "line 1: .*uniqueItems"),
    "grammar with half a schema": ({"grammar": 'start: %json {"a": '}, "behind its %json is not valid"),
    "GBNF undefined rule": ({"grammar": "root ::= foo"}, "'foo' not found"),
    "GBNF without a root": ({"grammar": 'start ::= "a"'}, "rule named root"),
    "GBNF unbalanced": ({"grammar": 'root ::= ("a"'}, "Expected '\\)'"),
    "GBNF left recursion without an end": ({"grammar": 'root ::= root "a"'}, "allows no text"),
    "GBNF too long": ({"grammar": "root ::= " + '"a"\n |' * 20_000 + '"b"'}, "at most 16384 characters"),
}

WORKING: dict[str, dict[str, Any]] = {
    "regex nested stars": {"regex": "(a+)+$"},
    "regex million": {"regex": ".{1,1000000}"},
    "regex nested counts": {"regex": "((a{1,1000}){1,1000}){1,1000}"},
    "regex exponential": {"regex": "(.*a.{30})|(.*b.{20})"},
    "schema of 40,000 values": {"json": {"enum": [f"v{i}" for i in range(40_000)]}},
    "schema chain": {"json": chain(900, "items")},
    "schema of many objects": {"json": {"anyOf": [{"properties": {f"p{i}": {"maxLength": i}}} for i in range(500)]}},
    "schema of long arrays": {"json": {"type": "array", "minItems": 10**9}},
    "schema twice each": {
        "json": {
            "$defs": {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(30)}
            | {"d30": {"type": "null"}},
            "$ref": "#/$defs/d0",
        }
    },
    "grammar chain": {"grammar": rules(1900)},
    "grammar left recursion": {"grammar": 'start: start "a" | "b"'},
    "grammar ambiguous": {"grammar": 'start: e\ne: e e | e e e | "a" | "b" | "ab"'},
    "grammar with schemas": {
        "grammar": """# %json {
        start: "%json {" /%json \\/"/ ("," %json {"not": {"type": "string"}, "format": "no"})+ "!" // %json {
        """
    },
    "grammar of many": {"grammar": 'start: a{1,1000}\na: b{1,1000}\nb: "x"'},
}


@pytest.fixture(scope="module")
def pool() -> Iterator[CompilePool]:
    """Yield a compile pool with a guard, because a library may crash or hang."""
    pool = CompilePool(lambda: Guard(demo_config()))
    outcome(pool, StructuredOutputs(regex="warm"))
    yield pool
    pool.close()


def outcome(pool: CompilePool, wanted: StructuredOutputs) -> tuple[str, float]:
    """Return (reason of the refusal or an empty string, seconds)."""
    began = time.perf_counter()
    pool.submit(("", ""), wanted, owner=0)
    while not (taken := pool.take()):
        assert select.select([pool], [], [], 60)[0], "no outcome"
    return str(taken[0][1]) if isinstance(taken[0][1], GrammarRefused) else "", time.perf_counter() - began


@pytest.mark.parametrize("case", thinned(REFUSED, keep=12))
def test_hostile_grammars_are_refused_with_one_line(case: str, pool: CompilePool) -> None:
    fields, expected = REFUSED[case]
    reason, seconds = outcome(pool, StructuredOutputs(**fields))
    assert reason and seconds < GENEROUS_S
    print(f"{seconds * 1000:.0f} ms: {reason}")
    with pytest.raises(GrammarRefused, match=expected):
        raise GrammarRefused(reason)
    assert len(reason) <= MAX_REASON and "\n" not in reason
    assert not any(word in reason for word in ("llguidance", "lexer", "<non-verbose", "json-schema:", "/work", "panic"))


@pytest.mark.parametrize("case", thinned(WORKING, keep=3))
def test_large_grammars_work(case: str, pool: CompilePool) -> None:
    reason, seconds = outcome(pool, StructuredOutputs(**WORKING[case]))
    print(f"{seconds * 1000:.0f} ms")
    assert not reason and seconds < GENEROUS_S


@pytest.mark.full
def test_endless_compilations_are_ended_and_the_next_one_works(pool: CompilePool) -> None:
    hanging = {"allOf": [{"type": "string", "pattern": f"a{i}[a-z]*"} for i in range(30)]}
    reason, seconds = outcome(pool, StructuredOutputs(json=hanging))
    assert reason == "structured_outputs took longer than 1 s to compile" and seconds < GENEROUS_S
    assert outcome(pool, StructuredOutputs(regex="next"))[0] == ""


def test_chains_through_deep_schemas_are_refused(pool: CompilePool) -> None:
    """The library crashes on it with a stack of 8 MiB."""
    deep = {f"d{i}": json.loads('{"items":' * 55 + f'{{"$ref": "#/$defs/d{i + 1}"}}' + "}" * 55) for i in range(160)}
    reason, _ = outcome(pool, StructuredOutputs(json={"$defs": deep | {"d160": {}}, "$ref": "#/$defs/d0"}))
    assert reason == "the JSON schema cannot be used: it is too complex"


@pytest.mark.full
@pytest.mark.parametrize("generation", thinned([0, 1], keep=1), ids=["helper", "child"])
def test_a_killed_guard_is_restarted(generation: int) -> None:
    guard = Guard(demo_config())
    others = set(engine_processes(GUARD))
    for _ in range(3):
        helpers: list[psutil.Process] = []
        while not helpers:  # the child of a killed helper may answer once more
            guard.check(StructuredOutputs(regex="a"), 1.0)
            helpers = [p for p in set(engine_processes(GUARD)) - others if p.ppid() == os.getpid()]
        (helper,) = helpers
        [helper, *helper.children()][generation].kill()
    guard.check(StructuredOutputs(regex="a"), 1.0)
    guard.close()
    assert not helper.is_running()


@pytest.mark.full
def test_a_stopped_guard_is_not_the_grammars_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = Guard(demo_config())
    others = set(engine_processes(GUARD))
    guard.start()
    (helper,) = (p for p in set(engine_processes(GUARD)) - others if p.ppid() == os.getpid())
    for process in (helper, *helper.children()):
        process.send_signal(signal.SIGSTOP)
        wait_for(lambda process=process: process.status() == psutil.STATUS_STOPPED)  # when it is next scheduled
    with monkeypatch.context() as hurried, pytest.raises(GrammarBusy):
        hurried.setattr("quire.scheduler_proc.structured.guard.WALL_SECONDS", 0.0)
        guard.check(StructuredOutputs(regex="a"), 1.0)
    guard.check(StructuredOutputs(regex="a"), 1.0)
    guard.close()


def test_without_a_tokenizer_every_grammar_is_refused(tmp_path: Path) -> None:
    guard = Guard(msgspec.structs.replace(demo_config(), model_path=str(tmp_path)))
    for _ in range(2):
        with pytest.raises(GrammarRefused, match="need a tokenizer, which this model does not have"):
            guard.check(StructuredOutputs(regex="a"), 1.0)


def test_more_than_half_a_mebibyte_is_refused_before_sending() -> None:
    for fields in ({"regex": "a" * 2**20}, {"json": json.dumps({"enum": list(range(100_000))})}):
        with pytest.raises(InvalidRequest, match=str(MAX_GRAMMAR_BYTES)):
            StructuredOutputs(**fields)
