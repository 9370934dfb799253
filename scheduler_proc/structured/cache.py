"""Compiled grammars and refusals by source, for reuse by later requests."""

from collections import OrderedDict
from dataclasses import dataclass, field

from quire.protocol.request.grammar_checks import GrammarRefused
from quire.scheduler_proc.structured.backend import CompiledGrammar

Outcome = CompiledGrammar | GrammarRefused
Source = tuple[str, str]
"""The kind of a constraint, and its text."""


@dataclass(slots=True)
class GrammarCache:
    """LRU cache of compilation outcomes by source, refusals included; bounded by count and by bytes of source.

    Bytes of source approximate the memory of a compiled grammar, which libraries do not report.
    """

    max_count: int = 256
    max_bytes: int = 2 * 2**20
    num_bytes: int = 0
    _outcomes: OrderedDict[Source, Outcome] = field(default_factory=OrderedDict)

    def get(self, source: Source) -> Outcome | None:
        outcome = self._outcomes.get(source)
        if outcome is not None:
            self._outcomes.move_to_end(source)
        return outcome

    def put(self, source: Source, outcome: Outcome) -> None:
        self.discard(source)
        self._outcomes[source] = outcome
        self.num_bytes += len(source[1])
        while len(self._outcomes) > self.max_count or (self.num_bytes > self.max_bytes and len(self._outcomes) > 1):
            oldest, _ = self._outcomes.popitem(last=False)
            self.num_bytes -= len(oldest[1])

    def discard(self, source: Source) -> None:
        """Remove a source whose grammar has reached a limit: the next request compiles it again."""
        if self._outcomes.pop(source, None) is not None:
            self.num_bytes -= len(source[1])

    def forget_grammars(self) -> None:
        """Remove all compiled grammars; running outputs still hold them. Refusals stay: they are small."""
        for source in [source for source, found in self._outcomes.items() if not isinstance(found, GrammarRefused)]:
            self.discard(source)

    def __len__(self) -> int:
        return len(self._outcomes)
