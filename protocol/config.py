"""The engine's settings once every default is decided: frozen, the same in each process."""

import hashlib

import msgspec

from quire.protocol.model.model_config import ModelConfig

MIN_PRIORITY, MAX_PRIORITY = -(2**31), 2**31 - 1
FIRST_EPOCH = 1
"""The worker group's first life; a restart counts on."""


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who proposes drafts, and how they are accepted. ``EngineConfig.num_speculative_tokens`` says how many at most.

    Attributes:
        method: ngram (what followed the same last tokens earlier in the request), suffix (the same over earlier
            answers too, by a suffix tree) or draft_model.
        model, model_path: of the draft model; its vocabulary is the model's.
        prompt_lookup_min, prompt_lookup_max: how many last tokens must have stood there before, for ngram.
        suffix_max_depth: longest context of the suffix tree, in tokens.
        suffix_max_cached_requests: answers that the suffix tree remembers; 0 for none but the request's own text.
        acceptance: shared_noise (a draft is accepted while it is the token that would have been sampled: the text is
            the same with any number of drafts) or rejection (Leviathan et al., 2023; for draft_model).
        adaptive: use fewer drafts, down to none, where more do not pay by measured step times and acceptance.
    """

    method: str
    model: ModelConfig | None = None
    model_path: str = ""
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 5
    suffix_max_depth: int = 24
    suffix_max_cached_requests: int = 1000
    acceptance: str = "shared_noise"
    adaptive: bool = True


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What scheduler and worker run by. ``quire.launch.config.options`` makes it from flags and the checkpoint.

    Attributes:
        model_path: checkpoint folder; empty for random weights of a named shape.
        device: cpu or cuda.
        dtype: of weights and activations.
        kv_cache_dtype: of the KV cache: float32, float16, bfloat16, float8_e4m3fn or float8_e5m2.
        tensor_parallel_size: ranks, each a worker process, that every layer is cut among.
        attention_backend: auto, or the name of one.
        enforce_eager: never capture a step as a CUDA graph.
        deterministic: a request's tokens do not depend, bit for bit, on what else runs or how its prompt was cut.
        max_model_len: most tokens of one request, prompt and answer together.
        max_num_seqs: most requests in one step.
        max_num_batched_tokens: most tokens in one step.
        num_blocks_override: KV blocks to use whatever the memory, without the null block; 0 for by memory.
        kv_cache_memory_bytes: bytes for the KV pool; 0 for the device's default.
        long_prefill_token_threshold: most prompt tokens of one request in one step; 0 for no such limit.
        max_prefill_share: most of ``max_num_batched_tokens`` that prefill may take of a step in which others decode.
        scheduling_policy: fcfs, or priority (the lowest number first, then the earliest arrival).
        max_num_queued_reqs: most requests that wait; further ones are refused. 0 for no such limit.
        fair_admission: tenants take turns in the queue, and share rows, blocks and what the cache keeps.
        num_tenants: API keys that requests come with; with fewer than two the cache keeps no account of them.
        isolate_prefix_cache_by_key: no tenant finds what another one's requests left in the prefix cache.
        priority_range: (lowest, highest) priority that a request may have; None: any.
        reserve_full_sequence: admit a request only when the pool has room for all that it may grow to.
        watermark: share of the pool that admission leaves free.
        prefix_caching_hash_algo: sha256 or xxh3_128.
        num_speculative_tokens: most drafts of one request in one step; 0 without a proposer.
        speculative: who proposes them; None exactly when there are none.
        logits_processors: ``module:Class`` of each logits processor that was asked for by name; installed plugins
            (entry points) come on top.
        logprobs_mode: raw_logprobs (of the model's own distribution) or processed_logprobs (of what is sampled from).
        thinking_start_token_ids, thinking_end_token_ids: the markers around thinking; empty where there are none.
        structured_outputs_backend: llguidance or xgrammar.
        drop_last_cached_block: recompute the last block of each cache hit, for proposers that need hidden states.
        kv_events_endpoint, kv_events_replay_endpoint: where cache events are published, and missed ones asked for;
            empty for not at all. kv_events_curve_dir: keys for those over TCP.
        trace: file that the scheduler's decisions are recorded in; empty for none.
        trace_prompts: with the prompts' tokens.
        trace_max_bytes: size at which the next file of the trace is begun; 0 for one file.
        crash_dump_dir: folder for the newest events of an engine that failed; empty for none.
        version: of the engine, for whoever reads a trace.
        pipeline_depth: steps that may be in flight: 2 when asynchronous, 1 when not.
    """

    model: ModelConfig
    model_path: str
    load_format: str = "auto"
    device: str = "cpu"
    dtype: str = "float32"
    kv_cache_dtype: str = "float32"
    tensor_parallel_size: int = 1
    attention_backend: str = "auto"
    enforce_eager: bool = False
    deterministic: bool = False
    max_model_len: int
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    num_blocks_override: int = 0
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int = 0
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    max_prefill_share: float = 0.5
    scheduling_policy: str = "fcfs"
    max_num_queued_reqs: int = 0
    fair_admission: bool = True
    num_tenants: int = 0
    isolate_prefix_cache_by_key: bool = False
    priority_range: tuple[int, int] | None = None
    reserve_full_sequence: bool = False
    watermark: float = 0.0
    prefix_caching_hash_algo: str = "sha256"
    num_speculative_tokens: int = 0
    speculative: SpeculativeConfig | None = None
    logits_processors: list[str] = []
    logprobs_mode: str = "raw_logprobs"
    thinking_start_token_ids: list[int] = []
    thinking_end_token_ids: list[int] = []
    structured_outputs_backend: str = "llguidance"
    drop_last_cached_block: bool = False
    kv_events_endpoint: str = ""
    kv_events_replay_endpoint: str = ""
    kv_events_curve_dir: str = ""
    async_scheduling: bool = True
    seed: int = 0
    trace: str = ""
    trace_prompts: bool = False
    trace_max_bytes: int = 0
    crash_dump_dir: str = ""
    version: str = ""

    @property
    def pipeline_depth(self) -> int:
        return 2 if self.async_scheduling else 1

    @property
    def num_lookahead_tokens(self) -> int:
        """Slots behind the tokens of a step: a proposer that reads hidden states writes the KV of its drafts there."""
        return self.num_speculative_tokens if self.drop_last_cached_block else 0

    @property
    def digest(self) -> str:
        """Short hash by which two processes see that they run by the same settings."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).hexdigest()[:16]
