"""The engine's configuration once every default is resolved: frozen, the same in each process."""

import hashlib

import msgspec

from quire.protocol.model.model_config import ModelConfig
from quire.protocol.settings import EngineSettings

MIN_PRIORITY, MAX_PRIORITY = -(2**31), 2**31 - 1
FIRST_WORKER_EPOCH = 1
"""The worker group's first life; a restart counts on."""


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How drafts are proposed and accepted. ``EngineConfig.num_speculative_tokens`` says how many at most.

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


class EngineConfig(EngineSettings, frozen=True, kw_only=True):
    """What scheduler and workers run by: the settings, and what ``quire.launch.config.engine_config`` resolved.

    Attributes:
        model_path: checkpoint folder; empty for random weights of a named shape.
        device: cpu or cuda.
        dtype: of weights and activations.
        kv_cache_dtype: of the KV cache: float32, float16, bfloat16, float8_e4m3fn or float8_e5m2.
        max_model_len: most tokens of one request, prompt and answer together.
        max_num_seqs: most requests in one step.
        max_num_batched_tokens: most tokens in one step.
        num_blocks_override: KV blocks to use, without the null block; 0: as many as fit into the memory.
        kv_cache_memory_bytes: bytes for the KV pool; 0: the device's default.
        priority_range: (lowest, highest) priority that a request may have; None: any.
        num_tenants: API keys that requests come with; with fewer than two the cache keeps no account of them.
        num_speculative_tokens: most drafts of one request in one step; 0 without a proposer.
        speculative: proposer of the drafts; None exactly when there are none.
        logits_processors: ``module:Class`` of each logits processor that is loaded by name; installed plugins
            (entry points) come on top.
        thinking_start_token_ids, thinking_end_token_ids: the markers around thinking; empty: none.
        trace: file that the scheduler's decisions are recorded in; empty: none.
        crash_dump_dir: folder for the newest events of an engine that failed; empty: none.
        version: of the engine, for readers of a trace.
    """

    model: ModelConfig
    model_path: str
    device: str = "cpu"
    dtype: str = "float32"
    kv_cache_dtype: str = "float32"
    max_model_len: int
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    num_blocks_override: int = 0
    kv_cache_memory_bytes: int = 0
    priority_range: tuple[int, int] | None = None
    num_tenants: int = 0
    num_speculative_tokens: int = 0
    speculative: SpeculativeConfig | None = None
    logits_processors: list[str] = msgspec.field(default_factory=list)
    thinking_start_token_ids: list[int] = msgspec.field(default_factory=list)
    thinking_end_token_ids: list[int] = msgspec.field(default_factory=list)
    trace: str = ""
    crash_dump_dir: str = ""
    version: str = ""

    @property
    def pipeline_depth(self) -> int:
        """Steps that may be in flight."""
        return 2 if self.async_scheduling else 1

    @property
    def digest(self) -> str:
        """Short hash by which two processes see that they run by the same settings."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).hexdigest()[:16]
