"""Validation of arriving requests, and construction of Request objects. Each refusal names the field and its range."""

import math
from typing import Protocol

import numpy as np

from quire.protocol.block_hash import BlockHasher
from quire.protocol.config import EngineConfig
from quire.protocol.errors import ConfigError
from quire.protocol.model.kv_layout import KVLayout
from quire.protocol.request.pooling_params import NO_SAMPLING, PoolingParams
from quire.protocol.request.sampling_params import MAX_SALT_LENGTH, SamplingParams
from quire.protocol.wire.adapter_messages import DIGEST_BYTES, AdapterRef
from quire.protocol.wire.arrays import Int32
from quire.protocol.wire.front_end_messages import MAX_JOB_ID, AddRequest, Rejected
from quire.protocol.wire.side_rows import MAX_SIDE_BYTES
from quire.scheduler_proc.adapters.adapters import Adapters
from quire.scheduler_proc.kv.manager import KVCacheManager
from quire.scheduler_proc.programs.programs import JobEnded, Programs
from quire.scheduler_proc.requests.repetition import RepetitionWatch
from quire.scheduler_proc.requests.request import Program, Request
from quire.scheduler_proc.requests.tokens import Tokens, TokenStore

MAX_REQUEST_ID = 256
MAX_ADAPTER_NAME = 256
MAX_ADAPTER_PATH = 4096


class Refusal(Exception):
    """The request is not accepted; becomes the Rejected message."""

    def __init__(self, code: str, param: str, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.param = param
        self.text = text

    def message(self, request_id: str) -> Rejected:
        return Rejected(request_id, self.code, self.param, self.text)


class ArrivalFields(Protocol):
    """Fields that all kinds of arrivals have."""

    @property
    def request_id(self) -> str: ...
    @property
    def sampling(self) -> SamplingParams: ...
    @property
    def seed(self) -> int: ...
    @property
    def priority(self) -> int: ...
    @property
    def arrival(self) -> float: ...
    @property
    def tenant(self) -> int: ...
    @property
    def resubmitted(self) -> bool: ...
    @property
    def adapter(self) -> AdapterRef | None: ...
    @property
    def job_id(self) -> str: ...
    @property
    def is_last_step(self) -> bool: ...
    @property
    def pooling(self) -> PoolingParams | None: ...
    @property
    def hint(self) -> str: ...


class Admission:
    """Turns arrivals into Requests, and keeps none of them. ``kv`` gives the limits of the block pool."""

    def __init__(self, config: EngineConfig, kv: KVCacheManager, adapters: Adapters, programs: Programs) -> None:
        self.config = config
        self.kv = kv
        self._adapters = adapters
        self._programs = programs
        self._hasher = BlockHasher(config.prefix_caching_hash_algo, kv.block_size)

    def admit(self, event: AddRequest, client: int, parent: Request | None) -> Request:
        """Return the Request for ``event``, without a handle. ``parent``: the request from which it is forked.

        Raises:
            Refusal: the request could never generate one token or a vector, or a field is out of range.
        """
        config = self.config
        self.check_order(event)
        self.check_adapter(event.adapter)
        self.check_task(event, len(event.prompt_token_ids))
        self._check_fields(event)
        if event.forked_from:
            return self._fork(event, client, parent)
        self._check_prompt(event)
        owner = event.tenant if config.isolate_prefix_cache_by_key else 0
        digest = "" if event.adapter is None else event.adapter.digest.hex()
        chain = self._hasher.chain(event.cache_salt, digest, tenant=owner) if self.kv.pool.enable_caching else None
        request = self.build(event, client, Tokens(_known_tokens(event), chain), len(event.prompt_token_ids))
        if event.sampling.repetition_detection is not None:
            delivered = () if event.output_token_ids is None else event.output_token_ids.tolist()
            request.repetition = RepetitionWatch(event.sampling.repetition_detection, delivered)
        return request

    def check_order(self, event: ArrivalFields) -> None:
        """Raise Refusal unless arrival, priority and tenant define a place in the queue, and are allowed."""
        if not math.isfinite(event.arrival):  # NaN has no order
            raise Refusal("invalid_value", "arrival", f"arrival must be a finite number (got {event.arrival})")
        if not -(2**31) <= event.priority < 2**31:
            text = f"priority must be from {-(2**31)} to {2**31 - 1} (got {event.priority})"
            raise Refusal("invalid_value", "priority", text)
        if not 0 <= event.tenant < 2**31:
            text = f"tenant must be from 0 to {2**31 - 1} (got {event.tenant})"
            raise Refusal("invalid_value", "tenant", text)
        if self.config.priority_range is not None:
            low, high = self.config.priority_range
            if not low <= event.priority <= high:
                raise Refusal(
                    "priority_not_allowed",
                    "priority",
                    f"this server allows a priority from {low} to {high} (got {event.priority})",
                )

    def check_adapter(self, adapter: AdapterRef | None) -> None:
        """Raise Refusal unless this engine can load the adapter, if there is one."""
        if adapter is None:
            return
        if not self.config.enable_lora:
            raise Refusal("unsupported", "model", f"this engine serves no adapters (got {adapter.name!r})")
        if len(adapter.digest) != DIGEST_BYTES:
            text = f"the digest of an adapter must have {DIGEST_BYTES} bytes (got {len(adapter.digest)})"
            raise Refusal("invalid_value", "model", text)
        for what, text, most in (("name", adapter.name, MAX_ADAPTER_NAME), ("path", adapter.path, MAX_ADAPTER_PATH)):
            if len(text) > most:
                text = f"the {what} of an adapter must have at most {most} characters (got {len(text)})"
                raise Refusal("invalid_value", "model", text)

    def check_task(self, event: ArrivalFields, num_prompt_tokens: int) -> None:
        """Raise Refusal unless the model does what the request asks for, and the rows of a pooled one are not too many.

        ``num_prompt_tokens``: of a pooled request.
        """
        params, can = event.pooling, self.config.model.pooling
        tasks = "none" if can is None else ", ".join(can.tasks)
        if params is None:
            if not self.config.model.generates:
                raise Refusal("unsupported", "", f"this model cannot generate tokens; its pooling tasks: {tasks}")
            return
        if can is None or params.task not in can.tasks:
            raise Refusal("unsupported", "task", f"this model cannot {params.task}; its pooling tasks: {tasks}")
        if params.dimensions and params.task == "classify":
            text = f"dimensions cannot be combined with task classify (got {params.dimensions})"
            raise Refusal("invalid_value", "dimensions", text)
        if params.dimensions and (allowed := can.dimensions_allowed(params.dimensions)):
            raise Refusal("invalid_value", "dimensions", f"dimensions must be {allowed} (got {params.dimensions})")
        num_rows = num_prompt_tokens if params.task == "token_embed" else 1
        num_bytes = 4 * num_rows * can.width(params.task, params.dimensions)
        if num_bytes > MAX_SIDE_BYTES:
            text = (
                f"the vectors of {num_rows} tokens have {num_bytes} bytes, more than the {MAX_SIDE_BYTES} that a "
                "request may have: shorten the prompt or lower dimensions"
            )
            raise Refusal("invalid_value", "prompt", text)

    def check_length(self, event: ArrivalFields, num_prompt_tokens: int) -> None:
        """Raise Refusal unless the prompt, and its first token if another one follows, fit into context and KV pool."""
        config, kv = self.config, self.kv
        if num_prompt_tokens < 1:
            raise Refusal("invalid_value", "prompt", "prompt must have at least 1 token")
        is_all = event.pooling is not None or event.sampling.max_tokens == 1
        num_tokens = num_prompt_tokens + (not is_all)
        if num_tokens > config.max_model_len:
            what = "of a prompt" if is_all else "for prompt and output"
            text = (
                f"This model's maximum context length is {config.max_model_len} tokens {what}; "
                f"the prompt has {num_prompt_tokens}"
            )
            raise Refusal("context_length_exceeded", "prompt", text)
        if num_tokens > kv.max_tokens:
            needed, present = kv.num_blocks_for(num_tokens), kv.pool.num_usable_blocks
            what = "needs" if is_all else "and one token need"
            text = f"the prompt {what} {needed} KV blocks; the pool has {present}"
            raise Refusal("kv_pool_too_small", "prompt", text)

    def _check_fields(self, event: AddRequest) -> None:
        """Raise Refusal unless all fields are valid and the request can generate at least one token."""
        if not 1 <= len(event.request_id) <= MAX_REQUEST_ID:
            text = f"request_id must have 1 to {MAX_REQUEST_ID} characters (got {len(event.request_id)})"
            raise Refusal("invalid_value", "request_id", text)
        if len(event.cache_salt) > MAX_SALT_LENGTH:
            text = f"cache_salt must have at most {MAX_SALT_LENGTH} characters (got {len(event.cache_salt)})"
            raise Refusal("invalid_value", "cache_salt", text)
        _check_sampling(event.sampling, self.config)
        if not 0 <= event.seed < 2**64:
            raise Refusal("invalid_value", "seed", f"seed must be from 0 to {2**64 - 1} (got {event.seed})")
        if len(event.job_id) > MAX_JOB_ID:
            text = f"job_id must have at most {MAX_JOB_ID} characters (got {len(event.job_id)})"
            raise Refusal("invalid_value", "job_id", text)
        if event.is_last_step and not event.job_id:
            raise Refusal("invalid_value", "is_last_step", "is_last_step needs a job_id, whose last step it is")
        reserved = ("mm_features", "kv_transfer")
        width = event.sampling.beam_width
        if width is not None and width > self.config.max_num_seqs:
            text = f"beam_width must be from 1 to {self.config.max_num_seqs}, the engine's max_num_seqs (got {width})"
            raise Refusal("invalid_value", "beam_width", text)
        used = [name for name in reserved if getattr(event, name)]
        if used:
            raise Refusal("unsupported", "", f"request uses fields reserved for later versions: {', '.join(used)}")

    def _check_prompt(self, event: AddRequest) -> None:
        vocab_size, delivered = self.config.model.vocab_size, event.output_token_ids
        if event.pooling is not None and delivered is not None and len(delivered):
            text = f"a request with pooling has no output (got {len(delivered)} tokens)"
            raise Refusal("invalid_value", "output_token_ids", text)
        self.check_length(event, len(event.prompt_token_ids))
        for known in (event.prompt_token_ids, delivered):
            if known is not None and len(known) and not (known.min() >= 0 and known.max() < vocab_size):
                worst = known.min() if known.min() < 0 else known.max()
                raise Refusal("invalid_value", "prompt", f"token ids must be from 0 to {vocab_size - 1} (got {worst})")

    def _fork(self, event: AddRequest, client: int, parent: Request | None) -> Request:
        """Return a request with the known tokens of its parent."""
        if event.pooling is not None or (parent is not None and parent.pooling is not None):
            text = "forked_from cannot be combined with pooling, neither of this request nor of the one to fork"
            raise Refusal("unsupported_value", "forked_from", text)
        if parent is None:
            text = f"there is no request {event.forked_from!r} to fork"
            raise Refusal("parent_not_found", "forked_from", text)
        if len(event.prompt_token_ids) or event.output_token_ids is not None:
            raise Refusal(
                "invalid_value", "prompt", "a forked request has the tokens of its parent, and none of its own"
            )
        if event.tenant != parent.tenant and self.config.fair_admission:
            text = f"a forked request must have the tenant of its parent, which is {parent.tenant} (got {event.tenant})"
            raise Refusal("invalid_value", "tenant", text)
        if event.sampling.prompt_logprobs is not None:
            text = "prompt_logprobs cannot be combined with forked_from: the prompt has been computed"
            raise Refusal("invalid_value", "prompt_logprobs", text)
        if event.sampling.use_beam_search or parent.leader is not None:
            text = "use_beam_search cannot be combined with a fork, neither of this request nor of the one to fork"
            raise Refusal("unsupported_value", "use_beam_search", text)
        if event.adapter is not None and (parent.adapter is None or event.adapter.digest != parent.adapter.ref.digest):
            text = f"a forked request must have the adapter of its parent (got {event.adapter.name!r})"
            raise Refusal("invalid_value", "model", text)
        self.check_length(event, parent.num_prompt_tokens)  # the parent's only token may be one that no other follows
        num_tokens = event.num_forked_tokens or parent.num_tokens
        if not parent.num_prompt_tokens <= num_tokens <= parent.num_tokens:
            text = (
                f"num_forked_tokens must be from {parent.num_prompt_tokens} to {parent.num_tokens}, the tokens of the "
                f"prompt and of all of the request to fork (got {num_tokens})"
            )
            raise Refusal("invalid_value", "num_forked_tokens", text)
        request = self.build(event, client, parent.tokens.fork(num_tokens), parent.num_prompt_tokens, parent)
        if request.needs_no_more_steps:
            text = f"the request to fork has {request.num_output_tokens} output tokens there, so that no token is left"
            raise Refusal("invalid_value", "max_tokens", text)
        if event.sampling.repetition_detection is not None:
            delivered = request.tokens.tail(parent.num_prompt_tokens)
            request.repetition = RepetitionWatch(event.sampling.repetition_detection, delivered)
            if request.repeats_itself:
                raise Refusal("invalid_value", "repetition_detection", "the output to continue repeats itself already")
        return request

    def build(
        self,
        event: ArrivalFields,
        client: int,
        tokens: TokenStore,
        num_prompt_tokens: int,
        parent: Request | None = None,
    ) -> Request:
        """Return the Request, with the adapter of its parent if it is forked from one."""
        if event.pooling is not None:
            return self._build_pooled(event, event.pooling, client, tokens, num_prompt_tokens)
        sampling, config = event.sampling, self.config
        eos = () if sampling.ignore_eos else config.model.eos_token_ids
        # The KV of the last token is never needed, so a sequence can have one token more than the pool has positions,
        # and the first token after a prompt which fills the context.
        limit = min(max(config.max_model_len, num_prompt_tokens + 1), self.kv.max_tokens + 1)
        if sampling.max_tokens is not None:
            limit = min(limit, num_prompt_tokens + sampling.max_tokens)
        row_bytes = routed_row_bytes(limit, config) if sampling.return_routed_experts else 0
        program = self._program(event, tokens) if parent is None else parent.program  # may refuse: before the adapter
        request = Request(
            client=client,
            request_id=event.request_id,
            tokens=tokens,
            num_prompt_tokens=num_prompt_tokens,
            sampling=sampling,
            seed=event.seed,
            stop_tokens=frozenset(eos) | frozenset(sampling.stop_token_ids),
            max_total_tokens=limit,
            priority=event.priority,
            arrival=event.arrival,
            tenant=event.tenant if config.fair_admission else 0,
            adapter=self._adapters.find(event.adapter) if parent is None else parent.adapter,
        )
        request.parent, request.program, request.row_bytes = parent, program, row_bytes
        request.job_id = event.job_id
        if parent is not None:
            request.adapter_name = parent.adapter_name
        has_prompt_logprobs = sampling.prompt_logprobs is not None  # a hit has no logits
        request.skip_reading_prefix_cache = sampling.skip_reading_prefix_cache or has_prompt_logprobs
        return request

    def _build_pooled(
        self, event: ArrivalFields, pooling: PoolingParams, client: int, tokens: TokenStore, num_prompt_tokens: int
    ) -> Request:
        """Return a Request that samples nothing, and belongs to no program."""
        request = Request(
            client=client,
            request_id=event.request_id,
            tokens=tokens,
            num_prompt_tokens=num_prompt_tokens,
            sampling=NO_SAMPLING,
            seed=event.seed,
            stop_tokens=frozenset(),
            max_total_tokens=num_prompt_tokens + 1,  # the placeholder of the vector
            priority=event.priority,
            arrival=event.arrival,
            tenant=event.tenant if self.config.fair_admission else 0,
            adapter=self._adapters.find(event.adapter),
            pooling=pooling,
        )
        if (can := self.config.model.pooling) is not None:
            needs_all = can.needs_every_token(pooling.task)
            request.skip_reading_prefix_cache = pooling.skip_reading_prefix_cache or needs_all
            request.row_bytes = 4 * can.width(pooling.task, pooling.dimensions)
        return request

    def _program(self, event: ArrivalFields, tokens: TokenStore) -> Program | None:
        hashes, count, again = tokens.block_hashes, len(tokens), event.resubmitted
        try:
            return self._programs.find(event.tenant, event.job_id, hashes, count, resubmitted=again)
        except JobEnded as error:
            raise Refusal("job_ended", "job_id", str(error)) from None


def check_layout_fits(config: EngineConfig, layout: KVLayout) -> None:
    """Raise ConfigError if a model that keeps no KV is to generate tokens, or to compute a part of a prompt."""
    if layout.groups:
        return
    if config.model.generates:
        raise ConfigError("a model without a KV cache cannot generate tokens")
    if config.enable_chunked_prefill or config.long_prefill_token_threshold:
        raise ConfigError(
            "a model without a KV cache computes whole prompts: it needs enable_chunked_prefill False and "
            f"long_prefill_token_threshold 0 (got {config.enable_chunked_prefill}, "
            f"{config.long_prefill_token_threshold})"
        )
    if config.max_num_batched_tokens < config.max_model_len:
        raise ConfigError(
            "a model without a KV cache computes whole prompts: max_num_batched_tokens must be at least "
            f"max_model_len, which is {config.max_model_len} (got {config.max_num_batched_tokens})"
        )


def _known_tokens(event: AddRequest) -> Int32:
    delivered = event.output_token_ids
    if delivered is None or not len(delivered):
        return event.prompt_token_ids
    return np.concatenate([event.prompt_token_ids, delivered])


def _check_sampling(sampling: SamplingParams, config: EngineConfig) -> None:
    """Raise Refusal unless the vocabulary has all token ids in ``sampling``, and thinking markers exist if needed."""
    vocab_size = config.model.vocab_size
    for name, tokens in sampling.named_token_ids().items():
        if max(tokens, default=0) >= vocab_size:
            text = f"token ids of {name} must be from 0 to {vocab_size - 1} (got {max(tokens)})"
            raise Refusal("invalid_value", name, text)
    if sampling.thinking_token_budget is not None and not config.thinking_end_token_ids:
        raise Refusal(
            "invalid_value",
            "thinking_token_budget",
            "thinking_token_budget needs thinking markers, and this model has none",
        )


def routed_row_bytes(num_tokens: int, config: EngineConfig) -> int:
    """Return the bytes of the experts of one position of a request with ``num_tokens`` of prompt and output at most.

    Raises:
        Refusal: it cannot get them.
    """
    name, moe = "return_routed_experts", config.model.moe
    if moe is None or not config.enable_return_routed_experts:
        text = f"{name} needs an engine that keeps them: start it with --enable-return-routed-experts"
        raise Refusal("unsupported_value", name, text)
    row_bytes = 4 * len(moe.layers) * moe.num_experts_per_token
    most = MAX_SIDE_BYTES // row_bytes
    if num_tokens > most:
        text = (
            f"with {name}, prompt and output together must have at most {most} tokens for this model "
            f"(got up to {num_tokens}): lower max_tokens or shorten the prompt"
        )
        raise Refusal("invalid_value", name, text)
    return row_bytes
