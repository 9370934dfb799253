"""Results of steps: what a worker may answer to a step, and what was sampled by a valid answer."""

import math
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

import numpy as np

from quire.protocol.model.model_config import ModelConfig
from quire.protocol.wire.arrays import Int32
from quire.protocol.wire.side_rows import LOGPROBS, SIDE_KINDS, Rows, RowsOf, SideKind, SideRows, find_rows
from quire.protocol.wire.worker_messages import ModelRunnerOutput
from quire.scheduler_proc.messages.steps import InFlightStep
from quire.scheduler_proc.requests.request import Request


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


class DueRows(NamedTuple):
    """Rows beside tokens that are due, of ``width`` values each: those with numbers from ``first`` up to ``end``."""

    kind: SideKind
    width: int
    first: int
    end: int


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


def _fault(output: ModelRunnerOutput, fault: str, field: str = "counts") -> NoReturn:
    raise WorkerFault(f"result of step {output.step}: {fault}", field)


def check_handles(record: InFlightStep, output: ModelRunnerOutput, handles: Int32) -> None:
    """Raise WorkerFault unless exactly the requests that sample have tokens."""
    received = handles.tolist()
    expected = record.steady.keys() | {handle for handle, row in record.rows.items() if row.samples}
    if len(received) != len(expected) or set(received) != expected:
        missing, extra = sorted(expected - set(received))[:8], sorted(set(received) - expected)[:8]
        detail = f"missing {missing}, unexpected {extra}" if missing or extra else "a handle occurs twice"
        _fault(output, f"handles differ from those of the sampling requests: {detail}", "handles")


def check_tokens(
    record: InFlightStep, output: ModelRunnerOutput, handles: Int32, tokens: Int32, vocab_size: int
) -> None:
    """Raise WorkerFault unless tokens, their counts, and the marks of lost requests are valid."""
    check_counts(record, output, handles, tokens)
    # Viewed as unsigned, a negative id is a large one.
    if len(tokens) and tokens.view(np.uint32).max() >= vocab_size:
        worst = int(tokens.view(np.uint32).max().view(np.int32))
        _fault(output, f"token id {worst} outside of the vocabulary of {vocab_size} tokens")
    if not 0.0 <= output.seconds < math.inf:
        _fault(output, f"invalid step duration {output.seconds}")
    if output.bad or output.failed:
        known = {*handles.tolist(), *(handle for handle, row in record.rows.items() if not row.request.generates)}
        if extra := sorted(_lost(output) - known):
            _fault(output, f"bad or failed handles that did not sample: {extra[:8]}", "bad")


def check_counts(record: InFlightStep, output: ModelRunnerOutput, handles: Int32, tokens: Int32) -> None:
    counts, verified = output.counts, output.drafts
    if counts is None and len(tokens) != len(handles):
        _fault(output, f"{len(tokens)} tokens for {len(handles)} requests")
    if counts is None and verified is None:
        return
    if counts is not None and (len(counts) != len(handles) or int(counts.sum()) != len(tokens)):
        sizes = f"{len(counts)} counts with sum {int(counts.sum())}, {len(handles)} handles, {len(tokens)} tokens"
        _fault(output, f"counts do not match handles and tokens: {sizes}")
    if verified is None:
        verified = np.zeros(len(handles), np.int32)
    if len(verified) != len(handles):
        _fault(output, f"{len(verified)} counts of drafts for {len(handles)} handles", "drafts")
    if (verified < 0).any():
        _fault(output, f"handle {handles[verified.argmin()]} has {verified.min()} drafts", "drafts")
    rows = record.rows
    most = np.array([rows[h].num_drafts if h in rows else 0 for h in handles.tolist()], np.int32)
    if (verified > most).any():
        at = int((verified > most).argmax())
        _fault(output, f"handle {handles[at]} has {verified[at]} drafts, more than the {most[at]} scheduled", "drafts")
    if counts is not None:
        wrong = (counts < 1) | (counts - 1 > verified)
        if wrong.any():
            at = int(wrong.argmax())
            _fault(output, f"handle {handles[at]} has {counts[at]} tokens, expected 1 to {1 + verified[at]}")


def _lost(result: ModelRunnerOutput) -> set[int]:
    """Return the handles whose part of the result does not count: their clients get an error."""
    return {*result.bad, *(handle for handle, _ in result.failed)}


def check_side(
    record: InFlightStep,
    result: ModelRunnerOutput,
    handles: Int32,
    model: ModelConfig,
    due: dict[int, DueRows | None],
) -> None:
    """Raise WorkerFault unless the rows beside the tokens are valid, and those that are due present.

    The shapes of all are checked first. ``due``: by handle, of the requests that generate nothing.
    """
    if len({rows.kind for rows in result.side}) < len(result.side):
        _fault(result, "two parts of one kind beside the tokens")
    lost = _lost(result)
    for rows in result.side:
        if (fault := rows.shape_error()) is not None:
            _fault(result, f"{SIDE_KINDS[rows.kind].name if rows.kind in SIDE_KINDS else 'rows'}: {fault}")
        kind = SIDE_KINDS[rows.kind]
        # The only loop over requests in steady decode, for those with log probabilities.
        counts = _num_tokens(handles, result.counts) if kind.rows is RowsOf.TOKENS else None
        member = record.member if record.rows else record.steady.get
        for handle, start, count, width in rows.spans:
            request = member(handle)
            expected = None if request is None else _expected(kind, record, request, model, counts, due.get(handle))
            if expected is None:
                _fault(result, f"{kind.name} for handle {handle}, which has none in this step")
            values, first, end, is_whole = expected
            if width != values or start < first or start + count > end or (is_whole and count < end - first):
                part, wanted = (
                    f"{count} rows from {start} with {width} values",
                    f"{first} to {end} with {values} values",
                )
                _fault(result, f"{kind.name} of handle {handle}: {part}, expected rows {wanted}")
        if kind.value_error is not None:
            # Values of a lost request are not checked: its logits may not be finite.
            kept = [0 if handle in lost else count for handle, _, count, _ in rows.spans] if lost else None
            valid = rows if kept is None else rows.first_rows(kept)
            if valid is not None and (fault := kind.value_error(valid, model.vocab_size)) is not None:
                _fault(result, fault)
    found = {(rows.kind, handle) for rows in result.side for handle in rows.handles}
    missing = [h for h, each in due.items() if each and h not in lost and (each.kind.number, h) not in found]
    if missing:
        kinds = " or ".join(sorted({each.kind.name for h in missing if (each := due[h]) is not None}))
        _fault(result, f"no {kinds} for handles {sorted(missing)[:8]}")


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
