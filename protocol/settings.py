"""The engine's user settings, each declared once with its documentation, as every process uses them.

``quire.launch.config.options.EngineOptions`` adds the settings with a user form that differs from the engine's;
``quire.protocol.config.EngineConfig`` adds the values that they resolve to.
"""

import re
from posixpath import normpath
from typing import Annotated, Literal

import msgspec

MODEL = "Model and devices"
MEMORY = "Memory and batch sizes"
ADAPTERS = "Adapters"
SCHEDULING = "Scheduling"
SAMPLING = "Sampling"
EVENTS = "Events of the cache"
TRACES = "Traces"

NODES = "--nodes: scheduler and workers must be on one machine for it"
ENCODERS = "an encoder, which has no KV cache and no adapters"
VECTORS_ONLY = "a model that makes vectors only: it needs one that generates text"
ROUTED_EXPERTS = "--enable-return-routed-experts: KV blocks that leave the pool would lose their experts"
STATES = "a model with recurrent states, which belong to whole rows"
STATELESS = "a model without recurrent states: it has no slots"
"""With what some settings cannot be used, and why."""
ONLY_CACHED = "enable_prefix_caching: only cached blocks are kept"

MAX_BLOCK_SIZE = 1024
"""Most tokens in a KV block."""


class Setting(msgspec.Struct, frozen=True):
    """Documentation of a setting besides its name, type and default.

    Attributes:
        topic: its heading in ``--help`` and docs/flags.md.
        text: its meaning. ``--help`` shows the first sentence; docs/flags.md shows all, as Markdown.
        range: lowest and highest allowed value, if they depend on no other setting.
        metavar: placeholder for its value in ``--help``; numbers need none.
        unit: "tokens" or "bytes" for a number that may be given as a size, such as 32k or 4GiB.
        default: the default in words, if the value None or "" does not express it.
        needs: another setting that must be on for it, and behind a colon why.
        not_with: with what it cannot be used, and why.
    """

    topic: str
    text: str
    range: tuple[float, float] | None = None
    metavar: str = ""
    default: str = ""
    unit: Literal["", "tokens", "bytes"] = ""
    needs: str = ""
    not_with: tuple[str, ...] = ()

    @property
    def plain(self) -> str:
        """The text without Markdown; a link is its target's path in the repository."""
        text = re.sub(r"\[[^]]*\]\(([^)]*)\)", lambda link: normpath(f"docs/{link[1]}"), self.text)
        return text.replace("`", "")

    @property
    def help(self) -> str:
        return self.plain.split(". ")[0]


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that the engine uses in the form in which the user gives them."""

    load_format: Annotated[
        Literal["auto", "safetensors", "dummy"],
        Setting(MODEL, "format of the weights; dummy: random weights with the checkpoint's shapes"),
    ] = "auto"
    tensor_parallel_size: Annotated[
        int,
        Setting(
            MODEL,
            "number of worker processes that split each layer. One per GPU; on a CPU, each gets an equal part of the "
            "cores",
            range=(1, 64),
        ),
    ] = 1
    attention_backend: Annotated[
        Literal["auto", "cpu", "triton", "flashinfer", "flash_attn"],
        Setting(
            MODEL,
            "attention kernels; auto: cpu on a CPU, triton on a GPU. `flashinfer` and `flash_attn` need a GPU, "
            "the extra of the same name, and a model and settings that they support; otherwise startup fails with "
            "an error that names what is missing. The log names the selected backend and the reason",
        ),
    ] = "auto"
    calculate_kv_scales: Annotated[
        bool,
        Setting(
            MODEL,
            "at start, calculate the scales of an fp8 KV cache that the checkpoint lacks, from the keys and values of "
            "fixed random tokens ([models.md](models.md#fp8-kv-cache))",
        ),
    ] = False
    enforce_eager: Annotated[
        bool,
        Setting(
            MODEL,
            "do not use CUDA graphs or, on a CPU, recorded plans. Uses less memory and starts faster, but steps are "
            "slower",
        ),
    ] = False
    deterministic: Annotated[
        bool,
        Setting(
            MODEL,
            "make tokens and log probabilities of a request bitwise independent of other requests; slower. They "
            "are also independent of how its prompt is split into chunks",
        ),
    ] = False
    seed: Annotated[int, Setting(MODEL, "random seed for dummy weights", range=(0, 2**63 - 1))] = 0

    block_size: Annotated[
        int,
        Setting(
            MEMORY,
            "tokens in a KV block. An attention library that reads larger blocks raises it (flash-attn 2: to 256)",
            range=(1, MAX_BLOCK_SIZE),
        ),
    ] = 16
    state_slots: Annotated[
        int,
        Setting(
            MEMORY,
            "slots of recurrent states, for models with such layers: one for each running request, and more for the "
            "[prefix cache](models.md#recurrent-states); 0: a fifth of the pool's memory, but at least 2 per "
            "request of a step",
            range=(0, 2**31 - 2),
            not_with=(STATELESS,),
        ),
    ] = 0
    gpu_memory_utilization: Annotated[
        float, Setting(MEMORY, "fraction of GPU memory to use", range=(0.01, 1.0), metavar="FRACTION")
    ] = 0.9
    enable_prefix_caching: Annotated[bool, Setting(MEMORY, "reuse cached KV blocks of equal prefixes")] = True
    cpu_offload_bytes: Annotated[
        int,
        Setting(
            MEMORY,
            "host memory, of all workers together, for cached KV blocks that leave the pool; 0: none. It outlives "
            "workers",
            range=(0, 2**50),
            unit="bytes",
            needs=ONLY_CACHED,
            not_with=(ENCODERS, NODES, ROUTED_EXPERTS),
        ),
    ] = 0
    ssd_cache_dir: Annotated[
        str,
        Setting(
            MEMORY,
            "folder for cached KV blocks on a local SSD, where a restarted engine finds them again. It gets a folder "
            "per model. Prompts could be reconstructed from the files: protect them likewise. With "
            "`--ssd-cache-bytes` ([tiers.md](tiers.md))",
            metavar="DIR",
            default="none",
        ),
    ] = ""
    ssd_cache_bytes: Annotated[
        int,
        Setting(
            MEMORY,
            "size of the files in `--ssd-cache-dir`, of all workers together; allocated at the start",
            range=(0, 2**50),
            unit="bytes",
            needs=ONLY_CACHED,
            not_with=(ENCODERS, NODES, ROUTED_EXPERTS),
        ),
    ] = 0
    kv_page_check: Annotated[
        Literal["all", "header"],
        Setting(
            MEMORY,
            "what is checked of a page of host memory when it is read: all of its bytes by a hash, or only the header "
            "that names its content. A page on disk is always checked as a whole, because a crash can interrupt its "
            "write",
        ),
    ] = "all"
    prefix_caching_hash_algo: Annotated[
        Literal["sha256", "xxh3_128", "xxhash"],
        Setting(
            MEMORY,
            "hash function for cached blocks; xxhash is an alias of xxh3_128. `xxh3_128` is "
            "faster, but a client can construct collisions: use it only if all clients are trusted",
        ),
    ] = "sha256"
    isolate_prefix_cache_by_key: Annotated[
        bool | None,
        Setting(
            MEMORY,
            "reuse cached prefixes only between requests with the same API key. Otherwise a client can find out by "
            "`cached_tokens`, and by the time to first token, which prompts the clients with other keys have sent",
            default="on with several API keys",
        ),
    ] = None

    enable_prompt_embeds: Annotated[
        bool,
        Setting(
            MEMORY,
            "take prompts that are given as embeddings",
            needs="enable_chunked_prefill",
            not_with=(ENCODERS, NODES),
        ),
    ] = False

    enable_lora: Annotated[
        bool,
        Setting(
            ADAPTERS,
            "serve LoRA adapters beside the model; requests name them as their model: [adapters](adapters.md). "
            "`--lora-modules` and `--lora-dir` turn it on",
            not_with=(ENCODERS, STATES),
        ),
    ] = False
    max_loras: Annotated[
        int,
        Setting(
            ADAPTERS,
            "maximum number of adapters in one step. Requests of others take turns with them. The device holds one "
            "more, so that the next adapter is loaded beside the steps",
            range=(1, 1024),
            needs="enable_lora",
        ),
    ] = 8
    max_cpu_loras: Annotated[
        int,
        Setting(
            ADAPTERS,
            "maximum number of adapters in host memory; the least recently used one is dropped for another. At least "
            "`--max-loras` + 1",
            range=(2, 2**16),
            needs="enable_lora",
        ),
    ] = 64
    max_lora_rank: Annotated[
        int,
        Setting(ADAPTERS, "highest rank of an adapter; higher ones are refused", range=(1, 1024), needs="enable_lora"),
    ] = 64

    async_scheduling: Annotated[bool, Setting(SCHEDULING, "schedule each step while the previous one runs")] = True
    enable_chunked_prefill: Annotated[
        bool,
        Setting(
            SCHEDULING,
            "split long prompts over several steps. Without it, `--max-num-batched-tokens` must be at least "
            "`--max-model-len`",
        ),
    ] = True
    max_num_scheduled_tokens: Annotated[
        int,
        Setting(
            SCHEDULING,
            "maximum number of tokens that the scheduler puts into one step, from `--max-num-seqs` to "
            "`--max-num-batched-tokens`, for which the workers keep room; 0: as many as these",
            unit="tokens",
        ),
    ] = 0
    long_prefill_token_threshold: Annotated[
        int,
        Setting(
            SCHEDULING,
            "maximum number of prompt tokens per request and step; 0: no limit",
            range=(0, 2**24),
            unit="tokens",
        ),
    ] = 0
    max_prefill_share: Annotated[
        float,
        Setting(
            SCHEDULING,
            "largest fraction of a step's tokens for prefill while other requests decode. A low fraction keeps the "
            "time between tokens steady, a high fraction shortens the time to first token",
            range=(0.01, 1.0),
            metavar="FRACTION",
        ),
    ] = 0.5
    scheduling_policy: Annotated[
        Literal["fcfs", "priority", "program", "continuum"],
        Setting(
            SCHEDULING,
            "scheduling order: fcfs (by arrival), priority (lowest value first, then by arrival), program (agents "
            "and conversations by first arrival, a limited number at a time) or continuum (by first arrival, and "
            "blocks are kept while a tool runs). See [agents](agents.md)",
        ),
    ] = "fcfs"
    max_programs: Annotated[
        int,
        Setting(
            SCHEDULING,
            "most programs that `--scheduling-policy program` admits at once; 0: adapted to the KV pool",
            range=(0, 2**20),
        ),
    ] = 0
    fair_admission: Annotated[
        bool,
        Setting(
            SCHEDULING,
            "divide rows, KV blocks and the prefix cache fairly between API keys, and admit requests of each key in "
            "turn. Without API keys, rows and KV blocks are divided between client addresses: "
            "[tenants](scheduling.md#tenants)",
        ),
    ] = True
    max_num_queued_reqs: Annotated[
        int,
        Setting(
            SCHEDULING,
            "maximum number of waiting answers (n per request) before new requests get 503; 0: no limit. The 503 has "
            "`Retry-After`; `LLM` delays its own requests instead",
            range=(0, 2**20),
        ),
    ] = 0
    reserve_full_sequence: Annotated[
        bool,
        Setting(
            SCHEDULING,
            "admit a request only if the KV pool has room for its longest possible answer. Fewer requests run "
            "at once, and fewer are preempted",
        ),
    ] = False
    watermark: Annotated[
        float,
        Setting(
            SCHEDULING,
            "fraction of the KV blocks that admission leaves free while requests run, for their next tokens: "
            "[scheduling](scheduling.md#preemption)",
            range=(0, 0.5),
            metavar="FRACTION",
        ),
    ] = 0.05
    kv_pressure_high: Annotated[
        float,
        Setting(
            SCHEDULING,
            "fraction of used KV blocks from which on no request is admitted, until fewer than `--kv-pressure-low` are "
            "used; 1.0: no limit. It needs `--kv-pressure-low`: [scheduling](scheduling.md#preemption)",
            range=(0.01, 1.0),
            metavar="FRACTION",
        ),
    ] = 1.0
    kv_pressure_low: Annotated[
        float,
        Setting(
            SCHEDULING,
            "fraction of used KV blocks below which requests are admitted again after `--kv-pressure-high`; 1.0: no "
            "limit",
            range=(0.01, 1.0),
            metavar="FRACTION",
        ),
    ] = 1.0

    enable_return_routed_experts: Annotated[
        bool,
        Setting(
            SAMPLING,
            "keep the experts of each token in the KV pool, for requests with `return_routed_experts`: models with "
            "experts only ([routed experts](sampling.md#routed-experts))",
        ),
    ] = False
    logprobs_mode: Annotated[
        Literal["raw_logprobs", "processed_logprobs"],
        Setting(
            SAMPLING,
            "return log probabilities from before (raw_logprobs) or after (processed_logprobs) sampling parameters "
            "are applied",
        ),
    ] = "raw_logprobs"
    structured_outputs_backend: Annotated[
        Literal["llguidance", "xgrammar"],
        Setting(SAMPLING, "grammar library; xgrammar needs the package xgrammar"),
    ] = "llguidance"

    kv_events_endpoint: Annotated[
        str,
        Setting(
            EVENTS,
            "endpoint for cache events: ipc:///directory/name or tcp://ADDRESS:port. The directory of an `ipc` socket "
            "must have mode 0700, `tcp` needs keys: [cache events](kv_events.md)",
            metavar="URL",
            default="none",
            needs="enable_prefix_caching: without it there are no events",
            not_with=(ENCODERS,),
        ),
    ] = ""
    kv_events_replay_endpoint: Annotated[
        str,
        Setting(
            EVENTS,
            "endpoint for requests to replay missed cache events, in the same form",
            metavar="URL",
            default="none",
        ),
    ] = ""
    kv_events_curve_dir: Annotated[
        str,
        Setting(
            EVENTS,
            "directory of CURVE keys for cache events over TCP: server.key_secret, and allowed/*.key of permitted "
            "subscribers. [How to create them](kv_events.md#keys)",
            metavar="DIR",
            default="none",
        ),
    ] = ""
    kv_events_without_keys: Annotated[
        bool, Setting(EVENTS, "allow `tcp` without keys: any process that reaches the port can read the events")
    ] = False
    kv_events_format: Annotated[
        Literal["quire", "vllm"],
        Setting(EVENTS, "format of cache events: Quire's or [vLLM's](kv_events.md#vllms-format)"),
    ] = "quire"
    kv_events_topic: Annotated[
        str,
        Setting(
            EVENTS, "topic of cache events in vLLM's format, such as kv@POD@MODEL", metavar="TOPIC", default="none"
        ),
    ] = ""

    trace_prompts: Annotated[
        bool,
        Setting(
            TRACES,
            "record prompt tokens in traces. Otherwise a prompt is recorded as its length and the hashes of its blocks",
        ),
    ] = False
    trace_max_bytes: Annotated[
        int,
        Setting(
            TRACES,
            "size at which a trace continues in FILE.1, FILE.2, ...; 0: one file. The minimum is 65536",
            unit="bytes",
        ),
    ] = 0
