"""Whether a request can be accepted, and the Request it becomes. Each refusal names the field and the range."""

import math
from typing import Protocol

import numpy as np

from quire.protocol.config import EngineConfig
from quire.protocol.request.sampling_params import MAX_SALT_LENGTH, SamplingParams
from quire.protocol.wire.arrays import Int32
from quire.protocol.wire.front_end_messages import AddRequest, Rejected
from quire.scheduler_proc.kv.block_hash import BlockHasher
from quire.scheduler_proc.kv.manager import KVCacheManager
from quire.scheduler_proc.requests.repetition import RepetitionWatch
from quire.scheduler_proc.requests.request import Request
from quire.scheduler_proc.requests.tokens import Tokens, TokenStore

MAX_REQUEST_ID = 256


class Refusal(Exception):
    """A request that is not accepted; becomes the Rejected message."""

    def __init__(self, code: str, param: str, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.param = param
        self.text = text

    def message(self, request_id: str) -> Rejected:
        return Rejected(request_id, self.code, self.param, self.text)


class Arriving(Protocol):
    """What every arrival has."""

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


class Admission:
    """Turns arrivals into Requests; keeps none. ``kv`` is asked for what fits into it."""

    def __init__(self, config: EngineConfig, kv: KVCacheManager) -> None:
        self.config = config
        self.kv = kv
        self._hasher = BlockHasher(config.prefix_caching_hash_algo, kv.block_size)

    def admit(self, event: AddRequest, client: int) -> Request:
        """The Request that ``event`` asks for; it has no handle yet.

        Raises:
            Refusal: it could never run to one token, or its fields are out of range.
        """
        config = self.config
        self.check_order(event)
        self._check_fields(event)
        owner = event.tenant if config.isolate_prefix_cache_by_key else 0
        names = self._hasher.chain(event.cache_salt, tenant=owner) if config.enable_prefix_caching else None
        request = self.build(event, client, Tokens(_known_tokens(event), names), len(event.prompt_token_ids))
        if event.sampling.repetition_detection is not None:
            delivered = () if event.output_token_ids is None else event.output_token_ids.tolist()
            request.repetition = RepetitionWatch(event.sampling.repetition_detection, delivered)
        return request

    def check_order(self, event: Arriving) -> None:
        """Raise Refusal unless its place among those that wait is well defined, and it may have it."""
        if not math.isfinite(event.arrival):  # nothing is before or after NaN
            raise Refusal("invalid_value", "arrival", "arrival must be a finite number")
        if not -(2**31) <= event.priority < 2**31:
            raise Refusal("invalid_value", "priority", f"priority must be from {-(2**31)} to {2**31 - 1}")
        if not 0 <= event.tenant < 2**31:
            raise Refusal("invalid_value", "tenant", f"tenant must be from 0 to {2**31 - 1}")
        if self.config.priority_range is not None:
            low, high = self.config.priority_range
            if not low <= event.priority <= high:
                raise Refusal("priority_not_allowed", "priority", f"this server allows a priority from {low} to {high}")

    def check_length(self, num_prompt_tokens: int) -> None:
        """Raise Refusal unless the prompt and one token fit."""
        config, kv = self.config, self.kv
        if num_prompt_tokens < 1:
            raise Refusal("invalid_value", "prompt", "the prompt must have at least 1 token")
        if num_prompt_tokens + 1 > config.max_model_len:
            text = (
                f"This model's maximum context length is {config.max_model_len} tokens, "
                f"prompt and answer together; the prompt has {num_prompt_tokens}"
            )
            raise Refusal("context_length_exceeded", "prompt", text)
        if num_prompt_tokens + 1 > kv.max_tokens:
            needed, present = kv.num_blocks_for(num_prompt_tokens + 1), kv.pool.num_usable_blocks
            text = f"the prompt and one token need {needed} KV blocks; the pool has {present}"
            raise Refusal("kv_pool_too_small", "prompt", text)

    def _check_fields(self, event: AddRequest) -> None:
        """Raise Refusal unless the request can run to at least one token in this engine."""
        prompt, vocab_size = event.prompt_token_ids, self.config.model.vocab_size
        if not 1 <= len(event.request_id) <= MAX_REQUEST_ID:
            raise Refusal("invalid_value", "request_id", f"request_id must have 1 to {MAX_REQUEST_ID} characters")
        if len(event.cache_salt) > MAX_SALT_LENGTH:
            raise Refusal("invalid_value", "cache_salt", f"cache_salt must have at most {MAX_SALT_LENGTH} characters")
        self.check_length(len(prompt))
        for known in (prompt, event.output_token_ids):
            if known is not None and len(known) and not (known.min() >= 0 and known.max() < vocab_size):
                raise Refusal("invalid_value", "prompt", f"token ids must be from 0 to {vocab_size - 1}")
        _check_sampling(event.sampling, self.config)
        if not 0 <= event.seed < 2**64:
            raise Refusal("invalid_value", "seed", f"seed must be from 0 to {2**64 - 1}")
        reserved = (event.job_id, event.resumable, event.lora, event.mm_features, event.kv_transfer)
        if any(reserved) or not event.is_last_step:
            raise Refusal("unsupported", "", "the request uses a field that this version reserves")

    def build(self, event: Arriving, client: int, tokens: TokenStore, num_prompt_tokens: int) -> Request:
        sampling, config = event.sampling, self.config
        eos = () if sampling.ignore_eos else config.model.eos_token_ids
        # The last token's KV is never needed, so one more token than the pool has positions can exist.
        limit = min(config.max_model_len, self.kv.max_tokens + 1)
        if sampling.max_tokens is not None:
            limit = min(limit, num_prompt_tokens + sampling.max_tokens)
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
        )
        request.skip_reading_prefix_cache = sampling.prompt_logprobs is not None  # a hit has no logits
        return request


def _known_tokens(event: AddRequest) -> Int32:
    delivered = event.output_token_ids
    if delivered is None or not len(delivered):
        return event.prompt_token_ids
    return np.concatenate([event.prompt_token_ids, delivered])


def _check_sampling(sampling: SamplingParams, config: EngineConfig) -> None:
    """Raise Refusal unless the model has the tokens that ``sampling`` names, and the markers that it goes by."""
    vocab_size = config.model.vocab_size
    for name, tokens in sampling.named_token_ids().items():
        if max(tokens, default=0) >= vocab_size:
            raise Refusal("invalid_value", name, f"token ids of {name} must be from 0 to {vocab_size - 1}")
    if sampling.thinking_token_budget is not None and not config.thinking_end_token_ids:
        raise Refusal(
            "invalid_value",
            "thinking_token_budget",
            "thinking_token_budget needs thinking markers, which this engine has none of",
        )
