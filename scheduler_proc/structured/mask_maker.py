"""Reads the tokens of outputs and fills their bitmasks: the work of a lane, without its process."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from quire.protocol.config import EngineConfig
from quire.protocol.request.grammar_checks import GrammarRefused
from quire.scheduler_proc.structured.backend import CompiledGrammar, GrammarBackend, Masks
from quire.scheduler_proc.structured.constrained_output import ConstrainedOutput, GrammarReader
from quire.scheduler_proc.structured.lane_messages import (
    Begin,
    Fill,
    Filled,
    Forget,
    FromLane,
    Prepare,
    Prepared,
    Row,
    ToLane,
)
from quire.scheduler_proc.structured.limits import SlowSteps

NOT_ALLOWED = "a sampled token is not allowed by its grammar"
DEAD_END = "the grammar allows no token of the model's vocabulary here"


@dataclass(slots=True)
class _Positions:
    """One output's rows of the bitmasks: one, and one more for each draft."""

    row: Row
    output: GrammarReader
    reader: GrammarReader = field(init=False)

    def __post_init__(self) -> None:
        self.reader = self.output.fork() if self.row.drafts else self.output


class MaskMaker:
    """Owns the compiled grammars of a lane, and the position of each of its outputs. Used by one thread."""

    def __init__(
        self,
        backend: GrammarBackend,
        config: EngineConfig,
        masks: Masks,
        works_on: Callable[[int], None] = lambda output: None,
        clock: Callable[[], float] = time.perf_counter,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """
        Args:
            masks: the memory that answers refer to.
            works_on: called with an output before it is computed alone, and with 0 after it.
            cpu_clock: returns the CPU seconds of the calling thread.
        """
        self._backend = backend
        self._config = config
        self._masks = masks
        self._thinking_mask = _all_but(config.model.eos_token_ids, config.model.vocab_size)
        self._works_on = works_on
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._slow_steps = SlowSteps()
        self._grammars: dict[int, CompiledGrammar] = {}
        self._outputs: dict[int, ConstrainedOutput] = {}
        self._seconds: dict[int, float] = {}
        """CPU time of the newest masks of each output that were computed alone."""

    def handle(self, message: ToLane) -> Iterator[Sequence[FromLane]]:
        """Apply a message; yield answers as soon as they are known."""
        match message:
            case Prepare():
                yield [Prepared(message.grammar, self._compile(message))]
            case Begin():
                self._begin(message)
            case Fill():
                yield from self._fill(message.rows)
            case Forget():
                for output in message.outputs:
                    self._outputs.pop(output, None)
                    self._seconds.pop(output, None)
                for grammar in message.grammars:
                    self._grammars.pop(grammar, None)

    def _compile(self, message: Prepare) -> str:
        """Return why the grammar is refused, or an empty string."""
        try:
            self._grammars[message.grammar] = self._backend.compile(message.wanted)
        except GrammarRefused as refused:
            return str(refused)
        return ""

    def _begin(self, message: Begin) -> None:
        grammar = self._grammars.get(message.grammar)
        if grammar is not None:
            prompt = np.frombuffer(message.prompt, "<i4").tolist()
            self._outputs[message.output] = ConstrainedOutput(
                grammar.matcher(), prompt, self._config, expects_thought=message.expects_thought
            )

    def _fill(self, rows: list[Row]) -> Iterator[Sequence[Filled]]:
        """Fill rows together, which is faster; one by one, cheap ones first, for a while after a slow step."""
        start = self._clock()
        if self._slow_steps.are_watched or len(rows) == 1:
            for row in sorted(rows, key=lambda row: self._seconds.get(row.output, 0.0)):
                self._works_on(row.output)
                answers = self._fill_together([row])
                self._works_on(0)
                self._seconds[row.output] = answers[0].seconds
                yield answers
        else:
            yield self._fill_together(rows)
        self._slow_steps.record(self._clock() - start)

    def _fill_together(self, rows: list[Row]) -> list[Filled]:
        """Return the answers of rows. CPU time of filling is measured for a single row only."""
        found: list[_Positions] = []
        seconds: dict[int, float] = {}
        reasons: dict[int, str] = {}
        start = self._cpu_clock()
        for row in rows:
            output = self._outputs.get(row.output)
            if output is None or not output.read(row.tokens):
                reasons[row.output] = NOT_ALLOWED if output is None else output.reader.matcher.error or NOT_ALLOWED
            else:
                found.append(_Positions(row, output.reader))
                self._masks[row.places[1:]] = -1
            now = self._cpu_clock()
            seconds[row.output], start = now - start, now
        self.fill_masks(found)
        if len(rows) == 1:
            seconds[rows[0].output] += self._cpu_clock() - start
        for positions in found:
            if not self._masks[positions.row.places[0]].any():
                reasons[positions.row.output] = positions.output.matcher.error or DEAD_END
        return [Filled(row.ask, row.output, seconds[row.output], reasons.get(row.output, "")) for row in rows]

    def fill_masks(self, found: list[_Positions]) -> None:
        """Fill the bitmasks position by position for all rows, so that each round is filled in parallel.

        The mask after a draft that the grammar refuses is arbitrary, because that draft is never accepted.
        """
        active, offset = found, 0
        while active:
            batch = [p for p in active if not p.reader.is_unconstrained]
            if batch:
                self._backend.fill([(p.reader.matcher, p.row.places[offset]) for p in batch], self._masks)
            for positions in active:
                if positions.reader.is_unconstrained:  # the thinking part may be anything but the end of the text
                    self._masks[positions.row.places[offset]] = self._thinking_mask
            active = [p for p in active if offset < len(p.row.drafts) and p.reader.read(p.row.drafts[offset])]
            offset += 1
        for positions in found:
            if positions.row.drafts:
                positions.reader.undo()


def _all_but(banned: Sequence[int], vocab_size: int) -> npt.NDArray[np.int32]:
    """Return a bitmask row that allows every token but ``banned``."""
    row = np.full((vocab_size + 31) // 32, -1, np.int32)
    for token in banned:
        row[token // 32] &= ~np.int32(np.uint32(1 << token % 32).view(np.int32))
    return row
