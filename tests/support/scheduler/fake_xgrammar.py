"""A module that behaves as xgrammar's documentation describes, for regular languages of single letters: ``[ab]{2}``."""

import re
import types
from typing import Any

import numpy as np


class _Tensor:
    """The part of torch's tensors that is used."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def numpy(self) -> Any:
        return self._array


class TokenizerInfo:
    def __init__(
        self, encoded_vocab: list[str], vocab_type: str, *, vocab_size: int, stop_token_ids: list[int]
    ) -> None:
        assert len(encoded_vocab) == vocab_size
        self.vocab, self.kind, self.stops = encoded_vocab, vocab_type, stop_token_ids


class Compiled:
    def __init__(self, info: TokenizerInfo, letters: str, length: int) -> None:
        self.info, self.letters, self.length = info, letters, length


class GrammarCompiler:
    def __init__(self, info: TokenizerInfo, *, max_threads: int, cache_enabled: bool, cache_limit_bytes: int) -> None:
        self._info = info
        self.asked: list[tuple[Any, ...]] = []

    def compile_regex(self, regex: str) -> Compiled:
        found = re.fullmatch(r"\[(\w+)\]\{(\d+)\}", regex)
        if found is None:
            raise RuntimeError("[12:00:00] /project/cpp/regex.cc:77: Unclosed class\nmore lines")
        return Compiled(self._info, found[1], int(found[2]))

    def compile_json_schema(
        self, schema: str, *, any_whitespace: bool, separators: tuple[str, str], strict_mode: bool
    ) -> Compiled:
        assert not strict_mode
        self.asked.append((schema, any_whitespace, separators))
        return Compiled(self._info, "a", 1)

    def compile_structural_tag(self, tag: dict[str, Any]) -> Compiled:
        self.asked.append((tag,))
        return Compiled(self._info, "a", 1)

    def compile_grammar(self, text: str) -> Compiled:
        self.asked.append((text,))
        return Compiled(self._info, "a", 1)


class Grammar:
    @staticmethod
    def from_json_schema(schema: str, *, any_whitespace: bool, separators: tuple[str, str], strict_mode: bool) -> str:
        assert not any_whitespace and not strict_mode
        return f"root ::= {schema}"


class GrammarMatcher:
    """Accepts that number of letters, then a stop token; refuses calls after that, as the real one does."""

    def __init__(self, compiled: Compiled, *, override_stop_tokens: list[int], max_rollback_tokens: int) -> None:
        self._compiled, self._stops = compiled, override_stop_tokens
        self._taken: list[int] = []
        self._max_rollback = max_rollback_tokens

    def is_terminated(self) -> bool:
        return bool(self._taken) and self._taken[-1] in self._stops

    def _allowed(self) -> list[int]:
        compiled = self._compiled
        if len(self._taken) == compiled.length:
            return self._stops
        return [i for i, text in enumerate(compiled.info.vocab) if len(text) == 1 and text in compiled.letters]

    def accept_token(self, token: int) -> bool:
        assert not self.is_terminated()
        if token not in self._allowed():
            return False
        self._taken.append(token)
        return True

    def rollback(self, num_tokens: int) -> None:
        assert 0 < num_tokens <= min(len(self._taken), self._max_rollback)
        del self._taken[-num_tokens:]

    def fill_next_token_bitmask(self, bitmask: _Tensor, index: int = 0) -> bool:
        assert not self.is_terminated()
        row = bitmask.numpy()[index].view(np.uint32)
        row[:] = 0
        for token in self._allowed():
            row[token // 32] |= np.uint32(1 << token % 32)
        return True


def module() -> types.ModuleType:
    fake = types.ModuleType("xgrammar")
    parts: dict[str, Any] = {
        "TokenizerInfo": TokenizerInfo,
        "Grammar": Grammar,
        "GrammarCompiler": GrammarCompiler,
        "GrammarMatcher": GrammarMatcher,
        "VocabType": types.SimpleNamespace(RAW="raw", BYTE_FALLBACK="byte_fallback", BYTE_LEVEL="byte_level"),
        "allocate_token_bitmask": lambda rows, vocab: _Tensor(np.full((rows, (vocab + 31) // 32), -1, np.int32)),
    }
    vars(fake).update(parts)
    return fake
