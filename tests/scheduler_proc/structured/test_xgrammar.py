"""The xgrammar adapter, over a module that behaves as the library's documentation says."""

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import fake_xgrammar
import numpy as np
import pytest

from quire.protocol.request.grammar_checks import GrammarRefused
from quire.protocol.request.output_form import FreeText, InOrder, Json, OneOf, Repeat, Special, Text
from quire.protocol.request.structured_outputs import StructuredOutputs

TOKENIZER: dict[str, Any] = {
    "model": {"vocab": {"a": 1, "b": 2, "ab": 3, "c": 33}},
    "added_tokens": [
        {"id": 0, "content": "<eos>", "special": True},
        {"id": 31, "content": "<eot>"},
        {"id": 99, "content": "beyond"},
    ],
    "decoder": {"type": "ByteLevel"},
}
MODULE = "quire.scheduler_proc.structured.xgrammar_backend"


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setitem(sys.modules, "xgrammar", fake_xgrammar.module())
    yield importlib.import_module(MODULE)
    del sys.modules[MODULE]


@pytest.fixture
def backend(adapter: Any) -> Any:
    return adapter.XGrammarBackend(TOKENIZER, 40, [0, 31])


def allowed(backend: Any, matcher: Any) -> set[int]:
    masks = np.full((2, 2), -1, np.int32)
    backend.fill([(matcher, 1)], masks)
    assert masks[0].tolist() == [-1, -1]
    return set(np.flatnonzero(np.unpackbits(masks[1:].view(np.uint8), bitorder="little")).tolist())


def test_accepts_and_rolls_back_a_whole_output(backend: Any) -> None:
    matcher = backend.compile(StructuredOutputs(regex="[ac]{2}")).matcher()
    assert allowed(backend, matcher) == {1, 33}
    assert matcher.accept(33) and not matcher.accept(2) and matcher.accept(1)
    assert allowed(backend, matcher) == {0, 31} and not matcher.is_done
    assert matcher.accept(31) and matcher.is_done and not matcher.accept(31)
    assert allowed(backend, matcher) == {0, 31}
    matcher.rollback(2)
    matcher.rollback(0)
    assert not matcher.is_done and allowed(backend, matcher) == {1, 33}


def test_matchers_of_one_grammar_are_independent(backend: Any) -> None:
    grammar = backend.compile(StructuredOutputs(regex="[a]{1}"))
    one, two = grammar.matcher(), grammar.matcher()
    assert one.accept(1)
    assert allowed(backend, one) == {0, 31} and allowed(backend, two) == {1}


def test_each_kind_calls_the_right_compiler(backend: Any) -> None:
    compiler = backend._compiler
    for fields in ({"json": {"type": "null"}}, {"json": True}, {"json_object": True}):
        backend.compile(StructuredOutputs(**fields))
    assert [schema for schema, *_ in compiler.asked] == ['{"type":"null"}', "{}", '{"type": "object"}']
    assert all(rest == [False, (", ", ": ")] for _, *rest in compiler.asked)
    compiler.asked.clear()
    backend.compile(StructuredOutputs(choice=["x", 'a"\n', "é😀"]))
    backend.compile(StructuredOutputs(grammar='root ::= "a"'))
    assert compiler.asked == [('root ::= "x" | "a\\"\\n" | "é😀"',), ('root ::= "a"',)]


def test_forms_become_structural_tags(backend: Any) -> None:
    thought = Repeat(InOrder([Text("<t>"), FreeText(Text("</t>"))]), is_once=True)
    call = InOrder([Special(33), FreeText(Special(3)), Repeat(Text("a"))])
    backend.compile(StructuredOutputs(form=InOrder([thought, OneOf([Json("true"), call])])))
    ((tag,),) = backend._compiler.asked

    def text(value: str) -> dict[str, Any]:
        return {"type": "const_string", "value": value}

    def free(end: Any) -> dict[str, Any]:
        return {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": end}

    def sequence(*elements: Any, kind: str = "sequence") -> dict[str, Any]:
        return {"type": kind, "elements": [*elements]}

    thoughts = {"type": "optional", "content": sequence(text("<t>"), free("</t>"))}
    special = {"type": "token", "token": 33}
    many = {"type": "star", "content": text("a")}
    any_text = {"type": "any_tokens", "exclude_tokens": [0]}
    calls = sequence(special, sequence(any_text, {"type": "token", "token": 3}), many)
    either = sequence({"type": "grammar", "grammar": "root ::= {}"}, calls, kind="or")
    assert tag == {"type": "structural_tag", "format": sequence(thoughts, either)}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"regex": "["}, "structured_outputs.regex cannot be used: /project/cpp/regex.cc:77: Unclosed class"),
        ({"regex": "[z]{1}"}, "structured_outputs.regex allows no text that the model could write"),
        ({"regex": "[a]{0}"}, "structured_outputs.regex allows no text that the model could write"),
        ({"grammar": 'start: "a"'}, "this server supports grammars in GBNF"),
        ({"json": {"$ref": "http://example.com"}}, "references outside the JSON schema"),
    ],
)
def test_invalid_constraints_are_refused_with_one_line(backend: Any, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(GrammarRefused) as refused:
        backend.compile(StructuredOutputs(**fields))
    assert reason.replace("/project/cpp/regex.cc:77: ", "") in str(refused.value)
    assert "project" not in str(refused.value) and "more lines" not in str(refused.value)


@pytest.mark.parametrize(
    ("decoder", "kind"),
    [
        ({"type": "ByteLevel"}, "byte_level"),
        ({"type": "Sequence", "decoders": [{"type": "Replace"}, {"type": "ByteFallback"}]}, "byte_fallback"),
        (None, "raw"),
    ],
)
def test_the_decoder_determines_the_vocabulary_type(adapter: Any, decoder: Any, kind: str) -> None:
    assert adapter._vocab_type(TOKENIZER | {"decoder": decoder}) == kind


def test_the_vocabulary_may_be_a_list(adapter: Any) -> None:
    listed = {"model": {"vocab": [["<unk>", 0.0], ["a", -1.0]]}, "added_tokens": []}
    assert adapter._token_strings(listed, 3) == ["<unk>", "a", ""]
