"""Whether a request can be accepted at all: pure checks, each with the field and the range in its text."""

from quire.protocol.config import EngineConfig
from quire.protocol.messages import AddRequest, OpaqueRequest, Rejected

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


def check_add_request(event: AddRequest, config: EngineConfig, pool_tokens: int) -> None:
    """Raise Refusal unless the request can run to at least one token in this engine."""
    prompt = event.prompt_token_ids
    if not 1 <= len(event.request_id) <= MAX_REQUEST_ID:
        raise Refusal("invalid_value", "request_id", f"request_id must have 1 to {MAX_REQUEST_ID} characters")
    _check_length(len(prompt), config, pool_tokens)
    vocab_size = config.model.vocab_size
    for known in (prompt, event.output_token_ids):
        if known is not None and len(known) and not (known.min() >= 0 and known.max() < vocab_size):
            raise Refusal("invalid_value", "prompt", f"token ids must be from 0 to {vocab_size - 1}")
    bad_stop = [t for t in event.sampling.stop_token_ids if t >= vocab_size]
    if bad_stop:
        raise Refusal("invalid_value", "stop_token_ids", f"stop_token_ids must be from 0 to {vocab_size - 1}")
    if not 0 <= event.seed < 2**64:
        raise Refusal("invalid_value", "seed", f"seed must be from 0 to {2**64 - 1}")
    reserved = (event.job_id, event.resumable, event.lora, event.mm_features, event.kv_transfer)
    if any(reserved) or not event.is_last_step:
        raise Refusal("unsupported", "", "the request uses a field that this version reserves")


def check_opaque_request(event: OpaqueRequest, config: EngineConfig, pool_tokens: int) -> None:
    """The same for an arrival without its tokens."""
    _check_length(event.num_prompt_tokens, config, pool_tokens)
    if event.num_output_tokens < 0:
        raise Refusal("invalid_value", "num_output_tokens", "num_output_tokens must be at least 0")
    if event.hash_bytes < 1 or len(event.block_hashes) % event.hash_bytes:
        raise Refusal("invalid_value", "block_hashes", "block_hashes must be whole hashes of hash_bytes each")


def _check_length(num_prompt_tokens: int, config: EngineConfig, pool_tokens: int) -> None:
    if num_prompt_tokens < 1:
        raise Refusal("invalid_value", "prompt", "the prompt must have at least 1 token")
    if num_prompt_tokens + 1 > config.max_model_len:
        text = (
            f"This model's maximum context length is {config.max_model_len} tokens, "
            f"prompt and answer together; the prompt has {num_prompt_tokens}"
        )
        raise Refusal("context_length_exceeded", "prompt", text)
    if num_prompt_tokens + 1 > pool_tokens:
        needed = -(-(num_prompt_tokens + 1) // config.block_size)
        text = f"the prompt and one token need {needed} KV blocks; the pool has {pool_tokens // config.block_size}"
        raise Refusal("kv_pool_too_small", "prompt", text)
