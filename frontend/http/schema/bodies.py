"""Fields of request bodies: those that OpenAI defines, used or not, and some of vLLM's.

The fields of ``SamplingParams`` are not repeated here: SamplingParams checks their types and ranges. Fields of type
Any are checked where they are used.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from quire.frontend.engine.job import JOB_ID_PATTERN, JOB_ID_RANGE
from quire.protocol.config import MAX_PRIORITY, MIN_PRIORITY
from quire.protocol.request.sampling_params import MAX_LOGPROBS, MAX_N, MAX_SALT_LENGTH, SamplingParams

_INTERNAL_FIELDS = {"bad_words_token_ids", "logprob_token_ids", "plain_spans"}
_CONVERTED_FIELDS = {"max_tokens", "logprobs", "structured_outputs", "repetition_detection", "extra_args", "logit_bias"}
SAMPLING_FIELDS = tuple(
    name for name in SamplingParams.__struct_fields__ if name not in _CONVERTED_FIELDS | _INTERNAL_FIELDS
)
"""Fields that are passed to SamplingParams without conversion."""

Name = Annotated[
    str, Meta(pattern=r"^[A-Za-z0-9_-]{1,128}\Z", description="1 to 128 letters, digits, underscores or dashes")
]
"""A function or schema name that Anthropic allows; OpenAI's have at most 64 characters."""

JobId = Annotated[str, Meta(pattern=JOB_ID_PATTERN, description=JOB_ID_RANGE)]

Effort = Annotated[
    Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"],
    Meta(description="one of none, minimal, low, medium, high, xhigh, max"),
]


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """``include_usage``: send a last event with the usage; ``continuous_usage_stats``: the usage in every event."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False
    """Ignored."""


class SessionBody(msgspec.Struct, frozen=True, kw_only=True):
    """The open session that a request continues.

    Attributes:
        piece: number of the piece, from 0, to find out whether an earlier one has arrived. None: the next one.
        close: end the session after this piece.
    """

    id: Annotated[str, Meta(min_length=1, max_length=128)]
    piece: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    close: bool = False


class PlainFormat(msgspec.Struct, frozen=True):
    """``response_format`` of type text or json_object."""

    type: str


class JsonSchemaFormat(msgspec.Struct, frozen=True):
    type: str
    json_schema: dict[str, Any]


class BareSchemaFormat(msgspec.Struct, frozen=True):
    """The forms of llama.cpp (``schema``) and TGI (``value``), of type json_object or json_schema."""

    type: str
    schema: dict[str, Any] | None = None
    value: dict[str, Any] | None = None


class JsonSchema(msgspec.Struct, frozen=True, kw_only=True):
    name: Name
    schema: dict[str, Any]
    description: str = ""
    strict: bool = False


class Tool(msgspec.Struct, frozen=True):
    type: Annotated[Literal["function"], Meta(description="function")]
    function: dict[str, Any]


class Function(msgspec.Struct, frozen=True, kw_only=True):
    name: Name
    description: str = ""
    parameters: dict[str, Any] | None = None
    strict: bool = False


class GenerationBody(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of both completions and chat."""

    model: str | None = None
    max_tokens: Any = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    priority: Annotated[int, Meta(ge=MIN_PRIORITY, le=MAX_PRIORITY)] = 0
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MAX_SALT_LENGTH)] = ""
    logit_bias: Any = None
    repetition_detection: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    extra_args: dict[str, Any] | None = None
    vllm_xargs: dict[str, Any] | None = None
    job_id: JobId | None = None
    is_last_step: bool = False
    nvext: dict[str, Any] | None = None
    kv_hints: dict[str, Any] | None = None
    prompt_cache_key: str = ""
    session: str | dict[str, Any] | None = None
    return_token_ids: bool = False
    # Ignored:
    user: str = ""


class CompletionBody(GenerationBody, frozen=True, kw_only=True):
    prompt: Any = None
    prompt_embeds: Any = None
    logprobs: Any = None
    echo: bool = False
    add_special_tokens: bool = True
    best_of: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None


class ForkBody(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a fork; all other parameters are those of the answer that it continues.

    Attributes:
        index: index of that answer in its response.
        num_tokens: output tokens of it that the fork begins with. None: all that it has so far.
    """

    n: Any = 1
    index: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    num_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    seed: Any = None
    temperature: Any = None
    max_tokens: Any = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None


class ChatBody(GenerationBody, frozen=True, kw_only=True):
    messages: Any
    max_completion_tokens: Any = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] = 0
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: Any = None
    reasoning_effort: Effort | None = None
    # Ignored:
    metadata: dict[str, Any] | None = None
    moderation: Any = None
    prediction: dict[str, Any] | None = None
    prompt_cache_options: Any = None
    prompt_cache_retention: str = ""
    safety_identifier: str = ""
    service_tier: str = ""
    store: bool = False
    verbosity: str = ""


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """Either ``prompt`` or ``messages``, as in vLLM."""

    model: str | None = None
    prompt: str | None = None
    messages: Any = None
    add_special_tokens: bool = True
    return_token_strs: bool = False
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: Any = None
    reasoning_effort: Effort | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    tokens: Any
    model: str | None = None
