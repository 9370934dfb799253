"""The grammars of running and waiting requests: compiled beside the loop, advanced and turned into bitmasks."""

import json
from collections.abc import Callable, Collection
from typing import NamedTuple

import msgspec

from quire.protocol.config import EngineConfig
from quire.protocol.request.grammar_checks import GrammarRefused
from quire.protocol.request.structured_outputs import StructuredOutputs
from quire.protocol.wire.front_end_messages import AddRequest
from quire.protocol.wire.worker_messages import Proposed, SampleInputs
from quire.scheduler_proc.messages.steps import InFlightStep
from quire.scheduler_proc.requests.events import Fail, Hold, Refuse, Release
from quire.scheduler_proc.structured.backend import GrammarBusy
from quire.scheduler_proc.structured.backends import check_backend
from quire.scheduler_proc.structured.cache import CompilingGrammar, GrammarCache, Outcome, Source
from quire.scheduler_proc.structured.compile_pool import Check, CompilePool
from quire.scheduler_proc.structured.drafts import drafts_of
from quire.scheduler_proc.structured.guard import Guard
from quire.scheduler_proc.structured.helper_process import HelperMaker, MaskProcesses
from quire.scheduler_proc.structured.helpers import MaskHelpers
from quire.scheduler_proc.structured.masking import BUSY as NO_HELPER
from quire.scheduler_proc.structured.masking import TOO_LARGE, TOO_SLOW, Events, Key, Masking

PRUNE_FROM = 16
"""Fewest waiting requests among which ended ones are looked for."""
REFUSED = ("invalid_structured_outputs", "structured_outputs")
BUSY = ("queue_full", "structured_outputs")


_REFUSALS = {
    TOO_SLOW: "structured_outputs take too long to match",
    TOO_LARGE: "structured_outputs take too much memory to match",
}
"""Why later requests with a grammar are refused, by the reason of the request that failed."""


class _Wait(NamedTuple):
    source: Source
    tenant: int


class GrammarManager:
    """Owns the compiled grammars, and the position of each request's output in its grammar.

    Does not know sockets or the order of steps. ``fileno`` is readable when ``poll`` has outcomes. While requests wait,
    ``poll`` must also be called periodically, because a helper that does not answer is replaced.
    """

    def __init__(
        self,
        config: EngineConfig,
        clock: Callable[[], float],
        make_helpers: Callable[[EngineConfig], HelperMaker] | None = None,
        make_check: Callable[[], Check] | None = None,
    ) -> None:
        """
        Args:
            make_helpers, make_check: replace the processes that compute masks, and the Guard.

        Raises:
            ConfigError: the configured library is not installed.
        """
        check_backend(config)
        self._config = config
        self._clock = clock
        self._pool = CompilePool(make_check or (lambda: Guard(config)))
        self._helpers = MaskHelpers((make_helpers or MaskProcesses)(config))
        self._helpers.watch(self._pool.fileno())
        self._masking = Masking(config, self._helpers)
        self._cache = GrammarCache()
        self._compiling: dict[Source, list[Key]] = {}
        self._preparing: set[Source] = set()
        """Grammars that a mask helper compiles; those that take long are compiled while nothing else needs the CPU."""
        self._waiting: dict[Key, _Wait] = {}
        self._prune_from = PRUNE_FROM
        self._refused: list[tuple[Key, Source, Outcome]] = []
        """Refusals known at arrival, not yet returned by ``poll``."""

    def fileno(self) -> int:
        return self._helpers.fileno()

    def close(self) -> None:
        self._pool.close()
        self._helpers.close()

    @property
    def has_waiting_requests(self) -> bool:
        """Whether requests wait for a grammar or its masks."""
        return bool(self._waiting) or self._masking.has_held_requests

    # ---- compiling

    def begin(self, client: int, request: AddRequest) -> bool:
        """Add a request with a grammar. Returns True when it must be held until ``poll`` returns its outcome."""
        wanted = request.sampling.structured_outputs
        assert wanted is not None
        key, source = (client, request.request_id), source_of(wanted)
        self._masking.discard(key)  # an earlier request with the same id
        outcome = self._cache.get(source)
        if isinstance(outcome, CompilingGrammar) and not outcome.is_expensive:
            self._masking.add(key, outcome, request.tenant)
            return False
        self._waiting[key] = _Wait(source, request.tenant)
        if isinstance(outcome, GrammarRefused):
            self._refused.append((key, source, outcome))
        elif source in self._compiling:
            self._compiling[source].append(key)
        elif self._begin_compiling(source, wanted, outcome, request.tenant):
            self._compiling[source] = [key]
        else:
            self._refused.append((key, source, GrammarBusy()))
        return True

    def _begin_compiling(
        self, source: Source, wanted: StructuredOutputs, accepted: CompilingGrammar | None, tenant: int
    ) -> bool:
        """Return whether a grammar will be compiled: by the guard, or in a helper if the guard has accepted it."""
        if accepted is None:
            self._pool.submit(source, wanted, owner=tenant)
            return True
        return self._prepare(source, accepted, tenant)

    def _prepare(self, source: Source, accepted: CompilingGrammar, tenant: int) -> bool:
        """Return whether a mask helper will compile a grammar."""
        can = self._masking.prepare(accepted, tenant, self._clock())
        if can:
            self._preparing.add(source)
        return can

    def poll(self) -> list[tuple[int, Hold | Release | Refuse | Fail]]:
        """Return (client, outcome) of the held requests that were decided since the last call."""
        refused, self._refused = self._refused, []
        decided: list[tuple[int, Hold | Release | Refuse | Fail]] = []
        decided += [self._decide(*known) for known in refused if self._is_waiting(*known[:2])]
        for source, outcome in self._pool.take():
            decided += self._checked(source, outcome)
        self._masking.poll(self._clock())
        prepared, self._masking.prepared = self._masking.prepared, []
        for grammar, reason in prepared:
            refusal = GrammarBusy() if reason == NO_HELPER else GrammarRefused(reason)
            decided += self._decide_all(source_of(grammar.wanted), refusal if reason else grammar)
        self._refuse_later()
        return [*decided, *self._masking.take_events()]

    def _checked(self, source: Source, outcome: Outcome) -> list[tuple[int, Release | Refuse]]:
        """Handle the outcome of the guard: a helper must compile an accepted grammar before its requests can start."""
        if not isinstance(outcome, CompilingGrammar):
            return self._decide_all(source, outcome)
        tenants = [self._waiting[key].tenant for key in self._compiling[source] if self._is_waiting(key, source)]
        # The helper that will fill its masks compiles the grammar before the request starts. Otherwise the first step
        # would wait for a compilation.
        if tenants and not self._prepare(source, outcome, tenants[0]):
            return self._decide_all(source, GrammarBusy())
        self._put(source, outcome)
        if not tenants:
            del self._compiling[source]
        return []

    def _decide_all(self, source: Source, outcome: Outcome) -> list[tuple[int, Release | Refuse]]:
        """Return the outcome for all requests that wait for a grammar."""
        if isinstance(outcome, GrammarRefused) and not isinstance(outcome, GrammarBusy):
            self._put(source, outcome)
        self._preparing.discard(source)
        keys = self._compiling.pop(source, [])
        return [self._decide(key, source, outcome) for key in keys if self._is_waiting(key, source)]

    def _is_waiting(self, key: Key, source: Source) -> bool:
        """Return False when the request was already decided, or its id now belongs to another request."""
        wait = self._waiting.get(key)
        return wait is not None and wait.source == source

    def _decide(self, key: Key, source: Source, outcome: Outcome) -> tuple[int, Release | Refuse]:
        wait = self._waiting.pop(key)
        client, request_id = key
        if isinstance(outcome, GrammarRefused):
            code = BUSY if isinstance(outcome, GrammarBusy) else REFUSED
            return client, Refuse(request_id, *code, str(outcome))
        # Before the release: the request may be in the next step, which asks for its mask.
        self._masking.add(key, outcome, wait.tenant)
        return client, Release(request_id)

    # ---- masks

    @property
    def num_invalid_drafts(self) -> int:
        """Number of draft tokens that grammars forbade, and of those after them."""
        return self._masking.num_invalid_drafts

    def ask(self, record: InFlightStep, proposed: Proposed | None = None) -> None:
        """Ask for the bitmasks that a step awaits. All tokens before the step must be known.

        Args:
            proposed: the step's draft tokens, if its bitmasks depend on them.

        Raises:
            WorkerFault: the draft tokens do not match the step; nothing has changed.
        """
        drafts = {} if proposed is None else drafts_of(record, proposed, self._config.model.vocab_size)
        self._masking.ask(record, drafts, self._clock())

    def result(self) -> tuple[SampleInputs, Events] | None:
        """Return the bitmasks of the step, and events of its requests; None while they are worth waiting for."""
        found = self._masking.result(self._clock())
        self._refuse_later()
        return found

    def abandon(self) -> None:
        """Forget the step that awaits bitmasks: its workers were lost."""
        self._masking.abandon()

    def deadline(self) -> float | None:
        """Return when ``result`` must be called next although no answer arrived, or None."""
        return self._masking.deadline(self._clock())

    def prune(self, live: Collection[Key]) -> None:
        """Forget requests that are not among ``live``, and do not compile their grammars. Does nothing while there are
        few."""
        self._masking.prune(live)
        if len(self._waiting) < self._prune_from:
            return
        # A compilation is withdrawn only if no live request waits for its grammar any more; several requests may share
        # one.
        ended = {self._waiting.pop(key).source for key in [key for key in self._waiting if key not in live]}
        for source in ended.difference(wait.source for wait in self._waiting.values()):
            if self._pool.withdraw(source):
                del self._compiling[source]
        self._prune_from = max(PRUNE_FROM, 2 * len(self._waiting))

    def _refuse_later(self) -> None:
        """Refuse later requests with a grammar that has reached a limit."""
        refused, self._masking.refused = self._masking.refused, []
        for grammar, reason in refused:
            self._put(source_of(grammar.wanted), GrammarRefused(_REFUSALS[reason]))

    def _put(self, source: Source, outcome: Outcome) -> None:
        """Cache an outcome; the helpers forget the grammars that the cache drops."""
        # The helpers' memory follows this cache, which counts bytes, so that a stream of different grammars has a
        # bound.
        for dropped in self._cache.put(source, outcome):
            if isinstance(dropped, CompilingGrammar) and dropped is not outcome:
                self._helpers.forget_grammar(dropped.number)


def source_of(wanted: StructuredOutputs) -> Source:
    """Return the key of a constraint in the grammar cache."""
    match wanted.kind:
        case "json":
            return "json", str(wanted.json)
        case "choice":
            return "choice", json.dumps(wanted.choice)
        case "json_object":
            return "json_object", ""
        case "regex":
            return "regex", str(wanted.regex)
        case "form":
            return "form", msgspec.json.encode(wanted.form).decode()
        case _:
            return "grammar", str(wanted.grammar)
