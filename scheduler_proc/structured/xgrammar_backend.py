"""The xgrammar backend, an extra: pushdown automata. Most of a mask is computed while compiling, which takes longer."""

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import xgrammar

from quire.protocol.request.grammar_checks import GrammarRefused, check, is_gbnf
from quire.protocol.request.output_form import Form, FreeText, InOrder, Json, OneOf, Repeat, Special, Text
from quire.protocol.request.structured_outputs import StructuredOutputs
from quire.scheduler_proc.structured.backend import Masks
from quire.scheduler_proc.structured.closed_objects import close_objects

CACHE_BYTES = 64 * 2**20
MAX_ROLLBACK = 256
"""Most tokens that can be rolled back: the drafts of one step."""
JSON_STYLE: dict[str, Any] = {"any_whitespace": False, "separators": (", ", ": "), "strict_mode": False}
"""The library's own strict mode would also close the parts of a combined object."""


class XGrammarMatcher:
    """The matcher of one output; ``inner`` is the library's."""

    __slots__ = ("inner",)

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def accept(self, token: int) -> bool:
        return not self.inner.is_terminated() and bool(self.inner.accept_token(token))

    def rollback(self, num_tokens: int) -> None:
        if num_tokens:
            self.inner.rollback(num_tokens)

    @property
    def is_done(self) -> bool:
        """Whether the end of the text was accepted; the library does not report it earlier."""
        return bool(self.inner.is_terminated())

    @property
    def error(self) -> str:
        return ""


class XGrammarGrammar:
    def __init__(self, compiled: Any, eos: list[int]) -> None:
        self._compiled = compiled
        self._eos = eos

    def matcher(self) -> XGrammarMatcher:
        return XGrammarMatcher(
            xgrammar.GrammarMatcher(self._compiled, override_stop_tokens=self._eos, max_rollback_tokens=MAX_ROLLBACK)
        )


class XGrammarBackend:
    """Owns the compiler, and a tensor for the library to fill, because it does not accept numpy arrays."""

    def __init__(
        self, tokenizer: dict[str, Any], vocab_size: int, eos_token_ids: Sequence[int], *, closes_objects: bool = False
    ) -> None:
        """
        Args:
            tokenizer: a ``tokenizer.json``.
            vocab_size: width of the model's logits.
            closes_objects: apply ``close_objects`` to JSON schemas.
        """
        self._closes_objects = closes_objects
        self._eos = list(eos_token_ids)
        self._special = [
            token["id"]
            for token in tokenizer.get("added_tokens", [])
            if token.get("special") and token["id"] < vocab_size
        ]
        self._vocab_size = vocab_size
        self._end_mask = _mask_of(self._eos, vocab_size)
        info = xgrammar.TokenizerInfo(
            _token_strings(tokenizer, vocab_size),
            _vocab_type(tokenizer),
            vocab_size=vocab_size,
            stop_token_ids=self._eos,
        )
        self._compiler = xgrammar.GrammarCompiler(
            info, max_threads=2, cache_enabled=True, cache_limit_bytes=CACHE_BYTES
        )
        self._filled = xgrammar.allocate_token_bitmask(1, vocab_size)

    def compile(self, wanted: StructuredOutputs) -> XGrammarGrammar:
        check(wanted)
        try:
            grammar = XGrammarGrammar(self._compile(wanted), self._eos)
            start = xgrammar.allocate_token_bitmask(1, self._vocab_size)
            grammar.matcher().inner.fill_next_token_bitmask(start, 0)
        except GrammarRefused:
            raise
        except Exception as error:  # the library raises plain Exception; its time stamp and source file are removed
            line = re.sub(r"^\[[^\]]*\] |\S+\.\w+:\d+: ", "", (str(error).strip() or "invalid").splitlines()[0])
            raise GrammarRefused(f"structured_outputs.{wanted.kind} cannot be used: {line}") from None
        if not (start.numpy()[0] & ~self._end_mask).any():
            raise GrammarRefused(f"structured_outputs.{wanted.kind} allows no text that the model could write")
        return grammar

    def fill(self, matchers: Sequence[tuple[Any, int]], masks: Masks) -> None:
        for matcher, index in matchers:
            if matcher.is_done:  # the library raises an error here
                masks[index] = self._end_mask
                continue
            matcher.inner.fill_next_token_bitmask(self._filled, 0)
            masks[index] = self._filled.numpy()[0]

    def _compile(self, wanted: StructuredOutputs) -> Any:
        compiler = self._compiler
        match wanted.kind:
            case "json" | "json_object":
                schema = '{"type": "object"}' if wanted.json_object else str(wanted.json)
                schema = close_objects(schema) if self._closes_objects else schema
                return compiler.compile_json_schema("{}" if schema == "true" else schema, **JSON_STYLE)
            case "form" if wanted.form is not None:
                tag = {"type": "structural_tag", "format": self._format(wanted.form)}
                return compiler.compile_structural_tag(tag)
            case "regex":
                return compiler.compile_regex(str(wanted.regex))
            case "choice":
                choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in wanted.choice or [])
                return compiler.compile_grammar(f"root ::= {choices}")
            case _:
                if not is_gbnf(str(wanted.grammar)):
                    raise GrammarRefused("this server supports grammars in GBNF (root ::= ...) only")
                return compiler.compile_grammar(str(wanted.grammar))

    def _format(self, form: Form) -> dict[str, Any]:
        """Return a form in the library's notation for structural tags."""
        match form:
            case Text(text):
                return {"type": "const_string", "value": text}
            case Special(token_id):
                return {"type": "token", "token": token_id}
            case Json(schema):
                schema = close_objects(schema) if self._closes_objects else schema
                grammar = xgrammar.Grammar.from_json_schema("{}" if schema == "true" else schema, **JSON_STYLE)
                return {"type": "grammar", "grammar": str(grammar)}
            case FreeText(Text(end)):
                return {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": end}
            case FreeText(end):  # for the library's texts, a special token is the text that stands for it
                any_text = {"type": "any_tokens", "exclude_tokens": self._special}
                return {"type": "sequence", "elements": [any_text, self._format(end)]}
            case InOrder(parts):
                return {"type": "sequence", "elements": [self._format(part) for part in parts]}
            case OneOf(parts):
                return {"type": "or", "elements": [self._format(part) for part in parts]}
            case Repeat(part, is_once):
                return {"type": "optional" if is_once else "star", "content": self._format(part)}


def _mask_of(tokens: Sequence[int], vocab_size: int) -> Masks:
    """Return int32 ``[ceil(vocab_size / 32)]`` with the bits of ``tokens`` set."""
    words = np.zeros((vocab_size + 31) // 32, np.uint32)
    for token in tokens:
        words[token // 32] |= np.uint32(1 << token % 32)
    return words.view(np.int32)


def _token_strings(tokenizer: dict[str, Any], vocab_size: int) -> list[str]:
    """Return the token of each id as written in the tokenizer's vocabulary; empty for ids without one."""
    vocabulary = tokenizer["model"]["vocab"]
    strings = [""] * vocab_size
    named = vocabulary.items() if isinstance(vocabulary, dict) else ((e[0], i) for i, e in enumerate(vocabulary))
    added = ((token["content"], token["id"]) for token in tokenizer.get("added_tokens", []))
    for string, token_id in (*named, *added):
        if token_id < vocab_size:
            strings[token_id] = string
    return strings


def _vocab_type(tokenizer: dict[str, Any]) -> Any:
    """Return how the vocabulary encodes non-text bytes, by the decoder that reverses it."""
    decoder = tokenizer.get("decoder") or {}
    kinds = {step["type"] for step in decoder.get("decoders", [decoder]) if "type" in step}
    if "ByteLevel" in kinds:
        return xgrammar.VocabType.BYTE_LEVEL
    return xgrammar.VocabType.BYTE_FALLBACK if "ByteFallback" in kinds else xgrammar.VocabType.RAW
