"""The grammars of running and waiting requests: compiled beside the loop, advanced and turned into bitmasks."""

import json
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quire.protocol.config import EngineConfig
from quire.protocol.request.grammar_checks import GrammarRefused
from quire.protocol.request.structured_outputs import StructuredOutputs
from quire.protocol.wire.front_end_messages import AddRequest
from quire.protocol.wire.worker_messages import Proposed, SampleInputs
from quire.scheduler_proc.core.events import Fail, Refuse, Release
from quire.scheduler_proc.core.in_flight import InFlightStep
from quire.scheduler_proc.requests.request import Request
from quire.scheduler_proc.structured.backend import CompiledGrammar, GrammarBackend, GrammarBusy, Masks
from quire.scheduler_proc.structured.backends import backend_maker
from quire.scheduler_proc.structured.cache import GrammarCache, Outcome, Source
from quire.scheduler_proc.structured.compile_pool import Check, CompilePool
from quire.scheduler_proc.structured.constrained_output import ConstrainedOutput, GrammarReader
from quire.scheduler_proc.structured.drafts import drafts_of
from quire.scheduler_proc.structured.guard import Guard
from quire.scheduler_proc.structured.limits import MemoryWatch, SlowSteps, exceeds_limit, resident_bytes

WAIT_SECONDS = 1.8
"""Longest wait of a request while no grammar starts compiling, its own or another."""
START_SECONDS = 60.0
"""Longest wait of a request while the compile threads and the guard start."""
REFUSED = ("invalid_structured_outputs", "structured_outputs")
BUSY = ("queue_full", "structured_outputs")

Key = tuple[int, str]
"""Client number and request id."""
Failures = list[tuple[int, Fail]]


class _Wait(NamedTuple):
    source: Source
    since: float


@dataclass(slots=True)
class _Constrained:
    """A request with a compiled grammar.

    Attributes:
        output: None until it is first sampled.
        seconds: CPU time of the loop spent on matching, as far as it was measured.
    """

    source: Source
    grammar: CompiledGrammar
    output: ConstrainedOutput | None = None
    seconds: float = 0.0


@dataclass(slots=True)
class _Positions:
    """One request's rows of the bitmasks: ``first``, and one more for each of ``drafts``."""

    request: Request
    constrained: _Constrained
    output: GrammarReader
    first: int
    drafts: list[int]
    reader: GrammarReader = field(init=False)

    def __post_init__(self) -> None:
        self.reader = self.output.fork() if self.drafts else self.output


class GrammarManager:
    """Owns the compiled grammars, and the position of each request's output in its grammar.

    Does not know sockets or the order of steps. ``fileno`` is readable when ``poll`` has outcomes. While requests wait,
    ``poll`` must also be called periodically, because no request waits longer than WAIT_SECONDS.
    """

    def __init__(
        self,
        config: EngineConfig,
        clock: Callable[[], float],
        make_backend: Callable[[], GrammarBackend] | None = None,
        make_check: Callable[[], Check] | None = None,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """
        Args:
            make_backend, make_check: replace the configured backend and the Guard.
            cpu_clock: returns the CPU seconds of the calling thread.

        Raises:
            ConfigError: the configured library is not installed.
        """
        self._config = config
        self._thinking_mask = _all_but(config.model.eos_token_ids, config.model.vocab_size)
        self._clock = clock
        self._pool = CompilePool(make_backend or backend_maker(config), make_check or (lambda: Guard(config)), clock)
        self._cpu_clock = cpu_clock
        self._slow_steps = SlowSteps()
        self._memory = MemoryWatch(resident_bytes)
        self._cache = GrammarCache()
        self._compiling: dict[Source, list[Key]] = {}
        self._waiting: dict[Key, _Wait] = {}
        self._constrained: dict[Key, _Constrained] = {}
        self._refused: list[tuple[Key, Source, Outcome]] = []
        """Refusals known at arrival, not yet returned by ``poll``."""
        self._prune_from = 64

    def fileno(self) -> int:
        return self._pool.fileno()

    def close(self) -> None:
        self._pool.close()

    @property
    def has_waiting_requests(self) -> bool:
        """Whether requests wait for a grammar."""
        return bool(self._waiting)

    # ---- compiling

    def begin(self, client: int, request: AddRequest) -> bool:
        """Add a request with a grammar. Returns True when it must be held until ``poll`` returns its outcome."""
        wanted = request.sampling.structured_outputs
        assert wanted is not None
        key, source = (client, request.request_id), source_of(wanted)
        self._constrained.pop(key, None)  # an earlier request with the same id
        outcome = self._cache.get(source)
        if outcome is not None and not isinstance(outcome, GrammarRefused):
            self._constrained[key] = _Constrained(source, outcome)
            return False
        self._waiting[key] = _Wait(source, self._clock())
        if outcome is not None:
            self._refused.append((key, source, outcome))
        elif source in self._compiling:
            self._compiling[source].append(key)
        elif self._pool.submit(source, wanted, owner=request.tenant):
            self._compiling[source] = [key]
        else:
            self._refused.append((key, source, GrammarBusy()))
        return True

    def poll(self) -> list[tuple[int, Release | Refuse]]:
        """Return (client, outcome) of the held requests that were decided since the last call."""
        refused, self._refused = self._refused, []
        decided = [self._decide(*known) for known in refused if self._is_waiting(*known[:2])]
        for source, outcome in self._pool.take():
            if not isinstance(outcome, GrammarBusy):
                self._cache.put(source, outcome)
            if self._memory.has_grown():
                self._cache.forget_grammars()
            decided += [
                self._decide(key, source, outcome)
                for key in self._compiling.pop(source)
                if self._is_waiting(key, source)
            ]
        return decided + self._overdue() if self._waiting else decided

    def _overdue(self) -> list[tuple[int, Release | Refuse]]:
        """Refuse requests that have waited too long. Grammars that no request waits for are no longer compiled."""
        now, ready_at = self._clock(), self._pool.ready_at
        overdue = [(key, wait.source) for key, wait in self._waiting.items() if _is_late(wait.since, ready_at, now)]
        # None of these grammars is known to be at fault: one that used up its CPU time was refused before.
        decided = [self._decide(key, source, GrammarBusy()) for key, source in overdue]
        for source in {source for _, source in overdue}:
            waiting = any(self._is_waiting(key, source) for key in self._compiling.get(source, ()))
            if not waiting and self._pool.withdraw(source):
                del self._compiling[source]
        return decided

    def _is_waiting(self, key: Key, source: Source) -> bool:
        """Return False when the request was already decided, or its id now belongs to another request."""
        wait = self._waiting.get(key)
        return wait is not None and wait.source == source

    def _decide(self, key: Key, source: Source, outcome: Outcome) -> tuple[int, Release | Refuse]:
        del self._waiting[key]
        client, request_id = key
        if isinstance(outcome, GrammarRefused):
            code = BUSY if isinstance(outcome, GrammarBusy) else REFUSED
            return client, Refuse(request_id, *code, str(outcome))
        self._constrained[key] = _Constrained(source, outcome)
        return client, Release(request_id)

    # ---- masks

    def sample_inputs(self, record: InFlightStep, proposed: Proposed | None = None) -> tuple[SampleInputs, Failures]:
        """Return the bitmasks that a step awaits, and the requests that fail. All tokens before the step must be known.

        Args:
            proposed: the step's draft tokens, if its bitmasks depend on them.

        Raises:
            WorkerFault: the draft tokens do not match the step; nothing has changed.
        """
        drafts = {} if proposed is None else drafts_of(record, proposed, self._config.model.vocab_size)
        failures: Failures = []
        found: list[_Positions] = []
        num_rows = 0
        for request in [row.request for row in record.constrained]:
            if request.status.is_finished:
                continue
            constrained = self._constrained[request.client, request.request_id]
            reader = self._read_new_tokens(constrained, request)
            if reader is None:
                failures.append(self._fail(request, "a sampled token is not allowed by its grammar"))
                continue
            found.append(_Positions(request, constrained, reader, num_rows, drafts.get(request.handle, [])))
            num_rows += 1 + len(found[-1].drafts)
        masks = np.full((num_rows, (self._config.model.vocab_size + 31) // 32), -1, np.int32)
        self.fill_masks(found, masks)
        active = self._remove_failed(found, masks, failures)
        if self._memory.has_grown():
            self._cache.forget_grammars()
        return _message(record.step, active, masks), failures

    def prune(self, live: Collection[Key]) -> None:
        """Forget requests that are not among ``live``. Does nothing while there are few."""
        if len(self._constrained) >= self._prune_from:
            self._constrained = {key: value for key, value in self._constrained.items() if key in live}
            self._prune_from = max(64, 2 * len(self._constrained))

    def _remove_failed(self, found: list[_Positions], masks: Masks, failures: Failures) -> list[_Positions]:
        """Return the requests that can continue; the others are added to ``failures``."""
        dead_ends = set(np.flatnonzero(~masks.any(axis=1)).tolist())
        active = []
        for positions in found:
            request, constrained = positions.request, positions.constrained
            if positions.first in dead_ends:
                failures.append(self._fail(request, "the grammar allows no token of the model's vocabulary here"))
            elif exceeds_limit(constrained.seconds, request.num_output_tokens):
                failures.append(self._fail(request, "the grammar takes too long to match"))
                self._cache.put(constrained.source, GrammarRefused("structured_outputs take too long to match"))
            else:
                active.append(positions)
        return active

    def _read_new_tokens(self, constrained: _Constrained, request: Request) -> GrammarReader | None:
        """Return the reader after all known tokens, or None when the grammar does not allow one of them."""
        start = self._cpu_clock()
        if constrained.output is None:
            constrained.output = ConstrainedOutput(constrained.grammar.matcher(), request, self._config)
        allowed = constrained.output.catch_up(request)
        constrained.seconds += self._cpu_clock() - start
        return constrained.output.reader if allowed else None

    def fill_masks(self, found: list[_Positions], masks: Masks) -> None:
        """Fill the bitmasks position by position for all requests, so that each round is filled in parallel.

        The mask after a draft that the grammar refuses is arbitrary, because that draft is never accepted.
        """
        active, offset = found, 0
        while active:
            self._fill_rows([p for p in active if not p.reader.is_unconstrained], offset, masks)
            for positions in active:
                if positions.reader.is_unconstrained:  # the thinking part may be anything but the end of the text
                    masks[positions.first + offset] = self._thinking_mask
            active = [p for p in active if offset < len(p.drafts) and p.reader.read(p.drafts[offset])]
            offset += 1
        for positions in found:
            if positions.drafts:
                positions.reader.undo()

    def _fill_rows(self, batch: list[_Positions], offset: int, masks: Masks) -> None:
        """Fill the rows together, or one by one when they are timed."""
        if not batch:
            return
        backend, start = self._pool.backend(), self._clock()
        if not self._slow_steps.are_watched:
            backend.fill([(p.reader.matcher, p.first + offset) for p in batch], masks)
        else:
            for p in batch:
                before = self._cpu_clock()
                backend.fill([(p.reader.matcher, p.first + offset)], masks)
                p.constrained.seconds += self._cpu_clock() - before
        self._slow_steps.record(self._clock() - start)

    def _fail(self, request: Request, reason: str) -> tuple[int, Fail]:
        """Fail a request and drop its grammar, which may have reached a limit: later requests compile it again."""
        constrained = self._constrained.pop((request.client, request.request_id))
        self._cache.discard(constrained.source)
        return request.client, Fail(request.request_id, f"request_failed: {reason}")


def _all_but(banned: Sequence[int], vocab_size: int) -> npt.NDArray[np.int32]:
    """Return a bitmask row that allows every token but ``banned``."""
    row = np.full((vocab_size + 31) // 32, -1, np.int32)
    for token in banned:
        row[token // 32] &= ~np.int32(np.uint32(1 << token % 32).view(np.int32))
    return row


def _is_late(since: float, ready_at: float | None, now: float) -> bool:
    """Return whether a request waited too long. Time in which nothing could be compiled does not count."""
    if ready_at is None:
        return now > since + START_SECONDS
    return now > max(since, ready_at) + WAIT_SECONDS


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
        case _:
            return "grammar", str(wanted.grammar)


def _message(step: int, active: list[_Positions], masks: Masks) -> SampleInputs:
    handles = [positions.request.handle for positions in active]
    counts = [1 + len(positions.drafts) for positions in active]
    if not active:
        return SampleInputs(step, [], [])
    if sum(counts) < len(masks):
        rows = [
            positions.first + offset for positions, count in zip(active, counts, strict=True) for offset in range(count)
        ]
        masks = masks[rows]
    return SampleInputs(step, handles, counts, masks.reshape(-1))
