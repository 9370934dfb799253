"""Steps in flight (sent, not yet answered), and validation of their results."""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from quire.protocol.config import EngineConfig
from quire.protocol.model.model_config import ModelConfig
from quire.protocol.wire.arrays import Int32
from quire.protocol.wire.side_rows import LOGPROBS, SIDE_KINDS, Rows, RowsOf, SideKind, SideRows, find_rows
from quire.protocol.wire.worker_messages import ModelRunnerOutput
from quire.scheduler_proc.core.steady_decode import SteadyBatch
from quire.scheduler_proc.core.step import DueRows, StepRow
from quire.scheduler_proc.costs.costs import Prefill
from quire.scheduler_proc.requests.request import Request

NO_PREFILL = Prefill()
NO_HANDLES = np.zeros(0, np.int32)


class WorkerFault(Exception):
    """A worker's result is invalid; no part of it was applied.

    Attributes:
        field: the field of a trace's ``Result`` line that is invalid.
    """

    def __init__(self, text: str, field: str = "counts") -> None:
        super().__init__(text)
        self.field = field


class StepTooLarge(WorkerFault):
    """The worker ran out of memory in a step; no part of it was computed."""


@dataclass(slots=True)
class InFlightStep:
    """A step that was sent and is not yet answered.

    Requests in steady decode have no rows: all steps share one mapping until a request joins or leaves, because one
    row per request would make each step cost O(batch).

    Attributes:
        rows: by handle, the rows of requests outside of steady decode, and of those that left it after the step was
            sent.
        steady: requests in steady decode when the step was sent, including those that join in it. All of them sample.
        only_steady: no request outside of ``steady`` samples.
        retired: handles that become free when this step is answered.
        num_tokens: positions that the step computes if the proposer finds all ``num_drafts`` drafts.
        prefill: the positions that belong to prefills.
        without_tokens: the rows of requests that generate nothing.
        awaits_inputs: the workers wait for the masks of the ``constrained`` rows.
    """

    step: int
    rows: dict[int, StepRow]
    retired: list[int]
    num_tokens: int
    num_drafts: int = 0
    prefill: Prefill = NO_PREFILL
    without_tokens: list[StepRow] = field(default_factory=list)
    steady: SteadyBatch = field(default_factory=dict)
    only_steady: bool = True
    awaits_inputs: bool = False

    def add(self, row: StepRow) -> bool:
        """Count a row of the step, which is sent now, and advance its request. Returns whether it samples."""
        request = row.request
        if row.is_prefill:
            start = request.num_computed_tokens
            self.prefill += Prefill.between(start, start + row.num_tokens)
        if not request.generates:
            self.without_tokens.append(row)
            row.first = request.num_computed_tokens
            row.completes = request.sent(row.num_tokens, 0)
            return False
        if not request.sent(row.num_tokens, row.num_drafts):
            return False
        row.samples = True
        self.num_drafts += row.num_drafts
        return True

    @property
    def constrained(self) -> list[StepRow]:
        """Rows that sample with a grammar."""
        return [row for row in self.rows.values() if row.samples and row.request.has_grammar]

    def requests(self) -> dict[int, Request]:
        """Return all requests of the step by handle; those that sample are first."""
        rows = sorted(self.rows.items(), key=lambda item: not item[1].samples)
        return self.steady | {handle: row.request for handle, row in rows}

    def member(self, handle: int) -> Request | None:
        """Return the request with this handle, whether it samples or not, or None."""
        row = self.rows.get(handle)
        return self.steady.get(handle) if row is None else row.request


@dataclass(slots=True)
class Sampled:
    """A validated result.

    Attributes:
        tokens: sampled tokens in the order of ``handles``, ``counts[i]`` of them for ``handles[i]``.
        counts: None if there is one token per handle.
        last_tokens: the last token of each handle.
        verified: number of drafts verified per handle; None if there were none.
        side: rows beside the tokens.
    """

    handles: Int32
    tokens: Int32
    counts: Int32 | None
    last_tokens: Int32
    verified: Int32 | None
    side: list[SideRows]
    _candidates: dict[int, Rows] | None = None
    """Log probabilities by handle."""

    @classmethod
    def of(cls, output: ModelRunnerOutput, handles: Int32, tokens: Int32) -> "Sampled":
        counts = output.counts
        last = tokens if counts is None else tokens[np.cumsum(counts) - 1]
        return cls(handles, tokens, counts, last, output.drafts, output.side)

    def count(self, position: int) -> int:
        return 1 if self.counts is None else int(self.counts[position])

    def num_verified(self, position: int) -> int:
        return 0 if self.verified is None else int(self.verified[position])

    def candidates(self, position: int) -> list[tuple[int, float]]:
        """Return (token id, log probability) of the most likely tokens of the handle at ``position``."""
        if self._candidates is None:
            found = find_rows(self.side, LOGPROBS)
            self._candidates = {} if found is None else {handle: rows for handle, _, rows in found.parts()}
        rows = self._candidates.get(int(self.handles[position]))
        if rows is None:
            return []
        ids, _, values = rows
        return list(zip(ids[0, 1:].tolist(), values[0, 1:].tolist(), strict=True))

    def row(self, position: int) -> list[int]:
        """Return all tokens of the handle at ``position``."""
        if self.counts is None:
            return [int(self.tokens[position])]
        end = int(self.counts[: position + 1].sum())
        row: list[int] = self.tokens[end - int(self.counts[position]) : end].tolist()
        return row


class StepsInFlight:
    """The queue of steps in flight, and the row order of the last result that contained handles."""

    def __init__(self, config: EngineConfig, due_rows: Callable[[StepRow], DueRows | None]) -> None:
        """``due_rows``: as of ``Feature``, for a row of a request that generates nothing."""
        self.records: deque[InFlightStep] = deque()
        self.handles: Int32 = NO_HANDLES
        """Handles of the last result that contained handles; they apply to results without."""
        self._positions: dict[int, int] | None = {}
        self._config = config
        self._due_rows = due_rows
        self.verified: SteadyBatch | None = None
        """The steady batch if no other request sampled in the last result; otherwise None."""

    def __len__(self) -> int:
        return len(self.records)

    def set_handles(self, handles: Int32) -> None:
        """Use ``handles`` for all following results without handles."""
        self.handles, self._positions = handles, None

    def position_of(self, handle: int) -> int:
        """Return the index of ``handle`` in ``handles``."""
        if self._positions is None:
            self._positions = dict(zip(self.handles.tolist(), range(len(self.handles)), strict=True))
        return self._positions[handle]

    def match(self, output: ModelRunnerOutput, *, is_recorded: bool = False) -> tuple[InFlightStep, Sampled]:
        """Validate the result of the oldest step; return that step, which the caller must remove, and its tokens.

        Args:
            is_recorded: the result is from a trace, which has no rows beside tokens.

        Raises:
            WorkerFault: ``output`` cannot be the result of the oldest step; nothing has changed.
        """
        record = self.expected_step(output.step)
        tokens = NO_HANDLES if output.tokens is None else output.tokens
        handles = self.handles if output.handles is None else output.handles
        self.check_handles(record, output, handles)
        check_counts(record, output, handles, tokens)
        # Viewed as unsigned, a negative id is a large one.
        if len(tokens) and tokens.view(np.uint32).max() >= self._config.model.vocab_size:
            worst = int(tokens.view(np.uint32).max().view(np.int32))
            _raise(output, f"token id {worst} outside of the vocabulary of {self._config.model.vocab_size} tokens")
        if not 0.0 <= output.seconds < math.inf:
            _raise(output, f"invalid step duration {output.seconds}")
        if output.bad or output.failed:
            _raise(output, _marks_fault(record, output, handles), "bad")
        due = {row.request.handle: self._due_rows(row) for row in record.without_tokens if not is_recorded}
        if output.side or due:
            _raise(output, side_fault(record, output, handles, self._config.model, due))
        if output.handles is not None:
            self.set_handles(output.handles)
        self.verified = record.steady if record.only_steady else None
        return record, Sampled.of(output, handles, tokens)

    def drop_all(self) -> list[InFlightStep]:
        """Remove and return all steps in flight, which will not be answered."""
        dropped = list(self.records)
        self.records.clear()
        return dropped

    def expected_step(self, step: int) -> InFlightStep:
        if not self.records or self.records[0].step != step:
            expected = self.records[0].step if self.records else "none"
            raise WorkerFault(f"unexpected result of step {step}, expected {expected}", "step")
        return self.records[0]

    def check_handles(self, record: InFlightStep, output: ModelRunnerOutput, handles: Int32) -> None:
        """Raise WorkerFault unless exactly the requests that sample have tokens.

        O(1) while the batch is unchanged, because the same handles were already checked against it.
        """
        # The same mapping object means the same members, because a shared batch is copied before it changes.
        if output.handles is None and record.only_steady and record.steady is self.verified:
            return
        received = handles.tolist()
        expected = record.steady.keys() | {handle for handle, row in record.rows.items() if row.samples}
        if len(received) != len(expected) or set(received) != expected:
            missing, extra = sorted(expected - set(received))[:8], sorted(set(received) - expected)[:8]
            detail = f"missing {missing}, unexpected {extra}" if missing or extra else "a handle occurs twice"
            _raise(output, f"handles differ from those of the sampling requests: {detail}", "handles")


def _raise(output: ModelRunnerOutput, fault: str | None, field: str = "counts") -> None:
    if fault is not None:
        raise WorkerFault(f"result of step {output.step}: {fault}", field)


def check_counts(record: InFlightStep, output: ModelRunnerOutput, handles: Int32, tokens: Int32) -> None:
    counts, verified = output.counts, output.drafts
    if counts is None and len(tokens) != len(handles):
        _raise(output, f"{len(tokens)} tokens for {len(handles)} requests")
    if counts is None and verified is None:
        return
    if counts is not None and (len(counts) != len(handles) or int(counts.sum()) != len(tokens)):
        sizes = f"{len(counts)} counts with sum {int(counts.sum())}, {len(handles)} handles, {len(tokens)} tokens"
        _raise(output, f"counts do not match handles and tokens: {sizes}")
    if verified is None:
        verified = np.zeros(len(handles), np.int32)
    if len(verified) != len(handles):
        _raise(output, f"{len(verified)} counts of drafts for {len(handles)} handles", "drafts")
    if (verified < 0).any():
        _raise(output, f"handle {handles[verified.argmin()]} has {verified.min()} drafts", "drafts")
    rows = record.rows
    most = np.array([rows[h].num_drafts if h in rows else 0 for h in handles.tolist()], np.int32)
    if (verified > most).any():
        at = int((verified > most).argmax())
        _raise(output, f"handle {handles[at]} has {verified[at]} drafts, more than the {most[at]} scheduled", "drafts")
    if counts is not None:
        wrong = (counts < 1) | (counts - 1 > verified)
        if wrong.any():
            at = int(wrong.argmax())
            _raise(output, f"handle {handles[at]} has {counts[at]} tokens, expected 1 to {1 + verified[at]}")


def _marks_fault(record: InFlightStep, result: ModelRunnerOutput, handles: Int32) -> str | None:
    others = {row.request.handle for row in record.without_tokens}
    extra = sorted(_lost(result) - set(handles.tolist()) - others)
    return f"bad or failed handles that did not sample: {extra[:8]}" if extra else None


def _lost(result: ModelRunnerOutput) -> set[int]:
    """Return the handles whose part of the result does not count: their clients get an error."""
    return {*result.bad, *(handle for handle, _ in result.failed)}


def side_fault(
    record: InFlightStep,
    result: ModelRunnerOutput,
    handles: Int32,
    model: ModelConfig,
    due: dict[int, DueRows | None],
) -> str | None:
    """Return why the rows beside the tokens of a result are invalid, or None. The shapes of all are checked first."""
    if len({rows.kind for rows in result.side}) < len(result.side):
        return "two parts of one kind beside the tokens"
    lost = _lost(result)
    for rows in result.side:
        if (fault := rows.shape_error()) is not None:
            return f"{SIDE_KINDS[rows.kind].name if rows.kind in SIDE_KINDS else 'rows'}: {fault}"
        kind = SIDE_KINDS[rows.kind]
        # The only loop over requests in steady decode, for those with log probabilities.
        counts = _num_tokens(handles, result.counts) if kind.rows is RowsOf.TOKENS else None
        member = record.member if record.rows else record.steady.get
        for handle, start, count, width in rows.spans:
            request = member(handle)
            expected = None if request is None else _expected(kind, record, request, model, counts, due.get(handle))
            if expected is None:
                return f"{kind.name} for handle {handle}, which has none in this step"
            values, first, end, is_whole = expected
            if width != values or start < first or start + count > end or (is_whole and count < end - first):
                part = f"{count} rows from {start} with {width} values"
                return f"{kind.name} of handle {handle}: {part}, expected rows {first} to {end} with {values} values"
        if kind.value_error is not None:
            # Values of a lost request are not checked: its logits may not be finite.
            kept = [0 if handle in lost else count for handle, _, count, _ in rows.spans] if lost else None
            valid = rows if kept is None else rows.first_rows(kept)
            if valid is not None and (fault := kind.value_error(valid, model.vocab_size)) is not None:
                return fault
    found = {(rows.kind, handle) for rows in result.side for handle in rows.handles}
    for handle, rows_due in due.items():
        if rows_due is not None and (rows_due.kind.number, handle) not in found and handle not in lost:
            return f"no {rows_due.kind.name} for handle {handle}"
    return None


def _num_tokens(handles: Int32, counts: Int32 | None) -> dict[int, int]:
    """Return the number of tokens of each handle of a result."""
    return dict(zip(handles.tolist(), [1] * len(handles) if counts is None else counts.tolist(), strict=True))


def _expected(
    kind: SideKind,
    record: InFlightStep,
    request: Request,
    model: ModelConfig,
    counts: dict[int, int] | None,
    due: DueRows | None,
) -> tuple[int, int, int, bool] | None:
    """Return how many values the rows of a request in a result have, between which rows they are, and whether the
    result must have all of them; None: it has none of this kind.

    ``counts``: number of tokens of each handle, for rows of tokens.
    """
    if due is not None:
        return (due.width, due.first, due.end, True) if due.kind is kind else None
    width = kind.width(request.sampling, None, model)
    if width is None:
        return None
    if counts is not None:
        return width, 0, counts.get(request.handle, 0), True
    if kind.rows is RowsOf.PROMPT:
        return width, 1, request.num_prompt_tokens, False
    if request.status.is_finished or record.step <= request.ignore_results_until:
        return width, 0, 2**31, False  # its rows are dropped, and its progress is another one by now
    end = request.num_tokens + request.num_output_placeholders - 1  # the last one is not computed
    return width, 0, end, False
