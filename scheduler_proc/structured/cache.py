"""Accepted grammars and refusals by source, for reuse by later requests."""

from collections import OrderedDict
from dataclasses import dataclass, field

from quire.protocol.request.grammar_checks import GrammarRefused
from quire.protocol.request.structured_outputs import StructuredOutputs
from quire.scheduler_proc.structured.limits import EXPENSIVE_BYTES


@dataclass(frozen=True, slots=True, eq=False)
class CompilingGrammar:
    """A grammar that compiles. ``number``: its name in the helpers; ``num_bytes``: memory of the compiled grammar."""

    number: int
    wanted: StructuredOutputs
    num_bytes: int

    @property
    def is_expensive(self) -> bool:
        """Whether it needs a helper of its own."""
        return self.num_bytes > EXPENSIVE_BYTES


Outcome = CompilingGrammar | GrammarRefused
Source = tuple[str, str]
"""The kind of a constraint, and its text."""


@dataclass(slots=True)
class GrammarCache:
    """LRU cache of compilation outcomes by source, refusals included; bounded by count and by bytes of source.

    The helper that compiled a grammar keeps it as long as the cache does.
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

    def put(self, source: Source, outcome: Outcome) -> list[Outcome]:
        """Add an outcome. Returns the outcomes that are dropped."""
        dropped = self.discard(source)
        self._outcomes[source] = outcome
        self.num_bytes += len(source[1])
        while len(self._outcomes) > self.max_count or (self.num_bytes > self.max_bytes and len(self._outcomes) > 1):
            oldest, outcome = self._outcomes.popitem(last=False)
            self.num_bytes -= len(oldest[1])
            dropped.append(outcome)
        return dropped

    def discard(self, source: Source) -> list[Outcome]:
        """Remove a source: the next request compiles it again. Returns what was removed."""
        outcome = self._outcomes.pop(source, None)
        if outcome is None:
            return []
        self.num_bytes -= len(source[1])
        return [outcome]

    def __len__(self) -> int:
        return len(self._outcomes)
