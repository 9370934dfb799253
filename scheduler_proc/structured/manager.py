"""Grammars of live requests: compiled beside the loop, advanced and asked for masks between steps."""

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
from quire.scheduler_proc.structured.constrained_output import ConstrainedAnswer, Reading
from quire.scheduler_proc.structured.drafts import drafts_of
from quire.scheduler_proc.structured.guard import Guard
from quire.scheduler_proc.structured.limits import MemoryWatch, SlowSteps, is_over, resident_bytes

WAIT_SECONDS = 1.8
"""How long a request waits at most while no grammar begins to be compiled, its own or another's."""
START_SECONDS = 60.0
"""How long a request waits at most where what compiles is still being started."""
REFUSED = ("invalid_structured_outputs", "structured_outputs")
BUSY = ("queue_full", "structured_outputs")

Key = tuple[int, str]
"""Client and request id."""
Failures = list[tuple[int, Fail]]


class _Wait(NamedTuple):
    source: Source
    since: float


@dataclass(slots=True)
class _Constrained:
    """A request whose grammar is there.

    Attributes:
        answer: since it first sampled.
        seconds: CPU time of the loop that its matching took, as far as that was watched.
    """

    source: Source
    grammar: CompiledGrammar
    answer: ConstrainedAnswer | None = None
    seconds: float = 0.0


@dataclass(slots=True)
class _Positions:
    """One request's rows of the masks: ``first`` and one more for each of ``drafts``."""

    request: Request
    constrained: _Constrained
    answer: Reading
    first: int
    drafts: list[int]
    reading: Reading = field(init=False)

    def __post_init__(self) -> None:
        self.reading = self.answer.fork() if self.drafts else self.answer


class GrammarManager:
    """Owns the compiled grammars and where each request stands in its own; knows nothing of sockets and steps' order.

    ``fileno`` is readable when ``poll`` has something to tell; where somebody waits, ``poll`` is also to be called
    every now and then, for no request waits for longer than WAIT_SECONDS.
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
            make_backend, make_check: instead of what ``config`` names, and of a Guard.
            cpu_clock: CPU seconds of the calling thread.

        Raises:
            ConfigError: the library that ``config`` names is not there.
        """
        self._config = config
        self._thoughts = _all_but(config.model.eos_token_ids, config.model.vocab_size)
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
        """Known to be so when they came; not told yet."""
        self._prune_from = 64

    def fileno(self) -> int:
        return self._pool.fileno()

    def close(self) -> None:
        self._pool.close()

    @property
    def has_waiting_requests(self) -> bool:
        """Somebody's grammar is being compiled."""
        return bool(self._waiting)

    # ---- compiling

    def begin(self, client: int, request: AddRequest) -> bool:
        """A request with a grammar has come. True: hold it until ``poll`` tells of it."""
        wanted = request.sampling.structured_outputs
        assert wanted is not None
        key, source = (client, request.request_id), source_of(wanted)
        self._constrained.pop(key, None)  # of one that had the same id
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
        """(client, what became of a request that was held) since the last call."""
        refused, self._refused = self._refused, []
        told = [self._tell(*known) for known in refused if self._waits(*known[:2])]
        for source, outcome in self._pool.take():
            if not isinstance(outcome, GrammarBusy):
                self._cache.put(source, outcome)
            if self._memory.has_grown():
                self._cache.forget_grammars()
            told += [
                self._tell(key, source, outcome) for key in self._compiling.pop(source) if self._waits(key, source)
            ]
        return told + self._overdue() if self._waiting else told

    def _overdue(self) -> list[tuple[int, Release | Refuse]]:
        """Those that have waited too long. What nobody waits for any more is not compiled."""
        now, ready_at = self._clock(), self._pool.ready_at
        overdue = [(key, wait.source) for key, wait in self._waiting.items() if _is_late(wait.since, ready_at, now)]
        # None of them is known to be at fault: one that uses up its CPU time is told so before this.
        told = [self._tell(key, source, GrammarBusy()) for key, source in overdue]
        for source in {source for _, source in overdue}:
            waiting = any(self._waits(key, source) for key in self._compiling.get(source, ()))
            if not waiting and self._pool.withdraw(source):
                del self._compiling[source]
        return told

    def _waits(self, key: Key, source: Source) -> bool:
        """Not so when it was told already, or when its id is another's by now."""
        wait = self._waiting.get(key)
        return wait is not None and wait.source == source

    def _tell(self, key: Key, source: Source, outcome: Outcome) -> tuple[int, Release | Refuse]:
        del self._waiting[key]
        client, request_id = key
        if isinstance(outcome, GrammarRefused):
            code = BUSY if isinstance(outcome, GrammarBusy) else REFUSED
            return client, Refuse(request_id, *code, str(outcome))
        self._constrained[key] = _Constrained(source, outcome)
        return client, Release(request_id)

    # ---- masks

    def sample_inputs(self, record: InFlightStep, proposed: Proposed | None = None) -> tuple[SampleInputs, Failures]:
        """What a step waits for, once every token before it is known; and requests that cannot go on.

        Args:
            proposed: the step's drafts, if its masks depend on them.

        Raises:
            WorkerFault: they cannot be; nothing has changed.
        """
        drafts = {} if proposed is None else drafts_of(record, proposed, self._config.model.vocab_size)
        failures: Failures = []
        found: list[_Positions] = []
        num_rows = 0
        for request in [row.request for row in record.constrained]:
            if request.status.is_finished:
                continue
            constrained = self._constrained[request.client, request.request_id]
            reading = self._caught_up(constrained, request)
            if reading is None:
                failures.append(self._fail(request, "the grammar does not allow a token that was sampled"))
                continue
            found.append(_Positions(request, constrained, reading, num_rows, drafts.get(request.handle, [])))
            num_rows += 1 + len(found[-1].drafts)
        masks = np.full((num_rows, (self._config.model.vocab_size + 31) // 32), -1, np.int32)
        self.fill_masks(found, masks)
        told = self._that_go_on(found, masks, failures)
        if self._memory.has_grown():
            self._cache.forget_grammars()
        return _message(record.step, told, masks), failures

    def prune(self, live: Collection[Key]) -> None:
        """Forget requests that are not among ``live``; does nothing while there are few of them."""
        if len(self._constrained) >= self._prune_from:
            self._constrained = {key: value for key, value in self._constrained.items() if key in live}
            self._prune_from = max(64, 2 * len(self._constrained))

    def _that_go_on(self, found: list[_Positions], masks: Masks, failures: Failures) -> list[_Positions]:
        """Those that may; the others are added to ``failures``."""
        dead_ends = set(np.flatnonzero(~masks.any(axis=1)).tolist())
        going = []
        for positions in found:
            request, constrained = positions.request, positions.constrained
            if positions.first in dead_ends:
                failures.append(self._fail(request, "the grammar allows nothing that the model could write here"))
            elif is_over(constrained.seconds, request.num_output_tokens):
                failures.append(self._fail(request, "the grammar takes too long to match"))
                self._cache.put(constrained.source, GrammarRefused("structured_outputs take too long to match"))
            else:
                going.append(positions)
        return going

    def _caught_up(self, constrained: _Constrained, request: Request) -> Reading | None:
        """Its reading of all known tokens; None where the grammar does not allow one of them."""
        began = self._cpu_clock()
        if constrained.answer is None:
            constrained.answer = ConstrainedAnswer(constrained.grammar.matcher(), request, self._config)
        allowed = constrained.answer.catch_up(request)
        constrained.seconds += self._cpu_clock() - began
        return constrained.answer.reading if allowed else None

    def fill_masks(self, found: list[_Positions], masks: Masks) -> None:
        """Draft by draft for all of them, so that those of one round are filled in parallel.

        Behind a draft that the grammar refuses any mask will do: it is never accepted.
        """
        going, offset = found, 0
        while going:
            self._fill_rows([p for p in going if not p.reading.is_unconstrained], offset, masks)
            for positions in going:
                if (
                    positions.reading.is_unconstrained
                ):  # a thought may be anything but the end of an answer that is yet to come
                    masks[positions.first + offset] = self._thoughts
            going = [p for p in going if offset < len(p.drafts) and p.reading.read(p.drafts[offset])]
            offset += 1
        for positions in found:
            if positions.drafts:
                positions.reading.undo()

    def _fill_rows(self, batch: list[_Positions], offset: int, masks: Masks) -> None:
        """All of them together, or each by itself, where its time is to be known."""
        if not batch:
            return
        backend, began = self._pool.backend(), self._clock()
        if not self._slow_steps.are_watched:
            backend.fill([(p.reading.matcher, p.first + offset) for p in batch], masks)
        else:
            for p in batch:
                before = self._cpu_clock()
                backend.fill([(p.reading.matcher, p.first + offset)], masks)
                p.constrained.seconds += self._cpu_clock() - before
        self._slow_steps.took(self._clock() - began)

    def _fail(self, request: Request, why: str) -> tuple[int, Fail]:
        """What was built for its grammar may be at a limit, for all that share it: later requests begin anew."""
        constrained = self._constrained.pop((request.client, request.request_id))
        self._cache.discard(constrained.source)
        return request.client, Fail(request.request_id, f"request_failed: {why}")


def _all_but(banned: Sequence[int], vocab_size: int) -> npt.NDArray[np.int32]:
    """A row of a mask that allows every token but these."""
    row = np.full((vocab_size + 31) // 32, -1, np.int32)
    for token in banned:
        row[token // 32] &= ~np.int32(np.uint32(1 << token % 32).view(np.int32))
    return row


def _is_late(since: float, ready_at: float | None, now: float) -> bool:
    """Time in which nothing could be compiled does not count."""
    if ready_at is None:
        return now > since + START_SECONDS
    return now > max(since, ready_at) + WAIT_SECONDS


def source_of(wanted: StructuredOutputs) -> Source:
    """By what a compiled grammar is found again."""
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


def _message(step: int, told: list[_Positions], masks: Masks) -> SampleInputs:
    handles = [positions.request.handle for positions in told]
    counts = [1 + len(positions.drafts) for positions in told]
    if not told:
        return SampleInputs(step, [], [])
    if sum(counts) < len(masks):
        rows = [
            positions.first + offset for positions, count in zip(told, counts, strict=True) for offset in range(count)
        ]
        masks = masks[rows]
    return SampleInputs(step, handles, counts, masks.reshape(-1))
