"""One request as the scheduler sees it: tokens, progress, status."""

import enum

from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.wire.front_end_messages import EndReason
from quire.scheduler_proc.requests.draft_state import DraftState
from quire.scheduler_proc.requests.reasons import WaitReason
from quire.scheduler_proc.requests.repetition import RepetitionWatch
from quire.scheduler_proc.requests.step_clock import StepClock
from quire.scheduler_proc.requests.tokens import TokenStore


class RequestStatus(enum.IntEnum):
    """Where a request stands; everything after PREEMPTED is an ending."""

    WAITING = 1
    RUNNING = 2
    PREEMPTED = 3
    FINISHED_STOPPED = 4
    FINISHED_LENGTH_CAPPED = 5
    FINISHED_ABORTED = 6
    FINISHED_ERROR = 7
    FINISHED_REPETITION = 8

    @property
    def is_finished(self) -> bool:
        return self > RequestStatus.PREEMPTED


STATUS_OF_END = {
    EndReason.STOPPED: RequestStatus.FINISHED_STOPPED,
    EndReason.LENGTH: RequestStatus.FINISHED_LENGTH_CAPPED,
    EndReason.ABORTED: RequestStatus.FINISHED_ABORTED,
    EndReason.ERROR: RequestStatus.FINISHED_ERROR,
    EndReason.REPETITION: RequestStatus.FINISHED_REPETITION,
}


class Request:
    """State of one request. The scheduler alone changes it.

    Two counts of progress (protocol law 2): ``num_computed_tokens`` counts positions of every step *sent*;
    ``num_tokens`` and ``num_acknowledged_tokens`` grow only with results *applied*; ``num_output_placeholders`` are
    samples in between. In steady decode (``is_steady``) the request itself is not touched: the counters follow from the
    steps that were sent and answered since, whenever they are read. Only ``tokens`` may lack the newest ones then.

    Attributes:
        number: order of arrival in this engine.
        order: order of admission among those that run; set anew each time.
        handle: the small integer that stands for it on every wire; -1 before the scheduler gives it one.
        client: index of the front end that it came from.
        tenant: whose it is; those who wait take turns by it, and share rows and blocks (tenants.py).
        turn: what its tenant had been served when it was first admitted; -1 before, and once it has lost its place.
        stop_tokens: ids that end it.
        max_total_tokens: prompt and output together can never be more.
        ignore_results_until: step up to which results are not this request's any more.
        num_cached_tokens: of the prompt, found in the prefix cache when first scheduled; -1 before.
        num_drafts_in_flight: drafts that it may have in the steps in flight; each is a placeholder that may come to
            nothing.
        draft_state: what its drafts have taught.
        repetition: looks at each token of its answer; None where it is not wanted.
        on_worker, parked: what the workers hold of it, as of the last step sent.
        wait_reason: why it waits, while it does.
        skip_reading_prefix_cache: it needs something of each position that a cache hit does not give.
        joined_step: in steady decode, the last step before it.
        synced_step: in steady decode, the step whose token is the last in ``tokens``.
        event_step, last_step, leave_step, block_step: for the SteadyDecode alone.
    """

    __slots__ = (
        "_clock",
        "_num_acknowledged_tokens",
        "_num_computed_tokens",
        "_num_in_flight",
        "_num_output_placeholders",
        "arrival",
        "block_step",
        "client",
        "draft_state",
        "event_step",
        "handle",
        "ignore_results_until",
        "introduced",
        "joined_step",
        "last_step",
        "leave_step",
        "max_total_tokens",
        "num_cached_tokens",
        "num_drafts_in_flight",
        "num_preemptions",
        "num_prompt_tokens",
        "number",
        "on_worker",
        "order",
        "parked",
        "priority",
        "repetition",
        "request_id",
        "sampling",
        "seed",
        "skip_reading_prefix_cache",
        "status",
        "stop_tokens",
        "synced_step",
        "tenant",
        "tokens",
        "turn",
        "wait_reason",
    )

    def __init__(
        self,
        *,
        client: int,
        request_id: str,
        tokens: TokenStore,
        num_prompt_tokens: int,
        sampling: SamplingParams,
        seed: int,
        stop_tokens: frozenset[int],
        max_total_tokens: int,
        priority: int = 0,
        arrival: float = 0.0,
        tenant: int = 0,
        handle: int = -1,
    ) -> None:
        self.number = self.order = 0
        self.handle = handle
        self.client = client
        self.request_id = request_id
        self.tokens = tokens
        self.num_prompt_tokens = num_prompt_tokens
        self.sampling = sampling
        self.seed = seed
        self.stop_tokens = stop_tokens
        self.max_total_tokens = max_total_tokens
        self.priority = priority
        self.arrival = arrival
        self.tenant = tenant
        self.turn = -1
        self.status = RequestStatus.WAITING
        self._clock: StepClock | None = None
        self._num_computed_tokens = 0
        self._num_acknowledged_tokens = 0
        self._num_output_placeholders = 0
        self._num_in_flight = 0
        self.num_cached_tokens = -1
        self.ignore_results_until = -1
        self.num_preemptions = 0
        self.num_drafts_in_flight = 0
        self.draft_state = DraftState()
        self.repetition: RepetitionWatch | None = None
        self.wait_reason = WaitReason.QUEUED
        self.skip_reading_prefix_cache = False
        self.introduced = False
        self.on_worker = False
        self.parked = False
        self.joined_step = self.synced_step = self.event_step = self.block_step = 0
        self.last_step = self.leave_step = 0

    # ---- progress

    @property
    def is_steady(self) -> bool:
        """Whether it is in steady decode."""
        return self._clock is not None

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and acknowledged output."""
        clock = self._clock
        if clock is None:
            return len(self.tokens)
        return len(self.tokens) + max(clock.acknowledged - self.synced_step, 0)

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_computed_tokens(self) -> int:
        """Positions of every step sent."""
        clock = self._clock
        if clock is None:
            return self._num_computed_tokens
        return self._num_computed_tokens + clock.sent - self.joined_step

    @property
    def num_acknowledged_tokens(self) -> int:
        """Positions whose computing was answered."""
        clock = self._clock
        if clock is None:
            return self._num_acknowledged_tokens
        return self._num_acknowledged_tokens + max(clock.acknowledged - self.joined_step, 0)

    @property
    def num_output_placeholders(self) -> int:
        """Samples, drafts among them, of steps sent and not yet answered."""
        clock = self._clock
        if clock is None:
            return self._num_output_placeholders
        return clock.sent - max(clock.acknowledged, self.synced_step)

    @property
    def num_in_flight(self) -> int:
        """Steps sent and not yet answered in which it runs."""
        clock = self._clock
        if clock is None:
            return self._num_in_flight
        return self._num_in_flight + clock.sent - max(clock.acknowledged, self.joined_step)

    @property
    def num_tokens_to_compute(self) -> int:
        """Positions known, or about to be, that no step has computed: 1 while decoding, more in a prefill."""
        if self._clock is not None:
            return 1
        return len(self.tokens) + self._num_output_placeholders - self._num_computed_tokens

    @property
    def awaits_result(self) -> bool:
        """A result on its way belongs to what it was before it was preempted: it cannot begin again yet."""
        return self._num_in_flight > 0

    def begin(self, num_hit_tokens: int) -> None:
        """It begins to run, with so many positions from the prefix cache."""
        self._num_computed_tokens = self._num_acknowledged_tokens = num_hit_tokens

    def begin_again(self) -> None:
        """It was preempted: all is to be computed again."""
        self._num_computed_tokens = self._num_acknowledged_tokens = 0

    def sent(self, num_tokens: int, num_drafts: int) -> bool:
        """A step with ``num_tokens`` positions of it, the last ``num_drafts`` for drafts, is sent; whether it samples.

        It does when nothing known is left to compute after it.
        """
        samples = num_tokens - num_drafts == self.num_tokens_to_compute
        self._num_computed_tokens += num_tokens
        self._num_in_flight += 1
        if samples:
            self._num_output_placeholders += 1 + num_drafts
            self.num_drafts_in_flight += num_drafts
        return samples

    def answered(self, num_tokens: int) -> None:
        """A step of before it was in steady decode, or after, was answered."""
        self._num_in_flight -= 1
        if self.status is RequestStatus.RUNNING:  # else it begins again from nothing
            self._num_acknowledged_tokens += num_tokens

    def sampled(self, num_drafts: int) -> None:
        """A sample of such a step is there, and so it is known which of its drafts are right."""
        self._num_output_placeholders -= 1 + num_drafts
        self.num_drafts_in_flight -= num_drafts

    def claw_back(self, num_drafts: int) -> None:
        """So many drafts were computed that were not there, or not right."""
        if self.status is RequestStatus.RUNNING:
            self._num_computed_tokens -= num_drafts
            self._num_acknowledged_tokens -= num_drafts

    def forget_in_flight(self) -> None:
        """No step in flight will be answered."""
        self._num_in_flight = self._num_output_placeholders = self.num_drafts_in_flight = 0

    def join_steady(self, clock: StepClock) -> None:
        """From the step after the newest on it has one position, and samples, in each step that ``clock`` counts.

        Its outstanding samples, at most one per step in flight, are those of the newest steps.
        """
        self.joined_step = clock.sent
        self.synced_step = clock.sent - self._num_output_placeholders
        self._clock = clock

    def leave_steady(self) -> None:
        """The counters are its own again; ``tokens`` has all that were answered."""
        self._num_in_flight = self.num_in_flight
        self._num_computed_tokens = self.num_computed_tokens
        self._num_acknowledged_tokens = self.num_acknowledged_tokens
        self._num_output_placeholders = self.num_output_placeholders
        self._clock = None

    # ---- what follows from it

    @property
    def block_hashes(self) -> list[bytes]:
        return self.tokens.block_hashes

    @property
    def has_grammar(self) -> bool:
        return self.sampling.structured_outputs is not None

    @property
    def is_watched(self) -> bool:
        """Each of its tokens is looked at as it comes, so that it cannot be in steady decode."""
        return self.has_grammar or self.sampling.repetition_detection is not None

    @property
    def repeats_itself(self) -> bool:
        """Its newest tokens are what it is watched for; it may have been too early to end it."""
        watch = self.repetition
        return watch is not None and watch.found and self.num_output_tokens >= self.sampling.min_tokens

    @property
    def needs_no_more_steps(self) -> bool:
        """The last token that its length allows is in flight, or there, even if no draft is accepted."""
        if self._clock is None:  # called for each request of each step that is not in steady decode
            known = len(self.tokens) + self._num_output_placeholders
        else:
            known = self.num_tokens + self.num_output_placeholders
        return known - self.num_drafts_in_flight >= self.max_total_tokens

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, {self.num_computed_tokens}/{self.num_tokens} computed)"
        )
