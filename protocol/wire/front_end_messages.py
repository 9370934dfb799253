"""Messages between a front end and the scheduler."""

import enum
from typing import TypeAlias

import msgspec

from quire.protocol.request.pooling_params import PoolingParams
from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.wire.adapter_messages import AdapterRef, UnloadAdapter
from quire.protocol.wire.arrays import Int32
from quire.protocol.wire.item_messages import InputItem
from quire.protocol.wire.link_messages import Heartbeat, Hello, Message, Refused, Welcome
from quire.protocol.wire.side_rows import SideRows
from quire.protocol.wire.timeline import TimelineEvent


class EndReason(enum.IntEnum):
    """Why a request ended; every accepted request has exactly one."""

    STOPPED = 1
    LENGTH = 2
    ABORTED = 3
    ERROR = 4
    REPETITION = 5

    @property
    def finish_reason(self) -> str:
        """OpenAI's name of the reason (or vLLM's, if OpenAI has none)."""
        return {1: "stop", 2: "length", 3: "abort", 4: "error", 5: "repetition"}[self.value]


HINTS = ("job_id", "session", "response", "cache_key", "agent_context")
"""How a client may name the job of a request, the most reliable way first: fields of the body, a header (session), or
an earlier response."""
MAX_JOB_ID = 256
"""Characters of a job id."""
MAX_TOOL_NAME = 64
"""Characters of a tool's name that ``CallsTool`` has."""


class AddRequest(Message, frozen=True, tag=10):
    """One sequence to generate. ``output_token_ids``: tokens already delivered (a resubmission); ``seed`` is always
    set.
    """

    request_id: str
    prompt_token_ids: Int32
    sampling: SamplingParams
    seed: int
    output_token_ids: Int32 | None = None
    priority: int = 0
    cache_salt: str = ""
    arrival: float = 0.0
    job_id: str = ""
    """Id of the agent or conversation of which this is a turn, or "" if the client has not said it: a forked request
    is then a turn of that of its parent."""
    is_last_step: bool = False
    """Whether it is the last turn of its job."""
    adapter: AdapterRef | None = None
    """The LoRA adapter that it uses; a forked request has that of its parent."""
    items: list[InputItem] = []
    """Images and given embeddings at positions of its prompt, in ascending order; a forked request has those of its
    parent."""
    kv_transfer: bytes = b""  # Reserved: rejected unless left at the default.
    tenant: int = 0
    """Tenant number from 1, or 0 for none; admission is fair among tenants."""
    resubmitted: bool = False
    """It was submitted before, on a link that broke; a queue that has become full does not reject it."""
    forked_from: str = ""
    """Id of a request of the same front end whose tokens it continues, prompt and output, as the scheduler knows them
    when this message arrives. It has no tokens of its own, and the cache salt of the other one. Rejected with the
    code ``parent_not_found`` when that request has ended."""
    num_forked_tokens: int = 0
    """Number of tokens of that request that it continues: its whole prompt at least. 0: all."""
    pooling: PoolingParams | None = None
    """What its prompt is turned into: it then ends with the last token of its prompt, and ``sampling`` is unused."""
    hint: str = ""
    """How its client has named the job: one of HINTS, or "" for job_id. For statistics only."""


class CallsTool(Message, frozen=True, tag=25):
    """The answer of a request, which has ended or is about to end, calls this tool: the next turn follows it."""

    request_id: str
    tool: str


class TenantService(Message, frozen=True, tag=26):
    """Service that tenants got from other engines since the last one of these, for fairness over all engines: (tenant,
    tokens) in units of the waiting queue, below 0 if more was given back. The router sends it."""

    served: list[tuple[int, int]]


class Abort(Message, frozen=True, tag=11):
    request_ids: list[str]


class Stop(Message, frozen=True, tag=12):
    """The front end found a stop string: the request ends with this many output tokens; later ones are dropped."""

    request_id: str
    num_output_tokens: int


PAUSE_MODES = {"": None, "pause_new": "wait", "pause": "keep"}
"""The name that operators use for each pause: running requests continue (wait) or stop computing (keep)."""


class Control(Message, frozen=True, tag=13):
    """``kind``: statistics, requests (statistics with tenants and requests), pause (schedule nothing), pause_new (admit
    nothing), resume, abort_all, reset_prefix_cache, reset_encoder_cache.

    Answered by Statistics with the same ``query``.
    """

    kind: str
    query: int = 0


class Rejected(Message, frozen=True, tag=20):
    """The only answer to a request that was not accepted."""

    request_id: str
    code: str
    param: str
    message: str


class Ended(msgspec.Struct, array_like=True, frozen=True):
    """``stop_reason``: id of the stop token that ended the request, or None. ``num_output_tokens``: number of tokens
    that count and are billed.
    """

    handle: int
    reason: int
    num_output_tokens: int
    stop_reason: int | None = None
    detail: str = ""


class Hypothesis(msgspec.Struct, array_like=True, frozen=True):
    """One output of a beam search.

    Attributes:
        tokens: its output tokens, with the stop token that ended it.
        score: ``logprob`` divided by the number of tokens to the power of the length penalty.
        logprob: sum of the log probabilities of its tokens.
        reason: value of an EndReason: stopped or length.
        stop_reason: as of Ended.
    """

    tokens: list[int]
    score: float
    logprob: float
    reason: int
    stop_reason: int | None = None


class Introduced(msgspec.Struct, array_like=True, frozen=True):
    """``admitted``: time of the first admission, in seconds of the monotonic clock that all processes share; 0 without
    one."""

    handle: int
    request_id: str
    num_cached_tokens: int
    admitted: float = 0.0


class StepOutputs(Message, frozen=True, tag=21):
    """Results of one step for this front end.

    Attributes:
        counts: number of tokens of each handle; None when every request got one.
        hypotheses: (handle, outputs) of beam searches that end in this step, the best output first.
        side: rows beside the tokens, at most one part of each kind.
        timeline: (request id, event) of requests that have asked for it.
    """

    introduced: list[Introduced]
    handles: Int32 | None
    tokens: Int32 | None
    ended: list[Ended]
    counts: Int32 | None = None
    side: list[SideRows] = []
    hypotheses: list[tuple[int, list[Hypothesis]]] = []
    timeline: list[tuple[str, TimelineEvent]] = []


class Histogram(msgspec.Struct, frozen=True):
    """Values such as seconds: ``counts[i]`` is that of the bucket up to ``bounds[i]``, the last one of all above."""

    bounds: list[float]
    counts: list[int]
    total: float


class TenantState(msgspec.Struct, frozen=True):
    """Requests and KV blocks of one tenant; a block that several requests share counts once for each."""

    tenant: int
    num_running: int
    num_waiting: int
    num_blocks: int


class RequestState(msgspec.Struct, frozen=True):
    """``state``: running, waiting, held or leaving. ``reason``: why it waits or is held, or why it runs and is not
    computed now, or "". ``arrival``: seconds of the monotonic clock that all processes share. ``adapter``: the name by
    which its client asked for its LoRA adapter, or ""."""

    request_id: str
    tenant: int
    state: str
    reason: str
    arrival: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_blocks: int
    num_preemptions: int
    adapter: str = ""


class TierState(msgspec.Struct, array_like=True, frozen=True):
    """A tier of the prefix cache beyond the device; counts are blocks since start.

    Attributes:
        name: host or disk.
        num_pages, num_cached: pages, and those with content now; no pages while a disk is not in use.
        num_evicted: contents evicted for others.
        num_loaded, num_stored: blocks copied to and from the device.
        num_failed: blocks of loads and stores that could not be copied, or whose page held something else.
        num_late: loads that were not answered in time; their requests computed instead.
        num_unsaved: contents that the device, or the tier before this one, evicted before they were stored.
        load_seconds, store_seconds: time that the copies took, of the slowest rank.
        is_stopped: whether nothing is stored for a while, because the last copies to the tier have failed.
    """

    name: str
    num_pages: int
    num_cached: int
    num_evicted: int = 0
    num_loaded: int = 0
    num_stored: int = 0
    num_failed: int = 0
    num_late: int = 0
    num_unsaved: int = 0
    load_seconds: float = 0.0
    store_seconds: float = 0.0
    is_stopped: bool = False


class AdapterCounts(msgspec.Struct, array_like=True, frozen=True):
    """Requests of a LoRA adapter.

    Attributes:
        name: the one by which its newest request asked for it.
        place: active (steps compute its requests), ready (in a slot), loading, host (in host memory) or absent.
    """

    name: str
    place: str
    num_running: int
    num_waiting: int


class ProgramCounts(msgspec.Struct, array_like=True, frozen=True):
    """Programs, which are agents and conversations.

    Attributes:
        num_known: programs that are remembered.
        turns: number of requests by how their program was found: a name of HINTS, prefix (they continue a turn of it),
            new (they continue none) or none (without prefix caching, and shorter than a block).
        num_later_prompt_tokens, num_later_hit_tokens: prompt tokens of all turns but first ones, and those of them that
            the prefix cache had.
        num_admitted: programs that are admitted now; 0 without ``--scheduling-policy program``, as the following.
        num_waiting: programs with requests that are not admitted.
        num_released: number of programs that are not admitted any more, by reason: idle, grown, ended or forgotten.
    """

    num_known: int
    turns: dict[str, int]
    num_later_prompt_tokens: int = 0
    num_later_hit_tokens: int = 0
    num_admitted: int = 0
    num_waiting: int = 0
    num_released: dict[str, int] = {}


class Statistics(Message, frozen=True, tag=22):
    """Counters since start and current gauges; answers a Control."""

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
    """Cached contents that were evicted because their block was allocated."""
    num_requests_refused: int = 0
    num_stray_messages: int = 0
    """Aborts, stops, releases and results for requests that do not exist (any more); counted and otherwise ignored."""
    waiting_by_reason: dict[str, int] = {}
    """Number of waiting requests by wait reason."""
    preemptions_by_reason: dict[str, int] = {}
    load_choices: dict[str, int] = {}
    """How requests got what tiers had of their prefix: load, compute or split."""
    kv_block_lifetime: Histogram | None = None
    kv_block_idle_before_evict: Histogram | None = None
    kv_block_reuse_gap: Histogram | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_trace_lines_lost: int = 0
    """Trace lines lost because the disk was too slow or failed."""
    num_worker_restarts: int = 0
    """Worker groups lost; new workers recomputed their requests."""
    num_slow_steps: int = 0
    """Steps that took at least 0.5 s and five times the usual time for their size."""
    step_tokens: Histogram | None = None
    """Number of tokens of each step."""
    step_schedule: Histogram | None = None
    """Seconds per step: to decide and send it. The three below: until its result, to apply that, to send its tokens."""
    step_worker: Histogram | None = None
    step_update: Histogram | None = None
    step_reply: Histogram | None = None
    tenants: list[TenantState] = []
    """All tenants with requests, and the oldest requests; only in the answer to the kind ``requests``."""
    requests: list[RequestState] = []
    block_size: int = 0
    """Tokens in a KV block."""
    tiers: list[TierState] = []
    adapters: list[AdapterCounts] = []
    """The adapters with the most requests."""
    adapters_by_place: dict[str, int] = {}
    """Number of known adapters by ``AdapterCounts.place``; empty without LoRA adapters."""
    num_adapters_loaded: int = 0
    """Loads of adapters into slots."""
    num_adapters_failed: int = 0
    """Loads that failed."""
    num_adapters_evicted: int = 0
    """Adapters that lost their slot to another one."""
    adapter_load_seconds: float = 0.0
    """Time that the loads took, of the slowest rank."""
    programs: ProgramCounts | None = None
    """None without a policy that needs programs."""

    evictions_by_policy: dict[str, int] = {}
    """Contents evicted by lru, and although they were pinned; empty unless there are pins."""
    num_pins: int = 0
    """Programs whose blocks are kept between two turns."""
    num_pinned_blocks: int = 0
    pins_ended: dict[str, int] = {}
    """Number of pins that have ended by reason: return, deadline, pressure, replaced or forgotten."""
    pin_seconds: dict[str, float] = {}
    """Time for which blocks were kept last, by the tool that runs; ``none`` without one."""
    num_pin_failures: int = 0
    """Choices of this time that failed."""
    tenant_service: list[tuple[int, int]] = []
    """Service of each tenant since this scheduler began, as in TenantService; empty with fewer than two API keys."""
    num_drafts: int = 0
    """Rounds of drafts: sampled outputs for which at least one draft token was verified."""
    num_accepted_tokens_per_pos: dict[str, int] = {}
    """Number of rounds that accepted the draft token at this position, from 0 on; empty without drafts."""
    num_invalid_draft_tokens: int = 0
    """Draft tokens that a grammar forbids, and those after them."""
    encoder_cache_tokens: int = 0
    """Rows for which the encoder cache has room; 0 without one."""
    num_encoder_cache_tokens: int = 0
    """Rows that have room there."""
    num_encoder_runs: int = 0
    """Images and given embeddings that workers were asked to encode."""
    num_encoder_failures: int = 0
    num_encoder_hits: int = 0
    """Items of requests whose rows were in the encoder cache, or on their way there."""
    num_encoder_evictions: int = 0
    """Items whose rows were dropped for others."""
    encoder_seconds: float = 0.0
    """Time that the runs took, of the slowest rank."""

    @property
    def num_pages(self) -> int:
        """Pages of all tiers together."""
        return sum(tier.num_pages for tier in self.tiers)

    def counts(self) -> dict[str, int]:
        """Return the whole numbers by name, for a caller in Python.

        A counter by reason has one key for each reason, such as ``waiting_by_reason_kv_blocks``, and one of a tier has
        the tier's name in front, such as ``host_num_loaded``. Histograms and times are left out.
        """
        found: dict[str, int] = {}
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, dict):
                found |= {f"{name}_{reason}": count for reason, count in value.items() if isinstance(count, int)}
            elif isinstance(value, int) and name != "query":
                found[name] = int(value)
        for tier in self.tiers:
            numbers = {name: getattr(tier, name) for name in tier.__struct_fields__}
            found |= {f"{tier.name}_{name}": count for name, count in numbers.items() if isinstance(count, int)}
        if self.programs is not None:
            found |= {f"turns_{found_by}": count for found_by, count in self.programs.turns.items()}
            found["num_programs"] = self.programs.num_known
        return found


class EngineState(Message, frozen=True, tag=23):
    """``kind``: loading, ready, recovering, draining, failed. ``pause``: empty, pause or pause_new, as in Control."""

    kind: str
    detail: str = ""
    pause: str = ""


ClientEvent: TypeAlias = AddRequest | CallsTool | Abort | Stop | Control | UnloadAdapter | TenantService
"""The messages of a front end that the Scheduler consumes."""
FrontEndToScheduler: TypeAlias = Hello | Heartbeat | ClientEvent
SchedulerToFrontEnd: TypeAlias = Welcome | Refused | Heartbeat | Rejected | StepOutputs | Statistics | EngineState
