"""The engine's settings that a user gives and every process runs by, each declared once with what is said about it.

``quire.launch.config.options.EngineOptions`` adds the settings that a user gives in another form than the engine runs
by; ``quire.protocol.config.EngineConfig`` adds what those are resolved to.
"""

from typing import Annotated, Literal

import msgspec

MODEL = "Model and devices"
MEMORY = "Memory and batch sizes"
SCHEDULING = "Scheduling"
SAMPLING = "Sampling"
EVENTS = "Cache events"
TRACES = "Traces"


class Setting(msgspec.Struct, frozen=True):
    """What a user reads about a setting besides its name, type and default.

    Attributes:
        topic: heading that it stands under in ``--help`` and docs/flags.md.
        text: its meaning. ``--help`` shows the first sentence; docs/flags.md, where Markdown works, shows all.
        range: lowest and highest value, where they depend on no other setting; both are allowed.
        metavar: word for its value in ``--help``; numbers need none.
        default: the default in words, where the value None or "" does not say it.
    """

    topic: str
    text: str
    range: tuple[float, float] | None = None
    metavar: str = ""
    default: str = ""

    @property
    def help(self) -> str:
        return self.text.split(". ")[0]


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that the engine runs by as they are given."""

    load_format: Annotated[
        Literal["auto", "safetensors", "dummy"],
        Setting(MODEL, "format of the weights; dummy: random weights of the checkpoint's shape"),
    ] = "auto"
    tensor_parallel_size: Annotated[
        int,
        Setting(
            MODEL,
            "worker processes that share each layer. One per GPU, or on a CPU one per share of the cores",
            range=(1, 64),
        ),
    ] = 1
    attention_backend: Annotated[
        Literal["auto", "cpu", "triton", "flashinfer", "flash_attn"],
        Setting(
            MODEL,
            "attention kernels; auto: cpu on a CPU, triton on a GPU. `flashinfer` and `flash_attn` need a GPU, "
            "the extras of these names, and a model and settings that they support: otherwise the start is "
            "refused with what is missing. The log names the backend and the reason for it",
        ),
    ] = "auto"
    enforce_eager: Annotated[
        bool, Setting(MODEL, "do not use CUDA graphs. This needs less memory and starts faster; steps are slower")
    ] = False
    deterministic: Annotated[
        bool,
        Setting(
            MODEL,
            "make tokens and log probabilities of a request bitwise independent of other requests; slower. How "
            "its prompt is cut into chunks does not matter either",
        ),
    ] = False
    seed: Annotated[int, Setting(MODEL, "random seed for dummy weights", range=(0, 2**63 - 1))] = 0

    block_size: Annotated[int, Setting(MEMORY, "tokens in a KV block", range=(1, 1024))] = 16
    gpu_memory_utilization: Annotated[
        float, Setting(MEMORY, "share of a GPU's memory to use", range=(0.01, 1.0), metavar="SHARE")
    ] = 0.9
    enable_prefix_caching: Annotated[bool, Setting(MEMORY, "reuse the KV of equal prefixes")] = True
    prefix_caching_hash_algo: Annotated[
        Literal["sha256", "xxh3_128", "xxhash"],
        Setting(
            MEMORY,
            "hash of cached blocks; xxhash means xxh3_128 and needs the extra xxhash. `xxh3_128` is faster, but a "
            "client can construct collisions: use it with trusted clients only",
        ),
    ] = "sha256"
    isolate_prefix_cache_by_key: Annotated[
        bool, Setting(MEMORY, "requests of one API key do not reuse cached prefixes of another key")
    ] = False

    async_scheduling: Annotated[bool, Setting(SCHEDULING, "schedule a step while the step before it runs")] = True
    enable_chunked_prefill: Annotated[
        bool,
        Setting(
            SCHEDULING,
            "spread long prompts over several steps. Without it `--max-num-batched-tokens` must be at least "
            "`--max-model-len`",
        ),
    ] = True
    long_prefill_token_threshold: Annotated[
        int, Setting(SCHEDULING, "most prompt tokens of one request in one step; 0: no limit", range=(0, 2**24))
    ] = 0
    max_prefill_share: Annotated[
        float,
        Setting(
            SCHEDULING,
            "largest share of a step's tokens for prefill while other requests decode. A low share keeps streams "
            "steady, a high share makes first tokens early",
            range=(0.01, 1.0),
            metavar="SHARE",
        ),
    ] = 0.5
    scheduling_policy: Annotated[
        Literal["fcfs", "priority"],
        Setting(SCHEDULING, "fcfs: the earliest request first; priority: the lowest priority, then the earliest"),
    ] = "fcfs"
    fair_admission: Annotated[
        bool,
        Setting(
            SCHEDULING,
            "API keys take turns, and share rows, KV blocks and the prefix cache. Without API keys it changes "
            "nothing: [tenants](scheduling.md#tenants)",
        ),
    ] = True
    max_num_queued_reqs: Annotated[
        int,
        Setting(
            SCHEDULING,
            "most answers (n per request) that wait; further requests get 503; 0: no limit. The 503 has "
            "`Retry-After`; `LLM` holds its own requests back instead",
            range=(0, 2**20),
        ),
    ] = 0
    reserve_full_sequence: Annotated[
        bool,
        Setting(
            SCHEDULING,
            "admit a request only when the KV pool has room for its longest possible answer. Fewer requests run "
            "at once, and fewer are preempted",
        ),
    ] = False
    watermark: Annotated[
        float, Setting(SCHEDULING, "share of the KV blocks that admission leaves free", range=(0, 0.5), metavar="SHARE")
    ] = 0.0

    logprobs_mode: Annotated[
        Literal["raw_logprobs", "processed_logprobs"],
        Setting(SAMPLING, "log probabilities of the model's own distribution, or of the one that is sampled from"),
    ] = "raw_logprobs"
    structured_outputs_backend: Annotated[
        Literal["llguidance", "xgrammar"],
        Setting(SAMPLING, "library that matches grammars; xgrammar needs the package xgrammar"),
    ] = "llguidance"

    kv_events_endpoint: Annotated[
        str,
        Setting(
            EVENTS,
            "publish cache events: ipc:///folder/name or tcp://ADDRESS:port. The folder of an `ipc` socket has "
            "mode 0700, `tcp` needs keys: [cache events](kv_events.md)",
            metavar="ENDPOINT",
            default="none",
        ),
    ] = ""
    kv_events_replay_endpoint: Annotated[
        str,
        Setting(
            EVENTS,
            "where a subscriber asks for events that it missed, in the same form",
            metavar="ENDPOINT",
            default="none",
        ),
    ] = ""
    kv_events_curve_dir: Annotated[
        str,
        Setting(
            EVENTS,
            "keys for events over TCP: server.key_secret, and allowed/*.key of permitted subscribers. [how they "
            "are made](kv_events.md#keys)",
            metavar="DIR",
            default="none",
        ),
    ] = ""

    trace_prompts: Annotated[
        bool,
        Setting(
            TRACES,
            "record the prompts' tokens in traces. Otherwise a prompt is recorded as its length and the hashes of "
            "its blocks",
        ),
    ] = False
    trace_max_bytes: Annotated[
        int,
        Setting(
            TRACES,
            "size at which a trace continues in FILE.1, FILE.2, ...; 0: one file. At least 65536",
            metavar="BYTES",
        ),
    ] = 0
