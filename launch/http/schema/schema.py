"""Requests, parsed: every field that OpenAI defines is known here, used or not; any other is refused.

Adding a field: put its name into one of the tables below and, if it is used, read it in the parser.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from quire.launch.http.schema.errors import shorten
from quire.launch.http.schema.fields import (
    Check,
    Fields,
    any_object,
    anything,
    boolean,
    objects,
    string,
    string_or_object,
    strings,
)
from quire.launch.http.schema.sampling_fields import constraint, sampling_objects
from quire.launch.http.schema.tools import ToolUse, parse_tools
from quire.launch.text.chat_template import Message
from quire.launch.text.prompts import ModelLimits, check_messages, check_params, check_template_variables, split_prompts
from quire.launch.text.text_in import ChatOptions
from quire.protocol.config import MAX_PRIORITY, MIN_PRIORITY
from quire.protocol.errors import InvalidRequest
from quire.protocol.request import plugins
from quire.protocol.request.logits_processors import LogitsProcessor
from quire.protocol.request.sampling_params import (
    MAX_LOGPROBS,
    MAX_N,
    MAX_SALT_LENGTH,
    MAX_TOKENS_LIMIT,
    SamplingParams,
    check_int,
)

# Fields that go into SamplingParams under their own name, which checks their types and ranges.
SAMPLING_FIELDS = (
    *("n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids"),
    *("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "min_tokens", "prompt_logprobs"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "allowed_token_ids", "bad_words"),
    "thinking_token_budget",
)
# Those that sampling_fields.py reads.
SAMPLING_OBJECTS = (
    *("logit_bias", "repetition_detection", "extra_args", "vllm_xargs", "structured_outputs", "response_format"),
)
SHARED_FIELDS = (
    *SAMPLING_FIELDS,
    *SAMPLING_OBJECTS,
    *("model", "max_tokens", "logprobs", "stream", "stream_options", "priority", "cache_salt"),
)
TEMPLATE_FIELDS = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")
COMPLETION_FIELDS = (*SHARED_FIELDS, "prompt", "echo")
TOOL_FIELDS = ("tools", "tool_choice", "parallel_tool_calls")
CHAT_FIELDS = (*SHARED_FIELDS, *TEMPLATE_FIELDS, *TOOL_FIELDS, "messages", "max_completion_tokens", "top_logprobs")
STREAM_OPTIONS = ("include_usage", "continuous_usage_stats", "include_obfuscation")

# Fields that OpenAI defines and that have no effect here yet; README.md lists them.
UNUSED_SHARED: dict[str, Check] = {"user": string}
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
    "prediction": any_object,
    "prompt_cache_key": string,
    "prompt_cache_options": anything,
    "prompt_cache_retention": string,
    "reasoning_effort": string,
    "safety_identifier": string,
    "service_tier": string,
    "store": boolean,
    "verbosity": string,
    "web_search_options": any_object,
}

DEFAULT_COMPLETION_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """``include_usage``: a last event with the usage; ``continuous_usage``: usage so far in every event."""

    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonRequest:
    """What completions and chat share.

    Attributes:
        clamp_max_tokens: its max_tokens is a default, to be cut as needed.
        prompt_only: nothing of the answer is told, for a client that asked for no tokens.
        prompt_logprobs: as its own field asked for them.
    """

    model: str
    params: SamplingParams
    clamp_max_tokens: bool
    stream: StreamOptions
    priority: int
    cache_salt: str
    prompt_logprobs: int | None
    prompt_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(CommonRequest):
    """``echo``: the answer begins with the prompt, its log probabilities too. ``prompt_only``: and ends with it."""

    prompts: list[str | list[int]]
    echo: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(CommonRequest):
    """``tool_use``: the call that the answer has to be."""

    messages: list[Message]
    options: ChatOptions
    tool_use: ToolUse | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parser:
    """Makes requests out of JSON objects, for one model under its served names. All methods raise InvalidRequest."""

    served_names: Sequence[str]
    limits: ModelLimits
    processors: Sequence[type[LogitsProcessor]] = ()

    def completion(self, raw: Mapping[str, Any]) -> CompletionRequest:
        fields = Fields(raw)
        fields.refuse_unknown((*COMPLETION_FIELDS, *UNUSED_COMPLETION))
        fields.check(UNUSED_COMPLETION)
        echo = fields.boolean("echo", False)
        max_tokens = self._max_tokens(fields, "max_tokens", least=0 if echo else 1)
        logprobs = fields.get("logprobs")
        # The engine always makes a token; where none was asked for, it is not told.
        wanted = DEFAULT_COMPLETION_TOKENS if max_tokens is None else max(max_tokens, 1)
        params = self._params(fields, wanted, logprobs, echo_logprobs=logprobs if echo else None)
        return CompletionRequest(
            **self._common(fields, params, max_tokens),
            prompts=split_prompts(fields.require("prompt")),
            echo=echo,
            prompt_only=max_tokens == 0,
        )

    def chat(self, raw: Mapping[str, Any]) -> ChatRequest:
        fields = Fields(raw)
        fields.refuse_unknown((*CHAT_FIELDS, *UNUSED_CHAT))
        fields.check(UNUSED_CHAT)
        newer = self._max_tokens(fields, "max_completion_tokens")
        older = self._max_tokens(fields, "max_tokens")
        max_tokens = older if newer is None else newer
        tools, tool_use = parse_tools(fields)
        params = self._params(fields, max_tokens, _chat_logprobs(fields), tool_use=tool_use)
        messages, options = self.conversation(fields)
        return ChatRequest(
            **self._common(fields, params, max_tokens),
            messages=messages,
            options=replace(options, tools=tools),
            tool_use=tool_use,
        )

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

    def _max_tokens(self, fields: Fields, name: str, *, least: int = 1) -> int | None:
        value = fields.get(name)
        if value is None:
            return None
        try:
            return check_int(name, value, least, min(self.limits.max_model_len, MAX_TOKENS_LIMIT))
        except InvalidRequest as refusal:
            context = f"{refusal.message}, this model's maximum context length"
            raise InvalidRequest(context, name, refusal.code) from None

    def _params(
        self,
        fields: Fields,
        max_tokens: int | None,
        logprobs: Any,
        *,
        echo_logprobs: Any = None,
        tool_use: ToolUse | None = None,
    ) -> SamplingParams:
        """``echo_logprobs``: how many of each token of the prompt the answer is to begin with."""
        given = fields.present(SAMPLING_FIELDS) | sampling_objects(fields, self.limits.vocab_size)
        if "prompt_logprobs" in given and fields.get("stream") is True:
            raise InvalidRequest("prompt_logprobs are not given in a stream", "prompt_logprobs", "unsupported_value")
        required = constraint(fields)
        if required is not None and tool_use is not None:
            raise InvalidRequest(
                f"{required[0]} cannot be combined with a tool_choice that demands a call", required[0]
            )
        if tool_use is not None:
            given["structured_outputs"] = tool_use.constraint
        elif required is not None:
            given["structured_outputs"] = required[1]
        try:
            params = SamplingParams(max_tokens=max_tokens, logprobs=logprobs, **given)
            plugins.check_params(self.processors, params)
        except InvalidRequest as refusal:
            if refusal.param == "extra_args" and fields.has("vllm_xargs"):
                raise InvalidRequest(refusal.message, "vllm_xargs", refusal.code) from None
            raise
        if echo_logprobs is not None:
            most = max(echo_logprobs, params.prompt_logprobs or 0)
            params = msgspec.structs.replace(params, prompt_logprobs=most)
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
            "prompt_logprobs": fields.get("prompt_logprobs"),
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
