"""Requests, parsed: every field that OpenAI defines is known here, used or not; any other is refused.

Adding a field: put its name into one of the tables below and, if it is used, read it in the parser.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.launch.chat_template import Message
from quire.launch.engine_client import MAX_PRIORITY, MIN_PRIORITY
from quire.launch.http.errors import shorten
from quire.launch.http.fields import (
    Check,
    Fields,
    any_object,
    anything,
    boolean,
    logit_bias,
    objects,
    penalty,
    string,
    string_or_object,
    strings,
)
from quire.launch.prompts import ModelLimits, check_messages, check_params, check_template_variables, split_prompts
from quire.launch.text_in import ChatOptions
from quire.protocol.errors import InvalidRequest
from quire.protocol.sampling_params import MAX_LOGPROBS, MAX_N, MAX_TOKENS_LIMIT, SamplingParams, check_int

# Fields that go into SamplingParams under their own name, which checks their types and ranges.
SAMPLING_FIELDS = (
    *("n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids"),
    *("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"),
)
SHARED_FIELDS = (
    *SAMPLING_FIELDS,
    *("model", "max_tokens", "logprobs", "stream", "stream_options", "priority", "cache_salt"),
)
TEMPLATE_FIELDS = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")
COMPLETION_FIELDS = (*SHARED_FIELDS, "prompt", "echo")
CHAT_FIELDS = (*SHARED_FIELDS, *TEMPLATE_FIELDS, "messages", "max_completion_tokens", "top_logprobs")
STREAM_OPTIONS = ("include_usage", "continuous_usage_stats", "include_obfuscation")

# Fields that OpenAI defines and that have no effect here yet; README.md lists them.
UNUSED_SHARED: dict[str, Check] = {"presence_penalty": penalty, "frequency_penalty": penalty, "user": string}
UNUSED_COMPLETION: dict[str, Check] = {
    **UNUSED_SHARED,
    "best_of": lambda name, value: check_int(name, value, 1, MAX_N),
    "suffix": string,
}
UNUSED_CHAT: dict[str, Check] = {
    **UNUSED_SHARED,
    "audio": any_object,
    "function_call": string_or_object,
    "functions": objects,
    "metadata": any_object,
    "modalities": strings,
    "moderation": anything,
    "parallel_tool_calls": boolean,
    "prediction": any_object,
    "prompt_cache_key": string,
    "prompt_cache_options": anything,
    "prompt_cache_retention": string,
    "reasoning_effort": string,
    "response_format": any_object,
    "safety_identifier": string,
    "service_tier": string,
    "store": boolean,
    "tool_choice": string_or_object,
    "tools": objects,
    "verbosity": string,
    "web_search_options": any_object,
}

MAX_SALT_LENGTH = 1024
DEFAULT_COMPLETION_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """``include_usage``: a last event with the usage; ``continuous_usage``: usage so far in every event."""

    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonRequest:
    """What completions and chat share. ``clamp_max_tokens``: its max_tokens is a default, to be cut as needed."""

    model: str
    params: SamplingParams
    clamp_max_tokens: bool
    stream: StreamOptions
    priority: int
    cache_salt: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(CommonRequest):
    prompts: list[str | list[int]]
    echo: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(CommonRequest):
    messages: list[Message]
    options: ChatOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Parser:
    """Makes requests out of JSON objects, for one model under its served names. All methods raise InvalidRequest."""

    served_names: Sequence[str]
    limits: ModelLimits

    def completion(self, raw: Mapping[str, Any]) -> CompletionRequest:
        fields = Fields(raw)
        unused = {**UNUSED_COMPLETION, "logit_bias": logit_bias(self.limits.vocab_size)}
        fields.refuse_unknown((*COMPLETION_FIELDS, *unused))
        fields.check(unused)
        echo = fields.boolean("echo", False)
        if echo and fields.has("logprobs"):
            raise InvalidRequest("echo with logprobs is not supported yet", "echo", "unsupported_value")
        max_tokens = self._max_tokens(fields, "max_tokens")
        params = self._params(fields, max_tokens or DEFAULT_COMPLETION_TOKENS, fields.get("logprobs"))
        return CompletionRequest(
            **self._common(fields, params, max_tokens),
            prompts=split_prompts(fields.require("prompt")),
            echo=echo,
        )

    def chat(self, raw: Mapping[str, Any]) -> ChatRequest:
        fields = Fields(raw)
        unused = {**UNUSED_CHAT, "logit_bias": logit_bias(self.limits.vocab_size)}
        fields.refuse_unknown((*CHAT_FIELDS, *unused))
        fields.check(unused)
        newer = self._max_tokens(fields, "max_completion_tokens")
        older = self._max_tokens(fields, "max_tokens")
        max_tokens = older if newer is None else newer
        params = self._params(fields, max_tokens, _chat_logprobs(fields))
        messages, options = self.conversation(fields)
        return ChatRequest(**self._common(fields, params, max_tokens), messages=messages, options=options)

    def conversation(self, fields: Fields) -> tuple[list[Message], ChatOptions]:
        """The messages, and how they are to be laid out."""
        messages = check_messages(fields.require("messages"))
        continues = fields.boolean("continue_final_message", False)
        opens = fields.boolean("add_generation_prompt", not continues)
        if continues and opens:
            name = "continue_final_message"
            raise InvalidRequest(f"{name} and add_generation_prompt cannot both be true", name)
        kwargs = fields.get("chat_template_kwargs")
        variables = None if kwargs is None else check_template_variables(kwargs)
        return messages, ChatOptions(opens, continues, variables)

    def model(self, fields: Fields) -> str:
        """The served name that was asked for; the first when none was."""
        name = fields.get("model")
        if name is None:
            return self.served_names[0]
        if not isinstance(name, str):
            raise InvalidRequest("model must be a string", "model")
        if name not in self.served_names:
            raise InvalidRequest(f"the model {shorten(name)} does not exist", "model", "model_not_found")
        return name

    def _max_tokens(self, fields: Fields, name: str) -> int | None:
        value = fields.get(name)
        if value is None:
            return None
        try:
            return check_int(name, value, 1, min(self.limits.max_model_len, MAX_TOKENS_LIMIT))
        except InvalidRequest as refusal:
            context = f"{refusal.message}, this model's maximum context length"
            raise InvalidRequest(context, name, refusal.code) from None

    def _params(self, fields: Fields, max_tokens: int | None, logprobs: Any) -> SamplingParams:
        params = SamplingParams(max_tokens=max_tokens, logprobs=logprobs, **fields.present(SAMPLING_FIELDS))
        check_params(params, self.limits)
        return params

    def _common(self, fields: Fields, params: SamplingParams, max_tokens: int | None) -> dict[str, Any]:
        return {
            "model": self.model(fields),
            "params": params,
            "clamp_max_tokens": max_tokens is None,
            "stream": _stream(fields),
            "priority": fields.integer("priority", MIN_PRIORITY, MAX_PRIORITY, 0),
            "cache_salt": fields.string("cache_salt", "", max_length=MAX_SALT_LENGTH),
        }


def _stream(fields: Fields) -> StreamOptions:
    stream = fields.boolean("stream", False)
    raw = fields.get("stream_options")
    if raw is None:
        return StreamOptions(stream=stream)
    if not stream:
        raise InvalidRequest("stream_options is only allowed when stream is true", "stream_options")
    any_object("stream_options", raw)
    options = Fields({f"stream_options.{name}": value for name, value in raw.items()})
    options.refuse_unknown(f"stream_options.{name}" for name in STREAM_OPTIONS)
    options.check({"stream_options.include_obfuscation": boolean})
    return StreamOptions(
        stream=True,
        include_usage=options.boolean("stream_options.include_usage", False),
        continuous_usage=options.boolean("stream_options.continuous_usage_stats", False),
    )


def _chat_logprobs(fields: Fields) -> int | None:
    """Chat's two fields as SamplingParams has it: None for no log probabilities, else how many of the best."""
    wanted = fields.boolean("logprobs", False)
    top = fields.integer("top_logprobs", 0, MAX_LOGPROBS, 0)
    if top and not wanted:
        raise InvalidRequest("top_logprobs needs logprobs to be true", "top_logprobs")
    return top if wanted else None
