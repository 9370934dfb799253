"""The engine's configuration after every default is resolved: frozen, and the same in each process."""

import hashlib

import msgspec

from quire.protocol.model.model_config import ModelConfig
from quire.protocol.routing import RoutingConfig, RoutingPolicy
from quire.protocol.settings import EngineSettings

MIN_PRIORITY, MAX_PRIORITY = -(2**31), 2**31 - 1
FIRST_WORKER_EPOCH = 1
"""The worker epoch of the first worker group."""


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How drafts are proposed and accepted; ``EngineConfig.num_speculative_tokens`` limits their number.

    Attributes:
        method: ngram (the continuation of the same last tokens earlier in the request), suffix (the same over the
            answers of earlier requests too, with a suffix tree) or draft_model.
        model, model_path: the draft model, which has the vocabulary of the target model.
        prompt_lookup_min, prompt_lookup_max: fewest and most last tokens that ngram looks up.
        suffix_max_depth: longest context of the suffix tree, in tokens.
        suffix_max_cached_requests: number of answers in the suffix tree; 0 searches the request's own tokens only.
        acceptance: shared_noise (a draft is accepted if it equals the token that would have been sampled, so the text
            does not depend on the number of drafts) or rejection (Leviathan et al., 2023; for draft_model).
        adaptive: use fewer drafts, or none, where measured step times and acceptance show that more are slower.
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


class RankPlace(msgspec.Struct, frozen=True):
    """Where a rank runs.

    Attributes:
        node: address of a node agent, ``tcp://ADDRESS:PORT``, or "" for this machine.
        device: number of its GPU there.
        node_key: the public key of the agent, 40 characters of Z85.
        num_devices: number of devices of the node, among whose engines its cores and host memory are divided.
    """

    node: str = ""
    device: int = 0
    node_key: str = ""
    num_devices: int = 1


class EngineConfig(EngineSettings, frozen=True, kw_only=True):
    """Configuration of scheduler and workers: the settings, and the values that ``quire.launch.config.engine_config``
    resolves.

    Attributes:
        model_path: checkpoint directory; empty for dummy weights of a named shape.
        device: cpu or cuda.
        dtype: dtype of weights and activations.
        kv_cache_dtype: dtype of the KV cache: float32, float16, bfloat16, float8_e4m3fn or float8_e5m2.
        max_model_len: maximum number of tokens of one request, prompt and output together.
        max_num_seqs: maximum number of requests in one step.
        max_num_batched_tokens: maximum number of tokens in one step.
        encoder_cache_tokens: rows of images and given embeddings that the encoder cache holds; 0: requests have none.
        num_blocks_override: number of KV blocks, without the null block; 0 uses as many as fit into memory.
        kv_cache_memory_bytes: size of the KV pool; 0 uses the device's default.
        priority_range: lowest and highest priority of a request, or None for any.
        num_tenants: number of API keys; below 2, cached blocks are not counted per tenant.
        num_speculative_tokens: maximum number of drafts of one request in one step; 0 without a proposer.
        speculative: configuration of the proposer; None exactly when num_speculative_tokens is 0.
        logits_processors: ``module:Class`` of each logits processor that is loaded by name, in addition to installed
            plugins (entry points).
        logits_processors_exclude: entry point names of installed plugins that are not loaded.
        closed_objects: objects of a JSON schema with properties have no others, unless the schema allows them.
        sampling_defaults: the model's own values of sampling parameters, for requests that leave them out.
        chat_template: source of a template that replaces the checkpoint's; empty for none.
        thinking_start_token_ids, thinking_end_token_ids: markers around a thinking span; empty for none.
        trace: file that receives the scheduler's decisions; empty for none.
        crash_dump_dir: directory that receives the newest events of a failed engine; empty for none.
        learned_costs_dir: directory that keeps the learned costs of loads for the next start; empty for none.
        version: version of the engine, for readers of a trace.
        data_parallel_rank: number of this engine among those of the server, from 0.
        data_parallel_size: number of engines when this one was started.
        feeds_router: it publishes its KV cache events to the server's router, which chooses engines by contents.
        ranks: where each rank runs; empty: all on this machine, rank r on device r. Either all ranks are on nodes, or
            none is.
        head_key_file: file with this machine's key pair for the links to nodes; empty without nodes.
    """

    model: ModelConfig
    model_path: str
    device: str = "cpu"
    dtype: str = "float32"
    kv_cache_dtype: str = "float32"
    max_model_len: int
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    encoder_cache_tokens: int = 0
    num_blocks_override: int = 0
    kv_cache_memory_bytes: int = 0
    priority_range: tuple[int, int] | None = None
    num_tenants: int = 0
    num_speculative_tokens: int = 0
    speculative: SpeculativeConfig | None = None
    logits_processors: list[str] = msgspec.field(default_factory=list)
    logits_processors_exclude: list[str] = msgspec.field(default_factory=list)
    closed_objects: bool = True
    sampling_defaults: dict[str, int | float] = msgspec.field(default_factory=dict)
    chat_template: str = ""
    thinking_start_token_ids: list[int] = msgspec.field(default_factory=list)
    thinking_end_token_ids: list[int] = msgspec.field(default_factory=list)
    trace: str = ""
    crash_dump_dir: str = ""
    learned_costs_dir: str = ""
    version: str = ""
    data_parallel_rank: int = 0
    data_parallel_size: int = 1
    feeds_router: bool = False
    ranks: list[RankPlace] = msgspec.field(default_factory=list)
    head_key_file: str = ""

    @property
    def pipeline_depth(self) -> int:
        """Maximum number of steps in flight."""
        return 2 if self.async_scheduling else 1

    @property
    def step_tokens(self) -> int:
        """Maximum number of tokens that the scheduler puts into one step."""
        return min(self.max_num_scheduled_tokens or self.max_num_batched_tokens, self.max_num_batched_tokens)

    @property
    def weights_path(self) -> str:
        """The checkpoint whose weights are loaded; empty for dummy weights."""
        return "" if self.load_format == "dummy" else self.model_path

    @property
    def uses_nodes(self) -> bool:
        """Whether the workers run on nodes."""
        return any(place.node for place in self.ranks)

    @property
    def item_kinds(self) -> tuple[str, ...]:
        """Kinds of ``InputItem`` that requests may have. Nodes do not reach the memory in which their files are, and a
        prompt that is not divided would need the rows of all of its items at once."""
        if not self.encoder_cache_tokens or self.uses_nodes or not self.enable_chunked_prefill:
            return ()
        return ("image",) * (self.model.vision is not None) + ("rows",) * self.enable_prompt_embeds

    @property
    def whole_kinds(self) -> tuple[str, ...]:
        """Kinds of ``InputItem`` whose ranges no chunk divides, because all positions of one attend to each other."""
        vision = self.model.vision
        return () if vision is None or vision.is_causal else ("image",)

    def sharing(self, rank: int) -> tuple[int, int]:
        """Return how many ranks of this engine, and how many engines, share cores and memory of a rank's machine."""
        if not self.uses_nodes:
            return self.tensor_parallel_size, self.data_parallel_size
        place = self.ranks[rank]
        beside = sum(each.node == place.node for each in self.ranks)
        return beside, max(1, place.num_devices // beside)

    @property
    def uses_programs(self) -> bool:
        """Whether the scheduler must know which requests belong to one program."""
        return self.scheduling_policy in ("program", "continuum")

    def routing(self, policy: RoutingPolicy, trace: str) -> RoutingConfig:
        """Return the configuration of the router of engines with this one."""
        max_loras = self.max_loras if self.enable_lora else 0
        return RoutingConfig(
            policy=policy, trace=trace, num_tenants=self.num_tenants, max_loras=max_loras, version=self.version
        )

    @property
    def digest(self) -> str:
        """Short hash that two processes compare to check that their configurations are equal."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).hexdigest()[:16]
