"""Grammars that compile at once, in the loop's own thread, and allow even tokens."""

from collections.abc import Callable, Sequence
from typing import Any

from quire.protocol.request.structured_outputs import StructuredOutputs
from quire.scheduler_proc.structured.backend import Masks
from quire.scheduler_proc.structured.cache import Outcome, Source

EVEN_TOKENS = 0x55555555
"""A bitmask word that allows even tokens."""


class EvenMatcher:
    """Implements ``backend.Matcher``."""

    is_done = False

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

    def __init__(self, make_backend: Any, make_check: Any, clock: Callable[[], float]) -> None:
        self._outcomes: list[tuple[Source, Outcome]] = []
        self._backend = EvenBackend()
        self.ready_at: float | None = clock()

    def fileno(self) -> int:
        return -1

    def submit(self, source: Source, wanted: StructuredOutputs, owner: int) -> bool:
        self._outcomes.append((source, self._backend.compile(wanted)))
        return True

    def withdraw(self, source: Source) -> bool:
        return False  # it was compiled at once

    def take(self) -> list[tuple[Source, Outcome]]:
        taken, self._outcomes = self._outcomes, []
        return taken

    def backend(self) -> EvenBackend:
        return self._backend

    def close(self) -> None:
        pass
