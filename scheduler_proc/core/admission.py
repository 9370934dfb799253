"""Whether a request can be accepted, and the Request it becomes. Each refusal names the field and the range."""

import math

import numpy as np

from quire.protocol.config import EngineConfig
from quire.protocol.request.sampling_params import MAX_SALT_LENGTH, SamplingParams
from quire.protocol.wire.arrays import Int32
from quire.protocol.wire.front_end_messages import AddRequest, Rejected
from quire.scheduler_proc.core.events import OpaqueRequest
from quire.scheduler_proc.kv.block_hash import BlockHasher
from quire.scheduler_proc.kv.manager import KVCacheManager
from quire.scheduler_proc.requests.repetition import RepetitionWatch
from quire.scheduler_proc.requests.request import OpaqueTokens, Request, Tokens

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


def admit(
    event: AddRequest | OpaqueRequest, client: int, config: EngineConfig, kv: KVCacheManager, hasher: BlockHasher
) -> Request:
    """The Request that ``event`` asks for; it has no handle yet.

    Raises:
        Refusal: it could never run to one token, or its fields are out of range.
    """
    tokens: Tokens | OpaqueTokens
    if not math.isfinite(event.arrival):  # who waits is put in order by it, and nothing is before or after NaN
        raise Refusal("invalid_value", "arrival", "arrival must be a finite number")
    if not -(2**31) <= event.priority < 2**31:
        raise Refusal("invalid_value", "priority", f"priority must be from {-(2**31)} to {2**31 - 1}")
    _check_tenant(event, config)
    if isinstance(event, AddRequest):
        _check_add_request(event, config, kv)
        num_prompt_tokens = len(event.prompt_token_ids)
        owner = event.tenant if config.isolate_prefix_cache_by_key else 0
        names = hasher.chain(event.cache_salt, tenant=owner) if config.enable_prefix_caching else None
        tokens = Tokens(_known_tokens(event), names)
    else:
        _check_opaque_request(event, config, kv)
        num_prompt_tokens = event.num_prompt_tokens
        hashes = _split(event.block_hashes, event.hash_bytes) if config.enable_prefix_caching else []
        tokens = OpaqueTokens(num_prompt_tokens + event.num_output_tokens, kv.block_size, hashes)
    sampling = event.sampling
    eos = () if sampling.ignore_eos else config.model.eos_token_ids
    # The last token's KV is never needed, so one more token than the pool has positions can exist.
    limit = min(config.max_model_len, kv.max_tokens + 1)
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
    if sampling.repetition_detection is not None and isinstance(event, AddRequest):
        delivered = () if event.output_token_ids is None else event.output_token_ids.tolist()
        request.repetition = RepetitionWatch(sampling.repetition_detection, delivered)
    return request


def _split(joined: bytes, size: int) -> list[bytes]:
    """Pieces of ``size`` bytes, without Python code for each: a prompt may have thousands."""
    pieces: list[bytes] = np.frombuffer(joined, f"V{size}").tolist() if joined else []
    return pieces


def _known_tokens(event: AddRequest) -> Int32:
    delivered = event.output_token_ids
    if delivered is None or not len(delivered):
        return event.prompt_token_ids
    return np.concatenate([event.prompt_token_ids, delivered])


def _check_add_request(event: AddRequest, config: EngineConfig, kv: KVCacheManager) -> None:
    """Raise Refusal unless the request can run to at least one token in this engine."""
    prompt = event.prompt_token_ids
    if not 1 <= len(event.request_id) <= MAX_REQUEST_ID:
        raise Refusal("invalid_value", "request_id", f"request_id must have 1 to {MAX_REQUEST_ID} characters")
    if len(event.cache_salt) > MAX_SALT_LENGTH:
        raise Refusal("invalid_value", "cache_salt", f"cache_salt must have at most {MAX_SALT_LENGTH} characters")
    _check_length(len(prompt), config, kv)
    vocab_size = config.model.vocab_size
    for known in (prompt, event.output_token_ids):
        if known is not None and len(known) and not (known.min() >= 0 and known.max() < vocab_size):
            raise Refusal("invalid_value", "prompt", f"token ids must be from 0 to {vocab_size - 1}")
    _check_sampling(event.sampling, config)
    if not 0 <= event.seed < 2**64:
        raise Refusal("invalid_value", "seed", f"seed must be from 0 to {2**64 - 1}")
    reserved = (event.job_id, event.resumable, event.lora, event.mm_features, event.kv_transfer)
    if any(reserved) or not event.is_last_step:
        raise Refusal("unsupported", "", "the request uses a field that this version reserves")


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


def _check_tenant(event: AddRequest | OpaqueRequest, config: EngineConfig) -> None:
    """Whose it is, and what that one may ask for."""
    if not 0 <= event.tenant < 2**31:
        raise Refusal("invalid_value", "tenant", f"tenant must be from 0 to {2**31 - 1}")
    if config.priority_range is not None:
        low, high = config.priority_range
        if not low <= event.priority <= high:
            raise Refusal("priority_not_allowed", "priority", f"this server allows a priority from {low} to {high}")


def _check_opaque_request(event: OpaqueRequest, config: EngineConfig, kv: KVCacheManager) -> None:
    """The same for an arrival without its tokens."""
    _check_length(event.num_prompt_tokens, config, kv)
    if event.num_output_tokens < 0:
        raise Refusal("invalid_value", "num_output_tokens", "num_output_tokens must be at least 0")
    if event.hash_bytes < 1 or len(event.block_hashes) % event.hash_bytes:
        raise Refusal("invalid_value", "block_hashes", "block_hashes must be whole hashes of hash_bytes each")


def _check_length(num_prompt_tokens: int, config: EngineConfig, kv: KVCacheManager) -> None:
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
