"""The llguidance backend: Earley parsing with lexers that are built lazily, so that compiling is fast.

JSON has no whitespace except an optional blank after each comma and colon. The model cannot fill its output with
whitespace, but both usual styles (compact, and that of ``json.dumps``) remain possible.
"""

import json
import re
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import Any

import llguidance
import msgspec
import numpy as np
from llguidance.gbnf_to_lark import gbnf_to_lark
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

from quire.protocol.process.host_limits import usable_cpus
from quire.protocol.request.grammar_checks import GrammarRefused, check, is_gbnf, schemas_in_lark
from quire.protocol.request.output_form import Form, FreeText, InOrder, Json, OneOf, Repeat, Special, Text
from quire.protocol.request.plain_schema import plain_schema
from quire.protocol.request.structured_outputs import StructuredOutputs
from quire.scheduler_proc.structured.backend import Masks
from quire.scheduler_proc.structured.closed_objects import close_objects
from quire.scheduler_proc.structured.unique_items import UniqueItems, VocabularyTexts

MAX_LEXER_STATES = 20_000
"""Lexer states of one grammar over all outputs that use it: 1 to 3 KB each."""
MAX_ROW_ITEMS = 8000
"""Parser states at one place. An object with 400 optional properties takes 1,607, a choice of four of them 6,428."""
MAX_STEP_ITEMS = 80_000
MAX_STEP_FUEL = 50_000
"""Parser and lexer cost limits of one token: some ten milliseconds. A schema of 500 objects takes 10,000 items."""
MAX_THREADS = 8
PARALLEL_FROM = 2**18
"""Fewest bits that several threads fill: about a millisecond. Below it, waking them costs more than it saves."""

ANY_TEXT = "/(?s:.*)/"
_JSON_STYLE: Any = {"item_separator": ", ?", "key_separator": ": ?", "whitespace_flexible": False}
KNOWN_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "unknown")
)
_TOO_COMPLEX = re.compile(
    r"[Tt]oo many|too large|too complex|Current row has|fuel|step_max_items|Failed to generate regex"
)
_LIBRARY_INTERNAL = re.compile(r"out of range$|\bline \d+ column \d|[Rr]etriev|^panic: ")
"""Errors about the library or its reading position rather than about the client's text."""
_GBNF_UNICODE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)


class LLGuidanceMatcher:
    """The matcher of one output. The library does not treat end-of-text tokens as tokens, so they are handled here."""

    __slots__ = ("_eos", "_has_ended", "_ids", "_is_stuck", "_read", "_unique")

    def __init__(self, ids: "llguidance.LLMatcher", eos: frozenset[int], unique: UniqueItems | None) -> None:
        self._ids = ids
        self._eos = eos
        self._unique = unique
        self._read: list[int] = []
        """The tokens so far, if ``unique`` is given."""
        self._has_ended = self._is_stuck = False

    def accept(self, token: int) -> bool:
        if self._has_ended:
            return False
        if token in self._eos and self._ids.is_accepting():
            self._has_ended = True
            return True
        is_allowed = bool(self._ids.try_consume_tokens([token]) == 1)
        if is_allowed and self._unique is not None:
            self._read.append(token)
        return is_allowed

    def rollback(self, num_tokens: int) -> None:
        if num_tokens and self._has_ended:
            self._has_ended = False
            num_tokens -= 1
        if num_tokens:
            self._ids.rollback(num_tokens)
            del self._read[-num_tokens:]

    def narrow(self, mask: Masks) -> None:
        """Clear the bits of tokens that ``uniqueItems`` forbids."""
        if self._unique is not None:
            self._unique.narrow(self._ids, self._read, mask)
            self._is_stuck = not mask.any()

    @property
    def is_done(self) -> bool:
        return self._has_ended or (self._ids.is_stopped() and not self._ids.is_error())

    @property
    def error(self) -> str:
        if self._ids.is_error():
            return "the grammar is too complex to match" if _TOO_COMPLEX.search(self._ids.get_error()) else ""
        return "an array with uniqueItems can have no further item here" if self._is_stuck else ""

    @property
    def ids(self) -> "llguidance.LLMatcher":
        return self._ids


class LLGuidanceGrammar:
    """Owns the matcher at the start position and copies it for each output. Copies share the lexer's states."""

    def __init__(
        self, start: "llguidance.LLMatcher", eos: frozenset[int], make_unique: Callable[[], UniqueItems] | None
    ) -> None:
        """``make_unique``: called for the first matcher; the guard has none, and needs no texts of tokens."""
        self._start = start
        self._eos = eos
        self._make_unique = make_unique

    def matcher(self) -> LLGuidanceMatcher:
        unique = None if self._make_unique is None else self._make_unique()
        return LLGuidanceMatcher(self._start.deep_copy(), self._eos, unique)


class LLGuidanceBackend:
    """Owns the library's copy of the vocabulary, and threads that fill bitmasks."""

    def __init__(
        self, tokenizer: str, vocab_size: int, eos_token_ids: Sequence[int], *, closes_objects: bool = False
    ) -> None:
        """
        Args:
            tokenizer: the text of a ``tokenizer.json``.
            vocab_size: width of the model's logits; ids that the tokenizer does not have are never allowed.
            closes_objects: apply ``close_objects`` to JSON schemas.

        Raises:
            ValueError: the library cannot use the tokenizer.
        """
        self._tokenizer = llguidance.LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(eos_token_ids))
        self._eos = frozenset(eos_token_ids)
        self._closes_objects = closes_objects
        self._num_words = (vocab_size + 31) // 32
        self._threads: llguidance.LLExecutor | None = None
        self._limits = llguidance.LLParserLimits(
            max_lexer_states=MAX_LEXER_STATES,
            max_items_in_row=MAX_ROW_ITEMS,
            step_max_items=MAX_STEP_ITEMS,
            step_lexer_fuel=MAX_STEP_FUEL,
            verbose_errors=False,
        )

    def compile(self, wanted: StructuredOutputs) -> LLGuidanceGrammar:
        check(wanted)
        try:
            grammar = _grammar(wanted, closes_objects=self._closes_objects)
        except Exception as error:  # the library's converters raise plain Exception
            raise GrammarRefused(f"{_name(wanted)} cannot be used: {_reason(str(error), in_grammar=False)}") from None
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        self._check_start(matcher, wanted)
        schema, make_unique = str(wanted.json), None
        if '"uniqueItems"' in schema:
            written = plain_schema(schema, KNOWN_FORMATS, keeps_unique=True)
            make_unique = cache(lambda: UniqueItems(msgspec.json.decode(written), self._texts))
        return LLGuidanceGrammar(matcher, self._eos, make_unique)

    @cached_property
    def _texts(self) -> VocabularyTexts:
        """The texts of all tokens, in a helper that has a grammar with ``uniqueItems``."""
        ids = range(self._tokenizer.vocab_size)
        return VocabularyTexts([b"" if i in self._eos else self._tokenizer.decode_bytes([i]) for i in ids])

    def fill(self, matchers: Sequence[tuple[Any, int]], masks: Masks) -> None:
        rows = [(matcher.ids, index) for matcher, index in matchers]
        if len(rows) * 32 * self._num_words < PARALLEL_FROM or len(rows) == 1:
            address, num_bytes = masks.ctypes.data, masks.strides[0]
            for ids, index in rows:
                ids.unsafe_compute_mask_ptr(address + index * num_bytes, num_bytes)
        else:
            if self._threads is None:  # made at the first use, because threads do not survive the fork of a helper
                self._threads = llguidance.LLExecutor(min(MAX_THREADS, usable_cpus()))
            fill_next_token_bitmask_par(self._threads, rows, masks)
        for ids, index in rows:
            if ids.is_error():
                masks[index] = 0  # on an error the library allows the end of the text
        for matcher, index in matchers:
            matcher.narrow(masks[index])

    def _check_start(self, matcher: "llguidance.LLMatcher", wanted: StructuredOutputs) -> None:
        """Check that the grammar allows some text; this also builds the lexer states of the start position."""
        in_grammar = wanted.kind == "grammar" and not is_gbnf(wanted.grammar or "")
        if error := matcher.get_error():
            raise GrammarRefused(f"{_name(wanted)} cannot be used: {_reason(error, in_grammar=in_grammar)}")
        mask = np.zeros((1, self._num_words), np.int32)
        fill_next_token_bitmask(matcher, mask)
        error = matcher.get_error()
        if error and "NoExtension" not in error:
            raise GrammarRefused(f"{_name(wanted)} cannot be used: {_reason(error, in_grammar=in_grammar)}")
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        if error or self._eos.issuperset(allowed.tolist()):
            raise GrammarRefused(f"{_name(wanted)} allows no text that the model could write")


def _grammar(wanted: StructuredOutputs, *, closes_objects: bool) -> str:
    """Return the constraint in the library's notation."""
    matcher = llguidance.LLMatcher
    match wanted.kind:
        case "json":
            schema = "{}" if wanted.json == "true" else str(wanted.json)
            schema = plain_schema(close_objects(schema) if closes_objects else schema, KNOWN_FORMATS)
            return str(matcher.grammar_from_json_schema(schema, overrides=_JSON_STYLE))
        case "json_object":
            return str(matcher.grammar_from_json_schema('{"type": "object"}', overrides=_JSON_STYLE))
        case "regex":
            return str(matcher.grammar_from_regex(str(wanted.regex)))
        case "choice":  # a terminal: with rules, each alternative would be a parse of its own
            choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in wanted.choice or [])
            return str(matcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}"))
        case "form" if wanted.form is not None:
            return str(matcher.grammar_from_lark(_Lark(closes_objects=closes_objects).of(wanted.form)))
        case _:
            grammar = str(wanted.grammar)
            if is_gbnf(grammar):
                return str(matcher.grammar_from_lark(gbnf_to_lark(_unescape_unicode(grammar))))
            for begin, end in reversed(schemas_in_lark(grammar)):
                given = grammar[begin:end]
                written = _styled(given, closes_objects=closes_objects)
                lines = "\n" * given.count("\n")  # errors name lines of the client's text
                grammar = f"{grammar[:begin]}{{{lines}{written[1:]}{grammar[end:]}"
            return str(matcher.grammar_from_lark(grammar))


class _Lark:
    """Writer of a form as a Lark grammar."""

    def __init__(self, *, closes_objects: bool) -> None:
        self._closes_objects = closes_objects
        self._rules: dict[str, str] = {}
        """The rule of each schema and free text, by its definition."""

    def of(self, form: Form) -> str:
        start = self._write(form)
        return "\n".join([f"start: {start}", *(f"{name}{body}" for body, name in self._rules.items())])

    def _write(self, form: Form) -> str:
        match form:
            case Text(text):
                return json.dumps(text, ensure_ascii=False)
            case Special(token_id):
                return f"<[{token_id}]>"
            case Json(schema):
                return self._rule(f": %json {_styled(schema, closes_objects=self._closes_objects)}")
            case FreeText(end):
                closing = self._write(end)
                if isinstance(end, Special):
                    return f"{self._rule(f': {ANY_TEXT}')} {closing}"
                return self._rule(f"[suffix={closing}]: {ANY_TEXT}")
            case InOrder(parts):
                return " ".join(map(self._write, parts))
            case OneOf(parts):
                return f"({' | '.join(map(self._write, parts))})"
            case Repeat(part, is_once):
                return f"({self._write(part)}){'?' if is_once else '*'}"

    def _rule(self, body: str) -> str:
        return self._rules.setdefault(body, f"part_{len(self._rules)}")


def _styled(text: str, *, closes_objects: bool) -> str:
    """Return a schema for ``%json``, where nothing forbids the items that ``uniqueItems`` does."""
    text = close_objects(text) if closes_objects else text
    schema = msgspec.json.decode(plain_schema(text, KNOWN_FORMATS, keeps_unique=True))
    return msgspec.json.encode({"x-guidance": _JSON_STYLE, **({} if schema is True else schema)}).decode()


def _unescape_unicode(gbnf: str) -> str:
    """Return the grammar with ``\\u`` escapes resolved: the library's converter drops their leading zeros."""

    def unescape(found: re.Match[str]) -> str:
        digits = found[1] or found[2]
        if digits is None:
            return found[0]
        code = int(digits, 16)
        return f"\\x{code:02x}" if code < 128 else chr(code)

    return _GBNF_UNICODE.sub(unescape, gbnf)


def _name(wanted: StructuredOutputs) -> str:
    names = {
        "json": "the JSON schema",
        "regex": "the regular expression",
        "grammar": "the grammar",
        "form": "the JSON schema of response_format or of a tool",
    }
    return names.get(wanted.kind, wanted.kind)


def _reason(error: str, *, in_grammar: bool) -> str:
    """Return the library's message for the client. ``in_grammar``: positions in it refer to the client's text."""
    if _TOO_COMPLEX.search(error):
        return "it is too complex"
    if error.startswith("oneOf constraints"):
        return "oneOf is supported only where its parts exclude each other (a const in each, say)"
    if 'failed to parse "%json"' in error:
        return "the JSON behind its %json is not valid"
    if _LIBRARY_INTERNAL.search(error):
        return "it is not valid"
    marked = re.findall(r"^error: (.+)$", error, re.MULTILINE)
    if marked:
        return str(marked[-1])
    line = re.sub(r"json-schema:/*", "", error.strip().split("\n")[0].split("; following")[0])
    line = re.sub(r"(, ')?\s+\^ .*$", "", line)
    line = re.sub(r" \(at .*$", "", line).replace("Expected f64", "Expected a number")
    return re.sub(r"^(?:at )?(\d+)\(\d+\): (?:at )?", r"line \1: " if in_grammar else "", line)
