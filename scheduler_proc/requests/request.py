"""Request: the scheduler's state of one request (tokens, progress, status)."""

import enum
from collections.abc import Sequence
from typing import TypeAlias

from quire.protocol.request.pooling_params import PoolingParams
from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.wire.front_end_messages import EndReason
from quire.scheduler_proc.costs.choice import LoadChoice
from quire.scheduler_proc.kv.block import KVCacheBlock
from quire.scheduler_proc.kv.events import Span
from quire.scheduler_proc.requests.adapter_state import AdapterState
from quire.scheduler_proc.requests.program_state import ProgramState
from quire.scheduler_proc.requests.reasons import WaitReason
from quire.scheduler_proc.requests.repetition import RepetitionWatch
from quire.scheduler_proc.requests.step_clock import StepClock
from quire.scheduler_proc.requests.tokens import TokenStore


class RequestStatus(enum.IntEnum):
    """Status of a request; all values after PREEMPTED are final."""

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
    """State of one request. Only the scheduler changes it.

    Two counts of progress (protocol law 2): ``num_computed_tokens`` counts positions of all steps *sent*;
    ``num_tokens`` and ``num_acknowledged_tokens`` grow only with results *applied*. ``num_output_placeholders`` counts
    the samples in between. In steady decode (``is_steady``) no field is updated per step: the counters are computed
    from the step clock when they are read. Only ``tokens`` may then lack the newest tokens.

    Attributes:
        number: order of arrival in this engine.
        order: order of admission among running requests; new at each admission.
        handle: identifies the request in messages; -1 until the scheduler allocates it.
        client: index of the front end that sent the request.
        admitted: time of the first admission on the clock given to ``Scheduler.schedule``, for metrics; 0 until then.
        adapter: its LoRA adapter, or None; adapter_name: the name by which its client asked for it.
        tenant: account for fair scheduling of the queue, rows and blocks (tenants.py).
        turn: service count of the tenant at the first admission; -1 before, and after the place in the queue is lost.
        stop_tokens: token ids that end the request.
        max_total_tokens: limit for prompt and output tokens together.
        pooling: what its prompt is turned into; None if it generates tokens. Its one placeholder, from the step that
            computes the last token of its prompt until the result, stands for its vector.
        row_bytes: bytes that a result has for each computed position, beside tokens: vectors or routed experts.
        was_bad: its logits were not finite when it had been preempted, so that it was given another chance.
        ignore_results_until: results of steps up to this one no longer apply to this request.
        num_cached_tokens: prompt tokens found in the prefix cache at the first admission or loaded by a split; or -1.
        num_drafts_in_flight: drafts that the steps in flight may have; each is a placeholder that may get no token.
        repetition: detector that checks each output token, or None.
        on_worker, parked: state of the request on the workers, as of the last step sent.
        program: the agent or conversation of which it is a turn, or None.
        is_overdue: it has waited for so long that it is scheduled before requests of all programs.
        parent: the request whose blocks it will share, until it is admitted or returns to the queue; or None.
        diverges: whether its last token is not one of its parent's.
        leader: the client's request, if it computes a beam of that request's search; or None.
        job_id: as of AddRequest, for traces.
        choice: whether to load the part of its prefix that only tiers have, until it has been admitted with that part.
        split_at: position up to which it computes while the rest of its cached prefix is loaded; 0 if nothing is.
        wait_reason: why the request waits, while it waits.
        skip_reading_prefix_cache: the request needs results of each position, which a prefix cache hit does not give.
        joined_step: the last step before steady decode.
        synced_step: in steady decode, the step that sampled the last token in ``tokens``.
        event_step, last_step, leave_step, block_step: used by SteadyDecode only.
        tables: in steady decode, its blocks per KV group. The lists belong to the KV cache.
    """

    __slots__ = (
        "_clock",
        "_num_acknowledged_tokens",
        "_num_computed_tokens",
        "_num_in_flight",
        "_num_output_placeholders",
        "adapter",
        "adapter_name",
        "admitted",
        "arrival",
        "block_step",
        "choice",
        "client",
        "diverges",
        "event_step",
        "handle",
        "ignore_results_until",
        "introduced",
        "is_overdue",
        "job_id",
        "joined_step",
        "last_step",
        "leader",
        "leave_step",
        "max_total_tokens",
        "num_cached_tokens",
        "num_drafts_in_flight",
        "num_preemptions",
        "num_prompt_tokens",
        "number",
        "on_worker",
        "order",
        "parent",
        "parked",
        "pooling",
        "priority",
        "program",
        "repetition",
        "request_id",
        "row_bytes",
        "sampling",
        "seed",
        "skip_reading_prefix_cache",
        "split_at",
        "status",
        "stop_tokens",
        "synced_step",
        "tables",
        "tenant",
        "tokens",
        "turn",
        "wait_reason",
        "was_bad",
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
        adapter: "Adapter | None" = None,
        pooling: PoolingParams | None = None,
    ) -> None:
        self.number = self.order = 0
        self.adapter = adapter
        self.adapter_name = "" if adapter is None else adapter.ref.name
        self.handle = handle
        self.client = client
        self.request_id = request_id
        self.tokens = tokens
        self.num_prompt_tokens = num_prompt_tokens
        self.sampling = sampling
        self.pooling = pooling
        self.row_bytes = 0
        self.seed = seed
        self.stop_tokens = stop_tokens
        self.max_total_tokens = max_total_tokens
        self.priority = priority
        self.arrival = arrival
        self.admitted = 0.0
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
        self.repetition: RepetitionWatch | None = None
        self.wait_reason = WaitReason.QUEUED
        self.skip_reading_prefix_cache = False
        self.introduced = False
        self.on_worker = False
        self.parked = False
        self.parent: Request | None = None
        self.diverges = False
        self.was_bad = False
        self.leader: Request | None = None
        self.program: Program | None = None
        self.is_overdue = False
        self.split_at = 0
        self.choice: LoadChoice | None = None
        self.job_id = ""
        self.joined_step = self.synced_step = self.event_step = self.block_step = 0
        self.last_step = self.leave_step = 0
        self.tables: Sequence[list[KVCacheBlock]] = ()

    # ---- progress

    @property
    def is_steady(self) -> bool:
        """Whether the request is in steady decode."""
        return self._clock is not None

    @property
    def num_tokens(self) -> int:
        """Number of known tokens: prompt and acknowledged output."""
        clock = self._clock
        if clock is None:
            return len(self.tokens)
        return len(self.tokens) + max(clock.acknowledged - self.synced_step, 0)

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_computed_tokens(self) -> int:
        """Number of positions computed by all steps sent."""
        clock = self._clock
        if clock is None:
            return self._num_computed_tokens
        return self._num_computed_tokens + clock.sent - self.joined_step

    @property
    def num_acknowledged_tokens(self) -> int:
        """Number of positions computed by all steps answered."""
        clock = self._clock
        if clock is None:
            return self._num_acknowledged_tokens
        if clock.acknowledged <= self.joined_step:
            return self._num_acknowledged_tokens
        return self._num_acknowledged_tokens + clock.acknowledged - self.joined_step

    @property
    def num_output_placeholders(self) -> int:
        """Number of samples and drafts in the steps in flight."""
        clock = self._clock
        if clock is None:
            return self._num_output_placeholders
        return clock.sent - max(clock.acknowledged, self.synced_step)

    @property
    def num_in_flight(self) -> int:
        """Number of steps in flight that compute this request."""
        clock = self._clock
        if clock is None:
            return self._num_in_flight
        return self._num_in_flight + clock.sent - max(clock.acknowledged, self.joined_step)

    @property
    def num_tokens_to_compute(self) -> int:
        """Positions, of known tokens and placeholders, that no step computes yet: 1 in decode, more in a prefill."""
        if self._clock is not None:
            return 1
        return len(self.tokens) + self._num_output_placeholders - self._num_computed_tokens

    @property
    def awaits_result(self) -> bool:
        """Whether a result from before the preemption is in flight, so that the request cannot be admitted yet."""
        return self._num_in_flight > 0

    def begin(self, num_hit_tokens: int) -> None:
        """Set the progress at admission: ``num_hit_tokens`` positions come from the prefix cache."""
        self._num_computed_tokens = self._num_acknowledged_tokens = num_hit_tokens

    def restart(self) -> None:
        """Reset the progress after a preemption: all positions must be recomputed."""
        self._num_computed_tokens = self._num_acknowledged_tokens = 0

    def sent(self, num_tokens: int, num_drafts: int) -> bool:
        """Record a sent step with ``num_tokens`` positions, the last ``num_drafts`` for drafts.

        Returns whether the step samples a token, or completes a vector: if no known token is left to compute after it.
        """
        samples = num_tokens - num_drafts == self.num_tokens_to_compute
        self._num_computed_tokens += num_tokens
        self._num_in_flight += 1
        if samples:
            self._num_output_placeholders += 1 + num_drafts
            self.num_drafts_in_flight += num_drafts
        return samples

    def answered(self, num_tokens: int) -> None:
        """Record that a step outside of steady decode was answered."""
        self._num_in_flight -= 1
        if self.status is RequestStatus.RUNNING:  # a preempted request restarts from zero
            self._num_acknowledged_tokens += num_tokens

    def sampled(self, num_drafts: int) -> None:
        """Record that the sample of such a step has arrived, which also settles its drafts."""
        self._num_output_placeholders -= 1 + num_drafts
        self.num_drafts_in_flight -= num_drafts

    def subtract_drafts(self, num_drafts: int) -> None:
        """Subtract ``num_drafts`` positions of drafts that did not exist or were rejected."""
        if self.status is RequestStatus.RUNNING:
            self._num_computed_tokens -= num_drafts
            self._num_acknowledged_tokens -= num_drafts

    def forget_in_flight(self) -> None:
        """Reset the counters of steps in flight, which will never be answered."""
        self._num_in_flight = self._num_output_placeholders = self.num_drafts_in_flight = 0
        self.split_at = 0

    def join_steady(self, clock: StepClock) -> None:
        """Join steady decode: each step after ``clock.sent`` computes one position and samples one token.

        The outstanding samples, at most one per step in flight, belong to the newest steps.
        """
        self.joined_step = clock.sent
        self.synced_step = clock.sent - self._num_output_placeholders
        self._clock = clock

    def leave_steady(self) -> None:
        """Store the counters in the request again. ``tokens`` must contain all answered tokens."""
        self._num_in_flight = self.num_in_flight
        self._num_computed_tokens = self.num_computed_tokens
        self._num_acknowledged_tokens = self.num_acknowledged_tokens
        self._num_output_placeholders = self.num_output_placeholders
        self._clock = None
        self.tables = ()

    # ---- derived properties

    @property
    def block_hashes(self) -> list[bytes]:
        return self.tokens.block_hashes

    def span(self, start: int, end: int) -> Span:
        """Return its known tokens from index ``start`` up to ``end``, and what its hashes cover besides tokens."""
        adapter = None if self.adapter is None else (self.adapter.number, self.adapter_name)
        return Span(self.tokens.tail(start, end), adapter, self.tokens.salts)

    @property
    def has_grammar(self) -> bool:
        return self.sampling.structured_outputs is not None

    @property
    def is_watched(self) -> bool:
        """Whether each token must be checked when it arrives, which excludes steady decode."""
        return self.has_grammar or self.sampling.repetition_detection is not None

    @property
    def can_run(self) -> bool:
        """Whether the next step may compute it, if it runs: its adapter has a turn."""
        return self.adapter is None or self.adapter.is_active

    @property
    def repeats_itself(self) -> bool:
        """Whether its newest tokens are a repetition and ``min_tokens`` is reached."""
        watch = self.repetition
        return watch is not None and watch.found and self.num_output_tokens >= self.sampling.min_tokens

    @property
    def can_leave(self) -> bool:
        """Whether the workers can forget it: it needs no more steps. A beam may still continue."""
        return self.leader is None and self.needs_no_more_steps

    @property
    def needs_no_more_steps(self) -> bool:
        """Whether the last token that the length limit allows is known or in flight, even if no draft is accepted."""
        if self._clock is None:  # hot path: called in each step for each request outside of steady decode
            known = len(self.tokens) + self._num_output_placeholders
        else:
            known = self.num_tokens + self.num_output_placeholders
        return known - self.num_drafts_in_flight >= self.max_total_tokens

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, {self.num_computed_tokens}/{self.num_tokens} computed)"
        )


Adapter: TypeAlias = AdapterState[Request]
Program: TypeAlias = ProgramState[Request]
