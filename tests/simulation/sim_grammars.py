"""Grammars that compile at once, in the loop's own thread, and allow even tokens."""

import itertools
from collections.abc import Sequence
from typing import Any

from inline_helpers import InlineHelpers

from quire.protocol.config import EngineConfig
from quire.protocol.request.structured_outputs import StructuredOutputs
from quire.scheduler_proc.structured.backend import Masks
from quire.scheduler_proc.structured.cache import CompilingGrammar, Outcome, Source

EVEN_TOKENS = 0x55555555
"""A bitmask word that allows even tokens."""


class EvenMatcher:
    """Implements ``backend.GrammarPosition``."""

    is_done = False
    error = ""

    def accept(self, token: int) -> bool:
        return token % 2 == 0

    def rollback(self, num_tokens: int) -> None:
        pass


class EvenGrammar:
    """Implements ``backend.CompiledGrammar``."""

    def matcher(self) -> EvenMatcher:
        return EvenMatcher()


class EvenBackend:
    """Implements ``backend.GrammarBackend``."""

    def compile(self, wanted: StructuredOutputs) -> EvenGrammar:
        return EvenGrammar()

    def fill(self, matchers: Sequence[tuple[Any, int]], masks: Masks) -> None:
        for _, index in matchers:
            masks[index] = EVEN_TOKENS


class InlinePool:
    """Implements the part of ``CompilePool`` that the GrammarManager needs."""

    def __init__(self, make_check: Any) -> None:
        self._outcomes: list[tuple[Source, Outcome]] = []
        self._numbers = itertools.count(1)

    def fileno(self) -> int:
        return -1

    def submit(self, source: Source, wanted: StructuredOutputs, owner: int) -> None:
        self._outcomes.append((source, CompilingGrammar(next(self._numbers), wanted, 0)))

    def withdraw(self, source: Source) -> bool:
        return False  # it was compiled at once

    def take(self) -> list[tuple[Source, Outcome]]:
        taken, self._outcomes = self._outcomes, []
        return taken

    def close(self) -> None:
        pass


def even_helpers(config: EngineConfig) -> InlineHelpers:
    return InlineHelpers(config, EvenBackend)
