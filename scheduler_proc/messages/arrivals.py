"""Fields of arrivals that all requests have. Each refusal names the field and its range."""

import math
from typing import Protocol

from quire.protocol.config import EngineConfig
from quire.protocol.request.sampling_params import MAX_SALT_LENGTH, SamplingParams
from quire.protocol.wire.front_end_messages import AddRequest, Rejected

MAX_REQUEST_ID = 256


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
    """What the core reads of an arrival; features read their own fields."""

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
    def resubmitted(self) -> bool: ...


def check_order(event: ArrivalFields, config: EngineConfig) -> None:
    """Raise Refusal unless arrival and priority define a place in the queue, and are allowed."""
    if not math.isfinite(event.arrival):  # NaN has no order
        raise Refusal("invalid_value", "arrival", f"arrival must be a finite number (got {event.arrival})")
    if not -(2**31) <= event.priority < 2**31:
        text = f"priority must be from {-(2**31)} to {2**31 - 1} (got {event.priority})"
        raise Refusal("invalid_value", "priority", text)
    if config.priority_range is not None:
        low, high = config.priority_range
        if not low <= event.priority <= high:
            raise Refusal(
                "priority_not_allowed",
                "priority",
                f"this server allows a priority from {low} to {high} (got {event.priority})",
            )


def check_fields(event: AddRequest, config: EngineConfig) -> None:
    """Raise Refusal unless all fields are valid and the request can generate at least one token."""
    if not 1 <= len(event.request_id) <= MAX_REQUEST_ID:
        text = f"request_id must have 1 to {MAX_REQUEST_ID} characters (got {len(event.request_id)})"
        raise Refusal("invalid_value", "request_id", text)
    if len(event.cache_salt) > MAX_SALT_LENGTH:
        text = f"cache_salt must have at most {MAX_SALT_LENGTH} characters (got {len(event.cache_salt)})"
        raise Refusal("invalid_value", "cache_salt", text)
    _check_sampling(event.sampling, config)
    if not 0 <= event.seed < 2**64:
        raise Refusal("invalid_value", "seed", f"seed must be from 0 to {2**64 - 1} (got {event.seed})")
    if event.kv_transfer:
        raise Refusal("unsupported", "", "request uses a field reserved for later versions: kv_transfer")


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
