"""Every message, as closed unions of frozen structs. For the laws see protocol/README.md.

Arrays (``Int32``, ``Float32``) travel as raw frames of their own beside the header, so that neither side ever
turns tokens into Python integers. Fields grow at the tail, with defaults; a tag is never reused. Tags 14 to 18 and 43
are events of the scheduler process' own (scheduler_proc/core/events.py); 19 was used up to version 1.
"""

import enum
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from quire.protocol.config import EngineConfig
from quire.protocol.model.kv_layout import KVLayout
from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.wire.logprobs import Logprobs, PromptLogprobs

PROTOCOL_VERSION = 2

Int32: TypeAlias = npt.NDArray[np.int32]
Float32: TypeAlias = npt.NDArray[np.float32]


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


class Message(msgspec.Struct, array_like=True, frozen=True):
    """Base of all messages: encoded as an array that starts with an integer tag."""


# ---- handshake, on every link


class Hello(Message, frozen=True, tag=1):
    """First message of whoever connects. ``role`` is frontend or worker; ``index`` its rank or number."""

    protocol_version: int
    role: str
    index: int
    pid: int


class Welcome(Message, frozen=True, tag=2):
    protocol_version: int
    config_digest: str
    max_model_len: int = 0


class Refused(Message, frozen=True, tag=3):
    """The connection, or the last message on it, is not accepted. ``final``: nor will another one be."""

    reason: str
    final: bool = False


class Heartbeat(Message, frozen=True, tag=4):
    """From whoever only waits, every second or so; the scheduler says the same back.

    A message that was lost, and behind which there is no other, shows as a gap before it, on either way.
    """

    now: float


# ---- front end to scheduler


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
    """Whose it is, where the front end knows: 1 and up; 0 is nobody's. Admission is fair among tenants."""
    again: bool = False
    """It was submitted before, on a link that broke: a queue that is full meanwhile does not turn it away."""


class Abort(Message, frozen=True, tag=11):
    request_ids: list[str]


class Stop(Message, frozen=True, tag=12):
    """The front end found a stop string: the request ends with this many output tokens; later ones are dropped."""

    request_id: str
    num_output_tokens: int


class Control(Message, frozen=True, tag=13):
    """``kind``: statistics, pause (nothing runs), pause_new (nobody is admitted), resume, reset_prefix_cache.

    Answered by Statistics with the same ``query``.
    """

    kind: str
    query: int = 0


# ---- scheduler to front end


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
    logprob_token_ids: Int32 | None = None
    logprob_values: Float32 | None = None
    logprob_ranks: Int32 | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_logprob_token_ids: Int32 | None = None
    prompt_logprob_values: Float32 | None = None
    prompt_logprob_ranks: Int32 | None = None


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
    """Groups of workers that were lost, and whose work others did again."""
    num_slow_steps: int = 0
    """Steps that took five times as long as is usual for their size, and half a second at least."""


class EngineState(Message, frozen=True, tag=23):
    """``kind``: loading, ready, recovering, draining, failed."""

    kind: str
    detail: str = ""


# ---- scheduler to worker


class Configure(Message, frozen=True, tag=30):
    """``last_step``: the number of the last step before this epoch; the next one follows it.

    ``num_blocks``: of the pool, the null block included, as an earlier group had it; 0: the group decides.
    """

    epoch: int
    kv_layout: KVLayout
    config: EngineConfig
    last_step: int = 0
    num_blocks: int = 0


class NewRequestData(msgspec.Struct, array_like=True, frozen=True):
    """All that a worker row is made of. Its tokens and block ids lie, in this order, in the message's two frames.

    Attributes:
        num_tokens: known tokens, prompt and output, that the token frame holds for it.
        num_computed_tokens: positions whose KV is in the given blocks already.
        num_blocks: ids per group in the block frame.
    """

    handle: int
    request_id: str
    num_prompt_tokens: int
    num_tokens: int
    num_computed_tokens: int
    num_blocks: list[int]
    sampling: SamplingParams
    seed: int


class SchedulerOutput(Message, frozen=True, tag=31):
    """One step, as a diff. A request not named here that is active computes one token.

    Applied in the order: removed and parked, new, unparked, appended, row moves, counts.

    Attributes:
        step: number of the step within the epoch, from 1.
        removed, parked: handles that leave, and that stay without running.
        new_requests: rows to build; ``token_ids`` and ``block_ids`` are their packed arrays.
        unparked: handles that run again.
        appended_handles, appended_block_ids: blocks newly given to held requests, one entry each, in the order in
            which they join the request's table; ``appended_groups`` is absent while all are of group 0.
        counts: (handle, tokens) of each request that computes other than one token in this step.
        drafts: (handle, drafts) of each request that may compute drafts: the last so many of its tokens at most. Which
            they are, and whether there are so many, the worker knows: its proposer makes them as the step begins.
        awaits_sample_inputs: a request that samples in this step has a grammar: the worker launches the forward pass,
            and samples when SampleInputs of the same step are there. They always come before the next step does;
            where they do not come, the step is void.
    """

    step: int
    removed: list[int] = []
    parked: list[int] = []
    new_requests: list[NewRequestData] = []
    token_ids: Int32 | None = None
    block_ids: Int32 | None = None
    unparked: list[int] = []
    appended_handles: Int32 | None = None
    appended_block_ids: Int32 | None = None
    appended_groups: Int32 | None = None
    counts: list[tuple[int, int]] = []
    # Reserved: drafts made by the scheduler, block copies, blocks to zero.
    draft_token_ids: Int32 | None = None
    block_copies: list[tuple[int, int]] = []
    blocks_to_zero: list[int] = []
    awaits_sample_inputs: bool = False
    drafts: list[tuple[int, int]] = []


class Shutdown(Message, frozen=True, tag=32):
    pass


class SampleInputs(Message, frozen=True, tag=33):
    """What the sampling of a step waits for: the tokens that grammars allow.

    Attributes:
        step: the SchedulerOutput that awaits it.
        handles: requests whose tokens are constrained; others are not.
        counts: positions of each of them that have a mask: one more than its drafts in this step.
        bitmask: int32 ``[sum(counts), ceil(vocab_size / 32)]``, row-major: bit ``t % 32`` of word ``t // 32`` is set
            where token ``t`` is allowed.
    """

    step: int
    handles: list[int]
    counts: list[int]
    bitmask: Int32 | None = None


# ---- worker to scheduler


class MemoryPlan(msgspec.Struct, frozen=True):
    """Where the device's memory goes, in bytes, decided before any weight is read."""

    device: str
    total: int
    weights: int
    activations: int
    kv_cache: int
    num_blocks: int
    block_size: int


class Ready(Message, frozen=True, tag=40):
    """The worker can run steps. ``num_blocks``: per group, the null block included."""

    num_blocks: list[int]
    plan: MemoryPlan
    timings: dict[str, float]


class Fault(Message, frozen=True, tag=41):
    """The worker cannot go on; ``kind`` is checkpoint, memory, refused or error; ``text`` is one line."""

    kind: str
    text: str


class ModelRunnerOutput(Message, frozen=True, tag=42):
    """The result of one step.

    Attributes:
        step: the SchedulerOutput that it answers.
        tokens: one sampled token for each row that reached its last known position, in row order.
        handles: of those rows; absent while the same as in the last result that had them, and never absent where the
            step removed or brought a request.
        bad: handles whose logits were not finite.
        counts: tokens of each such row (accepted drafts and one more); absent when all are 1.
        seconds: what the step took the worker, from its beginning to the end of sampling.
        drafts: how many drafts of each such row were verified in this step; absent when all are 0.
        failed: (handle, why) of requests of this step that cannot go on for a reason of their own: no token is
            allowed, or a logits processor failed on them. Their tokens are without meaning.
        failure: why nothing of the step was computed (the device's memory did not suffice); the worker has dropped its
            rows, and answers steps with nothing until one has removed them all.
    """

    step: int
    tokens: Int32 | None = None
    handles: Int32 | None = None
    counts: Int32 | None = None
    logprobs: Logprobs | None = None
    logprob_token_ids: Int32 | None = None
    logprob_values: Float32 | None = None
    logprob_ranks: Int32 | None = None
    bad: list[int] = []
    seconds: float = 0.0
    drafts: Int32 | None = None
    failure: str = ""
    failed: list[tuple[int, str]] = []
    prompt_logprobs: PromptLogprobs | None = None
    prompt_logprob_token_ids: Int32 | None = None
    prompt_logprob_values: Float32 | None = None
    prompt_logprob_ranks: Int32 | None = None


class Proposed(Message, frozen=True, tag=45):
    """The drafts of a step that awaits SampleInputs, so that there can be a mask for each position.

    ``tokens`` has ``counts[i]`` entries for ``handles[i]``; who has no drafts is not named. From rank 0, and only for
    a step that awaits SampleInputs and has drafts.
    """

    step: int
    handles: Int32
    counts: Int32
    tokens: Int32


class Digest(Message, frozen=True, tag=44):
    """From every rank of a group, after every step: ``value`` is 8 bytes, a hash over the diff and the sampled tokens.

    A result is committed only when all ranks' digests of its step are equal.
    """

    step: int
    value: bytes


FrontEndToScheduler: TypeAlias = Hello | Heartbeat | AddRequest | Abort | Stop | Control
SchedulerToFrontEnd: TypeAlias = Welcome | Refused | Heartbeat | Rejected | StepOutputs | Statistics | EngineState
SchedulerToWorker: TypeAlias = Welcome | Refused | Heartbeat | Configure | SchedulerOutput | SampleInputs | Shutdown
WorkerToScheduler: TypeAlias = Hello | Heartbeat | Ready | Fault | ModelRunnerOutput | Proposed | Digest
