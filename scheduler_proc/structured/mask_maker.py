"""Reads the tokens of outputs and fills their bitmasks: the work of a helper, without its process."""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from quire.protocol.config import EngineConfig
from quire.protocol.request.grammar_checks import GrammarRefused
from quire.scheduler_proc.structured.backend import CompiledGrammar, GrammarBackend, Masks
from quire.scheduler_proc.structured.constrained_output import ConstrainedOutput, GrammarReader
from quire.scheduler_proc.structured.limits import SlowSteps
from quire.scheduler_proc.structured.mask_messages import (
    Begin,
    Fill,
    Filled,
    Forget,
    FromHelper,
    Prepare,
    Prepared,
    Row,
    ToHelper,
)

NOT_ALLOWED = "a sampled token is not allowed by its grammar"
GATHER_SECONDS = 0.001
"""CPU time of a row from which the answers before it are sent first."""
DEAD_END = "the grammar allows no token of the model's vocabulary here"


@dataclass(slots=True)
class _Positions:
    """One output's rows of the bitmasks: one, and one more for each draft."""

    drafts: list[int]
    places: list[int]
    output: GrammarReader
    reader: GrammarReader = field(init=False)

    def __post_init__(self) -> None:
        self.reader = self.output.fork() if self.drafts else self.output


class MaskMaker:
    """Owns the compiled grammars of a helper, and the position of each of its outputs. Used by one thread."""

    def __init__(
        self,
        backend: GrammarBackend,
        config: EngineConfig,
        masks: Masks,
        works_on: Callable[[int], None] = lambda output: None,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        """
        Args:
            masks: the memory that answers refer to.
            works_on: called with an output before it is computed alone, and with 0 after it.
            cpu_clock: returns the CPU seconds of this process.
        """
        self._backend = backend
        self._config = config
        self._masks = masks
        self._thinking_mask = _all_but(config.model.eos_token_ids, config.model.vocab_size)
        self._works_on = works_on
        self._cpu_clock = cpu_clock
        self._slow_steps = SlowSteps(config.model.vocab_size)
        self._grammars: dict[int, CompiledGrammar] = {}
        self._outputs: dict[int, ConstrainedOutput] = {}
        self._new: set[int] = set()
        """Outputs without masks so far."""
        self._seconds: dict[int, float] = {}
        """CPU time of the newest masks of each output that were computed alone."""

    def handle(self, message: ToHelper) -> Iterator[Sequence[FromHelper]]:
        """Apply a message; yield answers as soon as they are known."""
        match message:
            case Prepare():
                yield [Prepared(message.grammar, self._compile(message))]
            case Begin():
                self._begin(message)
            case Fill():
                yield from self._fill(message)
            case Forget():
                for output in message.outputs:
                    self._outputs.pop(output, None)
                    self._seconds.pop(output, None)
                    self._new.discard(output)
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
            self._new.add(message.output)
            prompt = np.frombuffer(message.prompt, "<i4").tolist()
            self._outputs[message.output] = ConstrainedOutput(
                grammar.matcher(), prompt, self._config, expects_thought=message.expects_thought
            )

    def _fill(self, message: Fill) -> Iterator[Sequence[Filled]]:
        """Fill rows together, which is faster; one by one, cheap ones first, for a while after a slow step."""
        start = self._cpu_clock()
        places = iter(message.places)
        rows = [(row, list(itertools.islice(places, 1 + len(row.drafts)))) for row in message.rows]
        if self._slow_steps.are_watched or len(rows) == 1:
            yield from self._fill_one_by_one(message.ask, rows)
        else:
            reasons = self._fill_together(rows)
            yield [Filled(message.ask, [row.output for row in message.rows], 0.0, reasons)]
        self._slow_steps.record(self._cpu_clock() - start, len(rows))

    def _fill_one_by_one(self, ask: int, rows: list[tuple[Row, list[int]]]) -> Iterator[Sequence[Filled]]:
        """Fill each row alone. Masks that are ready do not wait for one that takes long, or may."""
        answers: list[Filled] = []
        costs = [self._seconds.get(row.output, math.inf) for row, _ in rows]
        for cost, (row, places) in sorted(zip(costs, rows, strict=True), key=itemgetter(0)):
            if answers and cost > GATHER_SECONDS:
                yield answers
                answers = []
            self._works_on(row.output)
            before = self._cpu_clock()
            reasons = self._fill_together([(row, places)])
            seconds = self._seconds[row.output] = self._cpu_clock() - before
            self._works_on(0)
            answers.append(Filled(ask, [row.output], seconds, reasons))
        yield answers

    def _fill_together(self, rows: list[tuple[Row, list[int]]]) -> dict[int, str]:
        """Fill rows, each with its places. Returns why outputs fail."""
        found: list[_Positions] = []
        reasons: dict[int, str] = {}
        for row, places in rows:
            output = self._outputs.get(row.output)
            if output is None or not self._read(output, row, places[0]):
                reasons[row.output] = NOT_ALLOWED if output is None else output.reader.matcher.error or NOT_ALLOWED
            else:
                found.append(_Positions(row.drafts, places, output.reader))
                if row.drafts:
                    self._masks[places[1:]] = -1
        self.fill_masks(found)
        allows = np.any(self._masks[[places[0] for _, places in rows]], axis=1)
        for row, _ in itertools.compress(rows, np.atleast_1d(~allows)):
            if row.output not in reasons:
                reasons[row.output] = self._outputs[row.output].reader.matcher.error or DEAD_END
        return reasons

    def _read(self, output: ConstrainedOutput, row: Row, place: int) -> bool:
        """Read the tokens of a row. Returns False when the grammar does not allow one of them."""
        if row.output in self._new:
            self._new.discard(row.output)
            return self.read_again(output, row.tokens, place)
        return output.read(row.tokens)

    def read_again(self, output: ConstrainedOutput, tokens: list[int], place: int) -> bool:
        """Read tokens that another helper has read one by one.

        Masks are filled between them as it did, because the library's limits count from one mask to the next.
        """
        for token in tokens[:-1]:
            if not output.read([token]):
                return False
            if not output.reader.is_unconstrained:
                self._backend.fill([(output.reader.matcher, place)], self._masks)
        return output.read(tokens[-1:])

    def fill_masks(self, found: list[_Positions]) -> None:
        """Fill the bitmasks position by position for all rows, so that each round is filled in parallel.

        The mask after a draft that the grammar refuses is arbitrary, because that draft is never accepted.
        """
        active, offset = found, 0
        while active:
            batch = [p for p in active if not p.reader.is_unconstrained]
            if batch:
                self._backend.fill([(p.reader.matcher, p.places[offset]) for p in batch], self._masks)
            for positions in active:
                if positions.reader.is_unconstrained:  # the thinking part may be anything but the end of the text
                    self._masks[positions.places[offset]] = self._thinking_mask
            active = [p for p in active if offset < len(p.drafts) and p.reader.read(p.drafts[offset])]
            offset += 1
        for positions in found:
            if positions.drafts:
                positions.reader.undo()


def _all_but(banned: Sequence[int], vocab_size: int) -> npt.NDArray[np.int32]:
    """Return a bitmask row that allows every token but ``banned``."""
    row = np.full((vocab_size + 31) // 32, -1, np.int32)
    for token in banned:
        row[token // 32] &= ~np.int32(np.uint32(1 << token % 32).view(np.int32))
    return row
