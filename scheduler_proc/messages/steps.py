"""A step as it is sent: its rows, and the requests in steady decode."""

from dataclasses import dataclass, field

from quire.scheduler_proc.costs.costs import Prefill
from quire.scheduler_proc.kv.coordinator import GroupBlocks
from quire.scheduler_proc.requests.request import Request
from quire.scheduler_proc.requests.steady_decode import SteadyBatch

NO_PREFILL = Prefill()


@dataclass(slots=True)
class StepRow:
    """The part of one request in a step: ``num_tokens`` positions, the last ``num_drafts`` of them for drafts.

    The proposer may find fewer drafts; the workers then compute fewer positions.

    Attributes:
        new_blocks: blocks to append, for a request that the workers already hold; ignored for a new or resumed one.
        is_prefill: the positions count towards the prefill budget.
        samples: the result contains a token for it. Set when the step is sent.
        parent: the request from whose logits it samples; it then computes nothing. None for all others.
        shares_with: handle of the request whose blocks it shares since this step, or -1.
        first: its first position, if its request generates nothing. Set when the step is sent.
        completes: such a request ends with the result. Set when the step is sent.
    """

    request: Request
    num_tokens: int
    new_blocks: GroupBlocks | None
    num_drafts: int = 0
    is_prefill: bool = False
    samples: bool = False
    parent: Request | None = None
    shares_with: int = -1
    first: int = 0
    completes: bool = False


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
        """Return all requests of the step by handle, in order of admission, whether or not in steady decode."""
        found = self.steady | {handle: row.request for handle, row in self.rows.items()}
        return dict(sorted(found.items(), key=lambda item: item[1].order))

    def member(self, handle: int) -> Request | None:
        """Return the request with this handle, whether it samples or not, or None."""
        row = self.rows.get(handle)
        return self.steady.get(handle) if row is None else row.request
