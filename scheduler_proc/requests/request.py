"""Request: the scheduler's state of one request (tokens, progress, status)."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.wire.front_end_messages import EndReason
from quire.scheduler_proc.kv.block import KVCacheBlock
from quire.scheduler_proc.kv.events import Span
from quire.scheduler_proc.requests.reasons import WaitReason
from quire.scheduler_proc.requests.repetition import RepetitionWatch
from quire.scheduler_proc.requests.step_clock import StepClock
from quire.scheduler_proc.requests.tokens import TokenStore

T = TypeVar("T")


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


@dataclass(slots=True, eq=False, repr=False, kw_only=True)
class Request:
    """State of one request. Only the scheduler changes it.

    Two counts of progress (protocol law 2): ``num_computed_tokens`` counts positions of all steps *sent*;
    ``num_tokens`` and ``num_acknowledged_tokens`` grow only with results *applied*. ``num_output_placeholders`` counts
    the samples in between. In steady decode (``is_steady``) no field is updated per step: the counters are computed
    from the step clock when they are read. Only ``tokens`` may then lack the newest tokens.

    Attributes:
        client: index of the front end that sent the request; -1 for one that a feature has made.
        stop_tokens: token ids that end the request.
        max_total_tokens: limit for prompt and output tokens together.
        part_of: the client's request, if a feature computes it by several requests, of which this is one; or None.
        account: for whose share of the queue, rows and blocks it counts.
        handle: identifies the request in messages; -1 until the scheduler allocates it.
        number: order of arrival in this engine.
        order: order of admission among running requests; new at each admission.
        admitted: time of the first admission on the clock given to ``Scheduler.schedule``, for metrics; 0 until then.
        turn: service count of the account at the first admission; -1 before, and after the place in the queue is lost.
        generates: whether it samples tokens. Otherwise rows beside tokens are its result, for which one placeholder
            stands from the step that computes the last token of its prompt until the result.
        num_cached_tokens: prompt tokens found in the prefix cache at the first admission or loaded meanwhile; or -1.
        ignore_results_until: results of steps up to this one no longer apply to this request.
        num_drafts_in_flight: drafts that the steps in flight may have; each is a placeholder that may get no token.
        repetition: detector that checks each output token, or None.
        wait_reason: why the request waits, while it waits.
        skip_reading_prefix_cache: the request needs results of each position, which a prefix cache hit does not give.
        on_worker, parked: state of the request on the workers, as of the last step sent.
        was_bad: its logits were not finite when it had been preempted, so that it was given another chance.
        parts: what features keep of it (``RequestPart``).
        joined_step: the last step before steady decode.
        synced_step: in steady decode, the step that sampled the last token in ``tokens``.
        event_step, last_step, leave_step, block_step: used by SteadyDecode only.
        tables: in steady decode, its blocks per KV group. The lists belong to the KV cache.
    """

    client: int
    request_id: str
    tokens: TokenStore
    num_prompt_tokens: int
    sampling: SamplingParams
    seed: int
    stop_tokens: frozenset[int]
    max_total_tokens: int
    priority: int = 0
    arrival: float = 0.0
    account: int = 0
    part_of: "Request | None" = None
    handle: int = -1
    number: int = 0
    order: int = 0
    admitted: float = 0.0
    turn: int = -1
    generates: bool = True
    status: RequestStatus = RequestStatus.WAITING
    _clock: StepClock | None = None
    _num_computed_tokens: int = 0
    _num_acknowledged_tokens: int = 0
    _num_output_placeholders: int = 0
    _num_in_flight: int = 0
    num_cached_tokens: int = -1
    ignore_results_until: int = -1
    num_preemptions: int = 0
    num_drafts_in_flight: int = 0
    repetition: RepetitionWatch | None = None
    wait_reason: WaitReason = WaitReason.QUEUED
    skip_reading_prefix_cache: bool = False
    introduced: bool = False
    on_worker: bool = False
    parked: bool = False
    was_bad: bool = False
    parts: dict[str, Any] = field(default_factory=dict)
    joined_step: int = 0
    synced_step: int = 0
    event_step: int = 0
    block_step: int = 0
    last_step: int = 0
    leave_step: int = 0
    tables: Sequence[list[KVCacheBlock]] = ()

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
        return Span(self.tokens.tail(start, end), self.tokens.salts)

    @property
    def has_grammar(self) -> bool:
        return self.sampling.structured_outputs is not None

    @property
    def is_watched(self) -> bool:
        """Whether each token must be checked when it arrives, which excludes steady decode."""
        return self.has_grammar or self.sampling.repetition_detection is not None

    @property
    def repeats_itself(self) -> bool:
        """Whether its newest tokens are a repetition and ``min_tokens`` is reached."""
        watch = self.repetition
        return watch is not None and watch.found and self.num_output_tokens >= self.sampling.min_tokens

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


class RequestPart(Generic[T]):
    """What a feature keeps of each request: a value in ``Request.parts`` under ``name``, unless it is ``default``.

    It is at the request and not in the feature by handle, because a request that is refused while it is built has no
    handle, and because a step in flight may have a request that has ended and whose value still matters.
    """

    def __init__(self, name: str, default: T) -> None:
        self.name, self.default = name, default

    def of(self, request: Request) -> T:
        value: T = request.parts.get(self.name, self.default)
        return value

    def put(self, request: Request, value: T) -> None:
        if value == self.default:
            request.parts.pop(self.name, None)
        else:
            request.parts[self.name] = value
