"""Messages between a front end and the scheduler."""

import enum
from typing import TypeAlias

import msgspec

from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.wire.arrays import Int32
from quire.protocol.wire.link_messages import Heartbeat, Hello, Message, Refused, Welcome
from quire.protocol.wire.logprobs import Logprobs, PromptLogprobs


class EndReason(enum.IntEnum):
    """Why a request ended; every accepted request gets exactly one."""

    STOPPED = 1
    LENGTH = 2
    ABORTED = 3
    ERROR = 4
    REPETITION = 5

    @property
    def finish_reason(self) -> str:
        """OpenAI's word for it (and vLLM's, where OpenAI has none)."""
        return {1: "stop", 2: "length", 3: "abort", 4: "error", 5: "repetition"}[self.value]


class AddRequest(Message, frozen=True, tag=10):
    """One sampled sequence. ``output_token_ids``: already delivered (a resubmission); ``seed`` is always present."""

    request_id: str
    prompt_token_ids: Int32
    sampling: SamplingParams
    seed: int
    output_token_ids: Int32 | None = None
    priority: int = 0
    cache_salt: str = ""
    arrival: float = 0.0
    # Reserved: refused unless left at the default.
    job_id: str = ""
    is_last_step: bool = True
    resumable: bool = False
    lora: str = ""
    mm_features: list[bytes] = []
    kv_transfer: bytes = b""
    tenant: int = 0
    """Its tenant, from 1; 0: none is known. Admission is fair among tenants."""
    resubmitted: bool = False
    """It was submitted before, on a link that broke: a queue that is full meanwhile does not turn it away."""


class Abort(Message, frozen=True, tag=11):
    request_ids: list[str]


class Stop(Message, frozen=True, tag=12):
    """The front end found a stop string: the request ends with this many output tokens; later ones are dropped."""

    request_id: str
    num_output_tokens: int


class Control(Message, frozen=True, tag=13):
    """``kind``: statistics, pause (nothing runs), pause_new (nothing is admitted), resume, reset_prefix_cache.

    Answered by Statistics with the same ``query``.
    """

    kind: str
    query: int = 0


class Rejected(Message, frozen=True, tag=20):
    """The one ending of a request that was never accepted."""

    request_id: str
    code: str
    param: str
    message: str


class Ended(msgspec.Struct, array_like=True, frozen=True):
    """``stop_reason``: the stop token's id, if one ended it. ``num_output_tokens``: what counts, and is billed."""

    handle: int
    reason: int
    num_output_tokens: int
    stop_reason: int | None = None
    detail: str = ""


class Introduced(msgspec.Struct, array_like=True, frozen=True):
    handle: int
    request_id: str
    num_cached_tokens: int


class StepOutputs(Message, frozen=True, tag=21):
    """What one step brought this front end. ``counts`` is absent when every request got one token."""

    introduced: list[Introduced]
    handles: Int32 | None
    tokens: Int32 | None
    ended: list[Ended]
    counts: Int32 | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Histogram(msgspec.Struct, frozen=True):
    """Seconds: how many observations were at most each of ``bounds`` (``counts`` has one more, for all above)."""

    bounds: list[float]
    counts: list[int]
    total: float


class Statistics(Message, frozen=True, tag=22):
    """Counters since start and present gauges; answers a Control."""

    query: int
    done: bool = True
    num_running: int = 0
    num_waiting: int = 0
    num_usable_blocks: int = 0
    num_free_blocks: int = 0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hit_tokens: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_steps: int = 0
    dropped_tokens: int = 0
    refused_messages: int = 0
    num_cached_blocks: int = 0
    num_evicted_blocks: int = 0
    """Contents that were forgotten because their block was needed."""
    num_requests_refused: int = 0
    num_stray_messages: int = 0
    """Aborts, stops, releases and results for what is not there (any more): counted, and otherwise ignored."""
    waiting_by_reason: dict[str, int] = {}
    """Requests that wait now, by what they wait for."""
    preemptions_by_reason: dict[str, int] = {}
    kv_block_lifetime: Histogram | None = None
    kv_block_idle_before_evict: Histogram | None = None
    kv_block_reuse_gap: Histogram | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_trace_lines_lost: int = 0
    """Because the disk was too slow, or failed."""
    num_worker_restarts: int = 0
    """Groups of workers that were lost; other workers computed their requests again."""
    num_slow_steps: int = 0
    """Steps that took five times as long as is usual for their size, and half a second at least."""


class EngineState(Message, frozen=True, tag=23):
    """``kind``: loading, ready, recovering, draining, failed."""

    kind: str
    detail: str = ""


FrontEndToScheduler: TypeAlias = Hello | Heartbeat | AddRequest | Abort | Stop | Control
SchedulerToFrontEnd: TypeAlias = Welcome | Refused | Heartbeat | Rejected | StepOutputs | Statistics | EngineState
