"""Steps that were sent and are not answered, and what an answer must look like."""

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from quire.protocol.wire.arrays import Int32
from quire.protocol.wire.logprobs import Logprobs, PromptLogprobs
from quire.protocol.wire.worker_messages import ModelRunnerOutput
from quire.scheduler_proc.core.steady_decode import SteadyBatch
from quire.scheduler_proc.core.step import StepRow
from quire.scheduler_proc.requests.request import Request

NO_HANDLES = np.zeros(0, np.int32)


class WorkerFault(Exception):
    """A worker's result cannot be what it computed: nothing of it was applied."""


class StepTooLarge(WorkerFault):
    """The worker's memory did not suffice for a step: nothing of it was computed."""


@dataclass(slots=True)
class InFlightStep:
    """A step sent and not yet answered.

    The rows of requests in steady decode are one mapping that all steps share until a request joins or leaves: a row
    each would cost every step the whole batch.

    Attributes:
        rows: what was decided for each request that was not in steady decode, by handle; also for each that has left
            steady decode since.
        steady: requests in steady decode when the step was sent, those that it brings there included; each samples.
        only_steady: no other request than those of ``steady`` samples.
        retired: handles that are free once this step is answered.
        num_tokens: positions that it computes if there are as many drafts as there may be, ``num_drafts``.
        has_prefill: some of them are of prompts.
        awaits_inputs: the workers wait for the masks of the ``constrained`` rows.
    """

    step: int
    rows: dict[int, StepRow]
    retired: list[int]
    num_tokens: int
    num_drafts: int = 0
    has_prefill: bool = False
    steady: SteadyBatch = field(default_factory=dict)
    only_steady: bool = True
    awaits_inputs: bool = False

    @property
    def constrained(self) -> list[StepRow]:
        """Rows that sample by a grammar."""
        return [row for row in self.rows.values() if row.samples and row.request.has_grammar]

    def requests(self) -> dict[int, Request]:
        """All requests in it by handle, those that sample first."""
        rows = sorted(self.rows.items(), key=lambda item: not item[1].samples)
        return self.steady | {handle: row.request for handle, row in rows}

    def member(self, handle: int) -> Request | None:
        """The request under this handle, sampling or not."""
        row = self.rows.get(handle)
        return self.steady.get(handle) if row is None else row.request


@dataclass(slots=True)
class Sampled:
    """A checked result. ``tokens`` has ``counts[i]`` entries for ``handles[i]``; ``counts`` None: one each.

    ``last_tokens``: the last one of each. ``verified``: how many drafts each had; None: none had any.
    """

    handles: Int32
    tokens: Int32
    counts: Int32 | None
    last_tokens: Int32
    verified: Int32 | None

    @classmethod
    def of(cls, handles: Int32, tokens: Int32, counts: Int32 | None, verified: Int32 | None) -> "Sampled":
        return cls(handles, tokens, counts, tokens if counts is None else tokens[np.cumsum(counts) - 1], verified)

    def count(self, position: int) -> int:
        return 1 if self.counts is None else int(self.counts[position])

    def num_verified(self, position: int) -> int:
        return 0 if self.verified is None else int(self.verified[position])

    def row(self, position: int) -> list[int]:
        """All tokens of the handle at ``position``."""
        if self.counts is None:
            return [int(self.tokens[position])]
        end = int(self.counts[: position + 1].sum())
        row: list[int] = self.tokens[end - int(self.counts[position]) : end].tolist()
        return row


class StepsInFlight:
    """The queue of steps in flight, and the order of the workers' rows in their last result that gave it."""

    def __init__(self, vocab_size: int) -> None:
        self.records: deque[InFlightStep] = deque()
        self.handles: Int32 = NO_HANDLES
        """The requests of a result that does not name them: the same as of the last one that did."""
        self._positions: dict[int, int] | None = {}
        self._vocab_size = vocab_size
        self.verified: SteadyBatch | None = None
        """The steady batch whose members alone sampled in the last result."""

    def __len__(self) -> int:
        return len(self.records)

    def set_handles(self, handles: Int32) -> None:
        """Results that do not name their requests mean ``handles`` from now on."""
        self.handles, self._positions = handles, None

    def position_of(self, handle: int) -> int:
        """Index of ``handle`` among ``handles``."""
        if self._positions is None:
            self._positions = dict(zip(self.handles.tolist(), range(len(self.handles)), strict=True))
        return self._positions[handle]

    def match(self, output: ModelRunnerOutput) -> tuple[InFlightStep, Sampled]:
        """The oldest step, which ``output`` answers and which the caller now has to take off, and its tokens.

        Raises:
            WorkerFault: it cannot be the answer to the oldest step; then nothing has changed.
        """
        record = self.expected_step(output.step)
        tokens = NO_HANDLES if output.tokens is None else output.tokens
        handles = self.handles if output.handles is None else output.handles
        self.check_handles(record, output, handles)
        check_counts(record, output, handles, tokens)
        # As unsigned, a negative id is a huge one.
        if len(tokens) and tokens.view(np.uint32).max() >= self._vocab_size:
            raise WorkerFault(f"result of step {output.step}: a token id outside the vocabulary")
        if not 0.0 <= output.seconds < math.inf:
            _raise(output, "it took no time that there is")
        if output.bad or output.failed:
            _raise(output, _fault_of_marks(output, handles))
        if output.logprobs is not None:
            whose = handles if output.counts is None else np.repeat(handles, output.counts)
            _raise(output, fault_of_logprobs(record, output, output.logprobs, whose, self._vocab_size))
        if output.prompt_logprobs is not None:
            _raise(output, fault_of_prompts(record, output.prompt_logprobs, self._vocab_size))
        if output.handles is not None:
            self.set_handles(output.handles)
        self.verified = record.steady if record.only_steady else None
        return record, Sampled.of(handles, tokens, output.counts, output.drafts)

    def drop_all(self) -> list[InFlightStep]:
        """None of the steps in flight will be answered."""
        dropped = list(self.records)
        self.records.clear()
        return dropped

    def expected_step(self, step: int) -> InFlightStep:
        if not self.records or self.records[0].step != step:
            expected = self.records[0].step if self.records else "none"
            raise WorkerFault(f"result of step {step} came, expected {expected}")
        return self.records[0]

    def check_handles(self, record: InFlightStep, output: ModelRunnerOutput, handles: Int32) -> None:
        """Cheap while nothing changed: then the same batch was checked against the same handles."""
        if output.handles is None and record.only_steady and record.steady is self.verified:
            return
        told = handles.tolist()
        expected = record.steady.keys() | {handle for handle, row in record.rows.items() if row.samples}
        if len(told) != len(expected) or set(told) != expected:
            raise WorkerFault(f"result of step {output.step}: tokens of other requests than those that sample")


def _raise(output: ModelRunnerOutput, fault: str | None) -> None:
    if fault is not None:
        raise WorkerFault(f"result of step {output.step}: {fault}")


def check_counts(record: InFlightStep, output: ModelRunnerOutput, handles: Int32, tokens: Int32) -> None:
    counts, verified = output.counts, output.drafts
    if counts is None and len(tokens) != len(handles):
        _raise(output, f"{len(tokens)} tokens for {len(handles)} requests")
    if counts is None and verified is None:
        return
    if counts is not None and (len(counts) != len(handles) or int(counts.sum()) != len(tokens)):
        _raise(output, "its counts do not add up")
    if verified is None:
        verified = np.zeros(len(handles), np.int32)
    if len(verified) != len(handles) or (verified < 0).any():
        _raise(output, "its drafts do not add up")
    rows = record.rows
    most = np.array([rows[h].num_drafts if h in rows else 0 for h in handles.tolist()], np.int32)
    if (verified > most).any():
        _raise(output, "more drafts of a request than it was to have")
    if counts is not None and ((counts < 1).any() or (counts - 1 > verified).any()):
        _raise(output, "more tokens of a request than it had drafts for")


def _fault_of_marks(result: ModelRunnerOutput, handles: Int32) -> str | None:
    marked = {*result.bad, *(handle for handle, _ in result.failed)}
    return None if marked <= set(handles.tolist()) else "bad or failed rows that did not sample"


def fault_of_logprobs(
    record: InFlightStep, result: ModelRunnerOutput, told: Logprobs, whose: Int32, vocab_size: int
) -> str | None:
    """Why a result's log probabilities cannot belong to its tokens; None when they can. ``whose``: handle per token."""
    rows = told.rows
    if len(set(rows)) != len(rows) or not set(rows) <= set(range(len(whose))):
        return "log probabilities of rows that did not sample"
    handles = whose[rows].tolist() if rows else []
    for handle in handles:
        request = record.member(handle)
        if request is None or request.sampling.logprobs is None:
            return "log probabilities that no request asked for"
    if (fault := told.arrays.shape_error(len(rows), vocab_size)) is not None:
        return fault
    # Logits that are not finite have no log probabilities either, and their client gets an error instead.
    lost = {*result.bad, *(handle for handle, _ in result.failed)}
    sound = told.arrays.take(np.array([handle not in lost for handle in handles], np.bool_)) if lost else told.arrays
    return sound.value_error(vocab_size)


def fault_of_prompts(record: InFlightStep, told: PromptLogprobs, vocab_size: int) -> str | None:
    """The same for log probabilities of prompt tokens, and the step's requests."""
    handles, starts, counts = told.handles, told.starts, told.counts
    if not len(handles) == len(starts) == len(counts) == len(set(handles)):
        return "log probabilities of prompts do not add up"
    for handle, start, count in zip(handles, starts, counts, strict=True):
        request = record.member(handle)
        if request is None or request.sampling.prompt_logprobs is None:
            return "log probabilities of a prompt that no request asked for"
        if start < 1 or count < 1 or start + count > request.num_prompt_tokens:
            return "log probabilities beyond a prompt"
    return told.arrays.shape_error(sum(counts), vocab_size)
