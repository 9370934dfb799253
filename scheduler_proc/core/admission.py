"""Validation of arriving requests, and construction of Request objects. Each refusal names the field and its range."""

from collections.abc import Callable

import numpy as np

from quire.protocol.block_hash import BlockHasher, HashChain
from quire.protocol.wire.front_end_messages import AddRequest
from quire.scheduler_proc.core.context import Core
from quire.scheduler_proc.core.feature import Known
from quire.scheduler_proc.messages.arrivals import ArrivalFields, Refusal, check_fields, check_order
from quire.scheduler_proc.requests.repetition import RepetitionWatch
from quire.scheduler_proc.requests.request import Request
from quire.scheduler_proc.requests.tokens import Tokens, TokenStore


class Admission:
    """Turns arrivals into Requests, and keeps none of them. ``kv`` gives the limits of the block pool."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.config = core.config
        self.kv = core.kv
        self._hasher = BlockHasher(self.config.prefix_caching_hash_algo, core.kv.block_size)

    def accept(self, event: AddRequest, client: int) -> Request:
        """Return the Request for ``event``, without a handle.

        Raises:
            Refusal: the request could never be answered, or a field is out of range.
        """
        self.validate(event, len(event.prompt_token_ids))
        check_fields(event, self.config)
        found = (feature.known_tokens(event, client) for feature in self.core.calls.known_tokens)
        known = next(filter(None, found), None)
        self.check_length(event, len(event.prompt_token_ids) if known is None else known.num_prompt_tokens)
        if known is None:  # hashed after the check of its length, because that costs as much as it is long
            known = self._own_tokens(event)
        request = self.build(event, client, known.tokens, known.num_prompt_tokens)
        if event.sampling.repetition_detection is not None:
            delivered = known.tokens.tail(known.num_prompt_tokens)
            request.repetition = RepetitionWatch(event.sampling.repetition_detection, delivered)
        if known.check is not None:
            known.check(request)
        self.prepare(request, event, known.parent)
        return request

    def validate(self, event: ArrivalFields, num_prompt_tokens: int) -> None:
        """Raise Refusal unless the fields that all kinds of arrivals have are valid."""
        check_order(event, self.config)
        for feature in self.core.calls.validate:
            feature.validate(event, num_prompt_tokens)

    def prepare(self, request: Request, event: ArrivalFields, parent: Request | None) -> None:
        """Let the features set up a request that was built; may raise Refusal."""
        for feature in self.core.calls.prepare:
            feature.prepare(request, event, parent)

    def check_length(self, event: ArrivalFields, num_prompt_tokens: int) -> None:
        """Raise Refusal unless the prompt, and its first token if another one follows, fit into context and KV pool."""
        config, kv = self.config, self.kv
        if num_prompt_tokens < 1:
            raise Refusal("invalid_value", "prompt", "prompt must have at least 1 token")
        is_all = event.sampling.max_tokens == 1 or any(
            each.ends_with_prompt(event) for each in self.core.calls.ends_with_prompt
        )
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

    def _own_tokens(self, event: AddRequest) -> Known:
        """Return the tokens that a request brings along, after a check of their ids."""
        vocab_size, delivered = self.config.model.vocab_size, event.output_token_ids
        for known in (event.prompt_token_ids, delivered):
            if known is not None and len(known) and not (known.min() >= 0 and known.max() < vocab_size):
                worst = known.min() if known.min() < 0 else known.max()
                raise Refusal("invalid_value", "prompt", f"token ids must be from 0 to {vocab_size - 1} (got {worst})")
        chain = None
        if self.kv.pool.enable_caching:
            make: Callable[..., HashChain] = self._hasher.chain
            for feature in self.core.calls.hashing:
                make = feature.hashing(event, make)
            chain = make(event.cache_salt)
        tokens = event.prompt_token_ids
        if delivered is not None and len(delivered):
            tokens = np.concatenate([tokens, delivered])
        return Known(Tokens(tokens, chain), len(event.prompt_token_ids))

    def build(self, event: ArrivalFields, client: int, tokens: TokenStore, num_prompt_tokens: int) -> Request:
        """Return the Request before any feature has added its part."""
        sampling, config = event.sampling, self.config
        eos = () if sampling.ignore_eos else config.model.eos_token_ids
        # The KV of the last token is never needed, so a sequence can have one token more than the pool has positions,
        # and the first token after a prompt which fills the context.
        limit = min(max(config.max_model_len, num_prompt_tokens + 1), self.kv.max_tokens + 1)
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
        )
        has_prompt_logprobs = sampling.prompt_logprobs is not None  # a hit has no logits
        request.skip_reading_prefix_cache = sampling.skip_reading_prefix_cache or has_prompt_logprobs
        return request
