"""Steps in flight (sent, not yet answered), and validation of their results."""

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from quire.protocol.model.pooling_config import PoolingConfig
from quire.protocol.wire.arrays import Int32
from quire.protocol.wire.logprobs import Logprobs, PromptLogprobs
from quire.protocol.wire.side_arrays import RoutedExperts
from quire.protocol.wire.worker_messages import ModelRunnerOutput
from quire.scheduler_proc.core.steady_decode import SteadyBatch
from quire.scheduler_proc.core.step import StepRow
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
        pooled: the rows of pooled requests.
        awaits_inputs: the workers wait for the masks of the ``constrained`` rows.
    """

    step: int
    rows: dict[int, StepRow]
    retired: list[int]
    num_tokens: int
    num_drafts: int = 0
    prefill: Prefill = NO_PREFILL
    pooled: list[StepRow] = field(default_factory=list)
    steady: SteadyBatch = field(default_factory=dict)
    only_steady: bool = True
    awaits_inputs: bool = False

    def add(self, row: StepRow) -> bool:
        """Count a row of the step, which is sent now, and advance its request. Returns whether it samples."""
        request = row.request
        if row.is_prefill:
            start = request.num_computed_tokens
            self.prefill += Prefill.between(start, start + row.num_tokens)
        if request.pooling is not None:
            self.pooled.append(row)
            row.first = request.num_computed_tokens
            row.pools = request.sent(row.num_tokens, 0)
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

    def client_handle(self, handle: int) -> int:
        """Return the handle of the client's request for one of the step: that of its leader for a beam."""
        request = self.member(handle)
        return handle if request is None or request.leader is None else request.leader.handle


@dataclass(slots=True)
class Sampled:
    """A validated result.

    Attributes:
        tokens: sampled tokens in the order of ``handles``, ``counts[i]`` of them for ``handles[i]``.
        counts: None if there is one token per handle.
        last_tokens: the last token of each handle.
        verified: number of drafts verified per handle; None if there were none.
        logprobs: log probabilities of the tokens that have them.
    """

    handles: Int32
    tokens: Int32
    counts: Int32 | None
    last_tokens: Int32
    verified: Int32 | None
    logprobs: Logprobs | None

    @classmethod
    def of(cls, output: ModelRunnerOutput, handles: Int32, tokens: Int32) -> "Sampled":
        counts = output.counts
        last = tokens if counts is None else tokens[np.cumsum(counts) - 1]
        return cls(handles, tokens, counts, last, output.drafts, output.logprobs)

    def count(self, position: int) -> int:
        return 1 if self.counts is None else int(self.counts[position])

    def num_verified(self, position: int) -> int:
        return 0 if self.verified is None else int(self.verified[position])

    def candidates(self, position: int) -> list[tuple[int, float]]:
        """Return (token id, log probability) of the most likely tokens of the handle at ``position``."""
        at = position if self.counts is None else int(self.counts[:position].sum())
        if self.logprobs is None or at not in self.logprobs.rows:
            return []
        ids, values, _ = self.logprobs.arrays.columns()
        index = self.logprobs.rows.index(at)
        return list(zip(ids[index, 1:].tolist(), values[index, 1:].tolist(), strict=True))

    def row(self, position: int) -> list[int]:
        """Return all tokens of the handle at ``position``."""
        if self.counts is None:
            return [int(self.tokens[position])]
        end = int(self.counts[: position + 1].sum())
        row: list[int] = self.tokens[end - int(self.counts[position]) : end].tolist()
        return row


class StepsInFlight:
    """The queue of steps in flight, and the row order of the last result that contained handles."""

    def __init__(self, vocab_size: int, pooling: PoolingConfig | None = None) -> None:
        self.records: deque[InFlightStep] = deque()
        self.handles: Int32 = NO_HANDLES
        """Handles of the last result that contained handles; they apply to results without."""
        self._positions: dict[int, int] | None = {}
        self._vocab_size = vocab_size
        self._pooling = pooling
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

    def match(self, output: ModelRunnerOutput, *, is_opaque: bool = False) -> tuple[InFlightStep, Sampled]:
        """Validate the result of the oldest step; return that step, which the caller must remove, and its tokens.

        Args:
            is_opaque: the result is from a trace, which has no vectors.

        Raises:
            WorkerFault: ``output`` cannot be the result of the oldest step; nothing has changed.
        """
        record = self.expected_step(output.step)
        tokens = NO_HANDLES if output.tokens is None else output.tokens
        handles = self.handles if output.handles is None else output.handles
        self.check_handles(record, output, handles)
        check_counts(record, output, handles, tokens)
        # Viewed as unsigned, a negative id is a large one.
        if len(tokens) and tokens.view(np.uint32).max() >= self._vocab_size:
            worst = int(tokens.view(np.uint32).max().view(np.int32))
            _raise(output, f"token id {worst} outside of the vocabulary of {self._vocab_size} tokens")
        if not 0.0 <= output.seconds < math.inf:
            _raise(output, f"invalid step duration {output.seconds}")
        if output.bad or output.failed:
            _raise(output, _marks_fault(record, output, handles), "bad")
        if output.logprobs is not None:
            token_handles = handles if output.counts is None else np.repeat(handles, output.counts)
            _raise(output, logprobs_fault(record, output, output.logprobs, token_handles, self._vocab_size))
        if output.prompt_logprobs is not None:
            _raise(output, prompt_logprobs_fault(record, output.prompt_logprobs, self._vocab_size))
        if output.pooled is not None or (record.pooled and not is_opaque):
            _raise(output, pooled_fault(record, output, self._pooling))
        if output.routed_experts is not None:
            _raise(output, experts_fault(record, output.routed_experts))
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
    pooled = {row.request.handle for row in record.pooled}
    extra = sorted(_lost(result) - set(handles.tolist()) - pooled)
    return f"bad or failed handles that did not sample: {extra[:8]}" if extra else None


def _lost(result: ModelRunnerOutput) -> set[int]:
    """Return the handles whose part of the result does not count: their clients get an error."""
    return {*result.bad, *(handle for handle, _ in result.failed)}


def logprobs_fault(
    record: InFlightStep, result: ModelRunnerOutput, logprobs: Logprobs, token_handles: Int32, vocab_size: int
) -> str | None:
    """Return why the logprobs of a result are invalid, or None. ``token_handles``: the handle of each token."""
    rows = logprobs.rows
    if len(set(rows)) != len(rows):
        return "two logprobs for one token"
    if not set(rows) <= set(range(len(token_handles))):
        return f"logprobs for token {max(rows, key=abs)}, but the result has {len(token_handles)} tokens"
    handles = token_handles[rows].tolist() if rows else []
    most = 0
    for handle in handles:
        request = record.member(handle)
        if request is None or (wanted := request.sampling.num_candidates) is None:
            return f"logprobs for handle {handle}, which did not request them"
        most = max(most, wanted)
    if logprobs.arrays.width > most + 1:
        return f"log probabilities of {logprobs.arrays.width - 1} tokens at a position, but {most} were requested"
    if (fault := logprobs.arrays.shape_error(len(rows), vocab_size)) is not None:
        return fault
    lost = _lost(result)  # their values are not checked: the logits may not be finite
    arrays = logprobs.arrays
    if lost:
        arrays = arrays.take(np.array([handle not in lost for handle in handles], np.bool_))
    return arrays.value_error(vocab_size)


def prompt_logprobs_fault(record: InFlightStep, prompts: PromptLogprobs, vocab_size: int) -> str | None:
    """Return why the prompt logprobs of a result are invalid, or None."""
    handles, starts, counts = prompts.handles, prompts.starts, prompts.counts
    if not len(handles) == len(starts) == len(counts) == len(set(handles)):
        sizes = f"{len(set(handles))} distinct of {len(handles)} handles, {len(starts)} starts, {len(counts)} counts"
        return f"handles, starts and counts of prompt logprobs do not match: {sizes}"
    for handle, start, count in zip(handles, starts, counts, strict=True):
        request = record.member(handle)
        if request is None or request.sampling.prompt_logprobs is None:
            return f"prompt logprobs for handle {handle}, which did not request them"
        if start < 1 or count < 1 or start + count > request.num_prompt_tokens:
            part = f"from {start}, {count} tokens"
            return (
                f"prompt logprobs of handle {handle} ({part}) outside of its {request.num_prompt_tokens} prompt tokens"
            )
    return prompts.arrays.shape_error(sum(counts), vocab_size)


def pooled_fault(record: InFlightStep, result: ModelRunnerOutput, pooling: PoolingConfig | None) -> str | None:
    """Return why the pooled rows of a result are not those of the step, or None. Values are not checked."""
    pooled = result.pooled
    handles = [] if pooled is None else pooled.handles
    parts = {row.request.handle: _pooled_part(row, pooling) for row in record.pooled}
    missing = {handle for handle, part in parts.items() if part is not None} - set(handles) - _lost(result)
    if missing:
        return f"no pooled rows for handles {sorted(missing)[:8]}"
    if pooled is None:
        return None
    if (fault := pooled.shape_error()) is not None:
        return f"pooled {fault}"
    if len(set(handles)) < len(handles):
        return "a handle occurs twice in the pooled rows"
    for handle, start, count, width in zip(handles, pooled.starts, pooled.counts, pooled.widths, strict=True):
        if (expected := parts.get(handle)) is None:
            return f"pooled rows for handle {handle}, which has none in this step"
        if (start, count, width) != expected:
            found = (start, count, width)
            return f"pooled rows of handle {handle} have start, count and width {found}, expected {expected}"
    return None


def _pooled_part(row: StepRow, pooling: PoolingConfig | None) -> tuple[int, int, int] | None:
    """Return the start, number and width of the rows that the result has for a row of the step, or None without."""
    params = row.request.pooling
    if params is None or pooling is None or not (row.pools or params.task == "token_embed"):
        return None
    start, count = (row.first, row.num_tokens) if params.task == "token_embed" else (0, 1)
    return start, count, pooling.width(params.task, params.dimensions)


def experts_fault(record: InFlightStep, experts: RoutedExperts) -> str | None:
    """Return why the routed experts of a result are invalid, or None."""
    if (fault := experts.shape_error()) is not None:
        return f"routed experts: {fault}"
    for handle, start, count, width in zip(
        experts.handles, experts.starts, experts.counts, experts.widths, strict=True
    ):
        request = record.member(handle)
        if request is None or not request.sampling.return_routed_experts:
            return f"routed experts for handle {handle}, which did not request them"
        if width != request.row_bytes // 4:
            return f"routed experts of handle {handle} have {width} values a row, expected {request.row_bytes // 4}"
        most = request.num_tokens + request.num_output_placeholders - 1  # no step in flight computes the last one
        is_dropped = request.status.is_finished or record.step <= request.ignore_results_until
        if count < 1 or (start + count > most and not is_dropped):
            return f"routed experts of handle {handle} (from {start}, {count} rows) outside of its {most} positions"
    return None
