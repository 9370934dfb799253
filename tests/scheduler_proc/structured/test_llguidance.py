"""The llguidance backend: the text that each kind of constraint allows, and rollback of matchers."""

import json
import random

import llguidance
import numpy as np
import pytest
from grammar_cases import DEMO, EOS, VOCAB_SIZE, allowed, demo_backend, fits, tokens_of
from tiers import thinned

from quire.protocol.request.grammar_checks import MAX_OPTIONAL, GrammarRefused
from quire.protocol.request.structured_outputs import StructuredOutputs
from quire.scheduler_proc.structured import llguidance_backend
from quire.scheduler_proc.structured.llguidance_backend import LLGuidanceBackend

PAIR = {
    "type": "object",
    "properties": {"a": {"type": "string"}, "b": {"type": "array", "items": {"type": "integer"}}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
POINT = {"a": "x", "b": [1, 2]}


def test_json_is_compact_or_in_the_style_of_json_dumps() -> None:
    assert fits(json.dumps(POINT), json=PAIR)
    assert fits(json.dumps(POINT, separators=(",", ":")), json=PAIR)
    assert fits(json.dumps(POINT, ensure_ascii=False).replace("x", "é漢😀"), json=PAIR)


@pytest.mark.parametrize(
    "text",
    [
        '{ "a": "x", "b": []}',
        '{"a":  "x", "b": []}',
        '{"a": "x"}',
        '{"a": "x", "b": ["1"]}',
        json.dumps(POINT, indent=1),
    ],
)
def test_json_has_no_other_whitespace_and_matches_its_schema(text: str) -> None:
    assert not fits(text, json=PAIR)
    assert not fits(f"{text};", grammar=f"start: %json {json.dumps(PAIR)} /;/")


def test_schemas_may_be_true_or_recursive() -> None:
    assert fits('[1, {"k": null}]', json=True)
    tree = {"type": "object", "properties": {"v": {"type": "integer"}, "n": {"$ref": "#"}}, "required": ["v"]}
    assert fits('{"v": 1, "n": {"v": 2}}', json=tree)


def test_draft_7_item_arrays_constrain_each_position() -> None:
    schema = {"type": "array", "items": [{"type": "string"}, {"type": "integer"}], "minItems": 2}
    assert fits('["a", 1]', json=schema) and not fits("[1, 1]", json=schema) and not fits('["a", "b"]', json=schema)


def test_json_object_allows_any_object() -> None:
    assert fits('{"x": [1, {"y": 2.5e3}]}', json_object=True) and not fits("[1]", json_object=True)


def test_regular_expressions_match_the_whole_output() -> None:
    assert fits("ab12", regex="[a-z]+[0-9]{2}")
    assert not fits("ab1", regex="[a-z]+[0-9]{2}") and not fits("ab123", regex="[a-z]+[0-9]{2}")
    assert fits("a/b\nc", regex="a/b\\nc")


@pytest.mark.parametrize("choice", ["yes", 'no "really"', "two\nlines", "back\\slash", "é😀", " ", "a|b", "/x/i"])
def test_choices_are_literal(choice: str) -> None:
    assert fits(choice, choice=["other", choice])
    assert not fits(choice + "x", choice=["other", choice])


def test_ten_thousand_choices_work() -> None:
    choices = [f"choice number {i}" for i in range(10_000)]
    assert fits("choice number 9999", choice=choices) and not fits("choice number 10000", choice=choices)


def test_grammars_are_lark_or_gbnf() -> None:
    lark = 'start: e\ne: e "+" N | N\nN: /[0-9]+/'
    gbnf = 'root ::= n ("+" n)*\nn ::= [0-9]+'
    for grammar in (lark, gbnf):
        assert fits("1+22+3", grammar=grammar) and not fits("1++2", grammar=grammar)
    assert fits("é=A", grammar='root ::= "\\u00e9" "=" "\\u0041"')


def test_all_end_of_text_tokens_are_allowed_where_the_grammar_may_end() -> None:
    backend = demo_backend()
    matcher = backend.compile(StructuredOutputs(regex="ab?")).matcher()
    assert not allowed(backend, matcher) & set(EOS) and not matcher.is_done
    assert matcher.accept(tokens_of("a")[0])
    assert allowed(backend, matcher) == {*EOS, *tokens_of("b")} and not matcher.is_done
    assert matcher.accept(tokens_of("b")[0])
    assert allowed(backend, matcher) == set(EOS) and matcher.is_done


@pytest.mark.parametrize("eos", EOS)
def test_rollback_covers_tokens_and_the_end_of_text(eos: int) -> None:
    backend = demo_backend()
    matcher = backend.compile(StructuredOutputs(regex="[ab]{3}")).matcher()
    a, b = tokens_of("a")[0], tokens_of("b")[0]
    start = allowed(backend, matcher)
    for token in (a, b, a, eos):
        assert matcher.accept(token)
    assert matcher.is_done and not matcher.accept(eos) and not matcher.accept(a)
    assert allowed(backend, matcher) == set(EOS)
    matcher.rollback(2)
    assert not matcher.is_done and not matcher.accept(eos) and matcher.accept(b)
    matcher.rollback(3)
    matcher.rollback(0)
    assert allowed(backend, matcher) == start


def test_a_refused_token_changes_nothing() -> None:
    backend = demo_backend()
    matcher = backend.compile(StructuredOutputs(regex="a[0-9]")).matcher()
    assert matcher.accept(tokens_of("a")[0])
    before = allowed(backend, matcher)
    assert not matcher.accept(tokens_of("a")[0]) and not matcher.accept(1) and not matcher.accept(EOS[0])
    assert allowed(backend, matcher) == before


def test_parallel_filling_equals_serial_filling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llguidance_backend, "PARALLEL_FROM", 1)
    monkeypatch.setattr(llguidance_backend, "usable_cpus", lambda: 3)
    made = llguidance.LLExecutor
    num_threads: list[int] = []
    monkeypatch.setattr(llguidance, "LLExecutor", lambda number: (num_threads.append(number), made(number))[1])
    demo_backend.cache_clear()
    backend = demo_backend()
    grammars = [backend.compile(StructuredOutputs(regex=f"[a-{c}]x{{1,3}}")) for c in "cdefgh"]
    matchers = [grammar.matcher() for grammar in grammars]
    masks = np.zeros((7, VOCAB_SIZE // 32), np.int32)
    backend.fill([(matcher, 6 - row) for row, matcher in enumerate(matchers)], masks)
    assert not masks[0].any() and num_threads == [3]
    for row, matcher in enumerate(matchers):
        own = np.unpackbits(masks[6 - row].view(np.uint8), bitorder="little")
        assert set(np.flatnonzero(own).tolist()) == allowed(backend, matcher)


def small_vocabulary(*tokens: str) -> LLGuidanceBackend:
    """Return a byte-level vocabulary of a few tokens; id 0 ends the text."""
    added = {"id": 0, "content": "<eos>", "special": True, "normalized": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False}
    model = {"type": "BPE", "vocab": {"<eos>": 0} | {token: i + 1 for i, token in enumerate(tokens)}, "merges": []}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    whole = {"version": "1.0", "added_tokens": [added | flags], "model": model}
    rest = {"normalizer": None, "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level}
    return LLGuidanceBackend(json.dumps(whole | rest), 40, [0])


def test_text_that_the_vocabulary_cannot_express_is_refused_or_a_dead_end() -> None:
    backend = small_vocabulary("a", "b")
    with pytest.raises(GrammarRefused, match="the regular expression allows no text that the model could write"):
        backend.compile(StructuredOutputs(regex="c+"))
    matcher = backend.compile(StructuredOutputs(regex="ac")).matcher()
    masks = np.zeros((1, 2), np.int32)
    assert matcher.accept(1)
    masks[:] = -1
    backend.fill([(matcher, 0)], masks)
    assert not masks.any()


def test_ids_beyond_the_tokenizer_are_never_allowed() -> None:
    backend = small_vocabulary("a", "b")
    masks = np.full((1, 2), -1, np.int32)
    backend.fill([(backend.compile(StructuredOutputs(regex="[ab]+")).matcher(), 0)], masks)
    assert masks.tolist() == [[0b110, 0]]


def test_a_tokenizer_larger_than_the_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError):
        LLGuidanceBackend((DEMO / "tokenizer.json").read_text(), VOCAB_SIZE // 2, EOS)


OPTIONAL = {
    "type": "object",
    "properties": {f"name{i}": {"type": "string", "maxLength": 5} for i in range(MAX_OPTIONAL)},
}
OTHERS = [json.loads(json.dumps(OPTIONAL).replace("name", f"other{i}name")) for i in range(3)]


@pytest.mark.parametrize(
    "schema", thinned([OPTIONAL, {"items": OPTIONAL, "type": "array"}, {"anyOf": [OPTIONAL, *OTHERS]}], keep=1)
)
def test_objects_of_many_optional_properties_can_be_written(schema: dict[str, object]) -> None:
    """Many optional properties were accepted once, and then the first token that begins an object was refused."""
    draw = random.Random(1)
    backend = demo_backend()
    matcher = backend.compile(StructuredOutputs(json=schema)).matcher()
    for _ in range(60):
        tokens = allowed(backend, matcher)
        assert tokens and not matcher.error
        if tokens <= set(EOS):
            return
        assert matcher.accept(draw.choice(sorted(tokens - set(EOS))))


def test_a_limit_of_the_library_is_named() -> None:
    many = {"anyOf": [json.loads(json.dumps(OPTIONAL).replace("name", f"n{i}x")) for i in range(8)]}
    matcher = demo_backend().compile(StructuredOutputs(json=many)).matcher()
    assert not matcher.error and not matcher.accept(tokens_of("{")[0])
    assert matcher.error == "the grammar is too complex to match"
