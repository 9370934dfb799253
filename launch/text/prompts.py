"""From what a caller gives as a prompt to checked token ids, for HTTP and the offline API alike.

Every input path ends in ``prompt_from_ids``: the one place where a token id is compared with the model's output
width, and a length with its context.
"""

from collections.abc import Mapping
from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from quire.launch.text.chat_template import RESERVED_VARIABLES, Message
from quire.launch.text.text_in import ChatOptions, TextIn, context_length_exceeded
from quire.protocol.errors import InvalidRequest, did_you_mean
from quire.protocol.request.sampling_params import MAX_BAD_WORD_LENGTH, MAX_BAD_WORDS, SamplingParams

MAX_PROMPTS = 2048
MAX_MESSAGES = 8192
# Of all answers of a request together. The engine is sent a prompt once for each answer: 64 MiB at most.
MAX_SUBMITTED_TOKENS = 2**24
# Log probabilities are kept until the answer is whole: a prompt's at some 200 bytes each, an answer's at half of that.
MAX_PROMPT_LOGPROBS = 2**22
MAX_ANSWER_LOGPROBS = 2**25
MESSAGE_FIELDS = (
    *("role", "content", "name", "refusal", "audio"),
    *("tool_calls", "tool_call_id", "function_call", "reasoning_content"),
)
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class ModelLimits(Protocol):
    """The two numbers of a model that bound a request; an EngineClient has them."""

    @property
    def max_model_len(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, ready for the engine. ``text``: as given, where it was given as text."""

    token_ids: npt.NDArray[np.int32]
    text: str | None = None


def split_prompts(value: Any, param: str = "prompt") -> list[str | list[int]]:
    """The prompts in OpenAI's field: a string, a list of token ids, or a list of several such.

    Raises:
        InvalidRequest: it is none of these, or there are no prompts or too many.
    """
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise InvalidRequest(f"{param} must be a string, a list of token ids, or a list of these", param)
    if not value:
        raise InvalidRequest(f"{param} must not be empty", param)
    # A first element that is no string and no list makes it one prompt of ids; their types are checked there.
    if not isinstance(value[0], str | list):
        return [value]
    if len(value) > MAX_PROMPTS:
        raise InvalidRequest(f"{param} must hold at most {MAX_PROMPTS} prompts", param)
    if not all(isinstance(item, type(value[0])) for item in value):
        raise InvalidRequest(f"{param} must hold either strings or lists of token ids", param)
    return value


def encode_prompt(value: str | list[int], text_in: TextIn, limits: ModelLimits, param: str = "prompt") -> Prompt:
    """One prompt of either form.

    Raises:
        InvalidRequest: it is empty, too long, holds an id that the model does not have, or is text without a tokenizer.
    """
    if isinstance(value, str):
        if not value:
            raise InvalidRequest(f"{param} must not be empty", param)
        ids = text_in.encode(value, max_tokens=limits.max_model_len)
        return prompt_from_ids(ids, limits, param, text=value)
    return prompt_from_ids(value, limits, param)


def encode_messages(messages: list[Message], options: ChatOptions, text_in: TextIn, limits: ModelLimits) -> Prompt:
    """A conversation, through the chat template. ``messages``: as from ``check_messages``."""
    return prompt_from_ids(text_in.encode_chat(messages, options, limits.max_model_len), limits, "messages")


def prompt_from_ids(ids: list[int], limits: ModelLimits, param: str = "prompt", text: str | None = None) -> Prompt:
    """Checked token ids.

    Raises:
        InvalidRequest: none, too many to leave room for one more, or not all of the model's output width.
    """
    if not ids:
        raise InvalidRequest(f"{param} must hold at least one token", param)
    if len(ids) + 1 > limits.max_model_len:
        raise context_length_exceeded(limits.max_model_len, str(len(ids)), param)
    return Prompt(np.array(check_token_ids(ids, limits.vocab_size, param), dtype=np.int32), text)


def check_token_ids(ids: Any, vocab_size: int, param: str) -> list[int]:
    """``ids`` if it is a list of ids below the model's output width (bools and floats are none)."""
    good = isinstance(ids, list) and all(type(token) is int for token in ids)
    if not good or (ids and not (min(ids) >= 0 and max(ids) < vocab_size)):
        raise InvalidRequest(f"{param} must hold token ids, integers from 0 to {vocab_size - 1}", param)
    return list(ids)


def check_params(params: SamplingParams, limits: ModelLimits) -> None:
    """What SamplingParams cannot check by itself, since it does not know the model."""
    for name, ids in params.named_token_ids().items():
        check_token_ids(ids, limits.vocab_size, name)


def tokenize_bad_words(params: SamplingParams, text_in: TextIn, limits: ModelLimits) -> SamplingParams:
    """``params`` with the token ids of ``bad_words`` in their place.

    Each word counts as it is, and with a blank before it where the tokenizer then spells it otherwise.

    Raises:
        InvalidRequest: there is no tokenizer, or a word is no tokens, too many, or some that the model does not have.
    """
    if not params.bad_words:
        return params
    if text_in.tokenizer is None:
        raise InvalidRequest("bad_words need a tokenizer, which this model does not have", "bad_words")
    spellings = [list(ids) for ids in params.bad_words_token_ids]
    for word in params.bad_words:
        for text in (word, " " + word.lstrip()):
            ids = text_in.encode(text, add_special_tokens=False, param="bad_words")
            if not 1 <= len(ids) <= MAX_BAD_WORD_LENGTH:
                raise InvalidRequest(
                    f"each of bad_words must be from 1 to {MAX_BAD_WORD_LENGTH} tokens long", "bad_words"
                )
            check_token_ids(ids, limits.vocab_size, "bad_words")
            if ids not in spellings[-1:]:
                spellings.append(ids)
    if len(spellings) > 2 * MAX_BAD_WORDS:
        raise InvalidRequest(f"bad_words must be a list of at most {MAX_BAD_WORDS} strings", "bad_words")
    return msgspec.structs.replace(params, bad_words=[], bad_words_token_ids=spellings)


def fit_params(params: SamplingParams, prompt: Prompt, limits: ModelLimits, *, clamp: bool) -> SamplingParams:
    """``params`` for one sample of this prompt: n, stops and seed taken off, ``max_tokens`` set.

    Args:
        clamp: cut a ``max_tokens`` that the context has no room for, rather than refuse it: for a default that
            the client did not ask for.

    Raises:
        InvalidRequest: prompt and ``max_tokens`` together exceed the context.
    """
    num_prompt_tokens = len(prompt.token_ids)
    room = limits.max_model_len - num_prompt_tokens
    wanted = room if params.max_tokens is None else params.max_tokens
    if wanted > room and not clamp:
        raise InvalidRequest(
            f"max_tokens is {wanted}, but this model's maximum context length is {limits.max_model_len} tokens and "
            f"your prompt has {num_prompt_tokens} tokens: max_tokens must be from 1 to {room}",
            "max_tokens",
            "context_length_exceeded",
        )
    return msgspec.structs.replace(params, n=1, stop=[], seed=None, max_tokens=min(wanted, room))


def check_volume(params: ListLike[SamplingParams], prompts: ListLike[Prompt], n: int) -> None:
    """Whether a request asks for no more than is kept for one: the limits on products, before anything is submitted.

    Args:
        params: as from ``fit_params``, one per prompt; each prompt has ``n`` answers.

    Raises:
        InvalidRequest: names the field that multiplies.
    """
    pairs = [(each, len(prompt.token_ids)) for each, prompt in zip(params, prompts, strict=True)]
    if n * sum(length for _, length in pairs) > MAX_SUBMITTED_TOKENS:
        raise InvalidRequest(f"the tokens of all prompts times n must be at most {MAX_SUBMITTED_TOKENS}", "n")
    of_prompts = sum(length * (each.prompt_logprobs + 1) for each, length in pairs if each.prompt_logprobs is not None)
    if n * of_prompts > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"the tokens of all prompts times n times (prompt_logprobs + 1) must be at most {MAX_PROMPT_LOGPROBS}",
            "prompt_logprobs",
        )
    of_answers = sum((each.max_tokens or 0) * (each.logprobs + 1) for each in params if each.logprobs is not None)
    if n * of_answers > MAX_ANSWER_LOGPROBS:
        raise InvalidRequest(
            f"max_tokens times the number of answers times (logprobs + 1) must be at most {MAX_ANSWER_LOGPROBS}",
            "logprobs",
        )


def check_messages(value: Any, param: str = "messages") -> list[Message]:
    """OpenAI's messages, with text parts joined to one string.

    Raises:
        InvalidRequest: not a list of messages with known roles and text, or none besides the system's.
    """
    if not isinstance(value, list) or not value:
        raise InvalidRequest(f"{param} must be a list of at least one message", param)
    if len(value) > MAX_MESSAGES:
        raise InvalidRequest(f"{param} must hold at most {MAX_MESSAGES} messages", param)
    messages = [_message(message, f"{param}[{i}]") for i, message in enumerate(value)]
    if all(message["role"] in ("system", "developer") for message in messages):
        raise InvalidRequest(f"{param} must hold a message that is not the system's", param)
    return messages


def check_template_variables(value: Any) -> dict[str, Any]:
    """vLLM's ``chat_template_kwargs``: variables for the template, none of those that the server sets."""
    name = "chat_template_kwargs"
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} must be an object", name)
    taken = RESERVED_VARIABLES.intersection(value)
    if taken:
        raise InvalidRequest(f"{name} must not set {min(taken)}", name)
    return value


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        raise InvalidRequest(f"{where} must be an object", where)
    for name in message:
        if name not in MESSAGE_FIELDS:
            raise InvalidRequest(
                f"{where}: unknown field {name[:64]!r}{did_you_mean(name, MESSAGE_FIELDS)}", f"{where}.{name[:64]}"
            )
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequest(f"{where}.role must be one of {', '.join(ROLES)}", f"{where}.role")
    calls = message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise InvalidRequest(f"{where}.tool_calls must be a list of objects", f"{where}.tool_calls")
    if calls:
        message = {**message, "tool_calls": [_with_object(call) for call in calls]}
    for name in ("name", "tool_call_id", "refusal", "reasoning_content"):
        if not isinstance(message.get(name, ""), str | None):
            raise InvalidRequest(f"{where}.{name} must be a string", f"{where}.{name}")
    content = message.get("content")
    if content is None and role == "assistant":
        return {**message, "content": message.get("refusal") or ""}
    return {**message, "content": _content(content, f"{where}.content")}


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    """An earlier call with its arguments as an object, where they are the text of one: templates expect that."""
    function = call.get("function")
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(arguments, str):
        return call
    try:
        found = msgspec.json.decode(arguments) if arguments else {}
    except (msgspec.DecodeError, ValueError, RecursionError):
        return call
    return {**call, "function": {**call["function"], "arguments": found}} if isinstance(found, dict) else call


def _content(content: Any, where: str) -> str:
    """A message's text; parts are joined by newlines, as vLLM does for templates that want a string."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise InvalidRequest(f"{where} must be a string or a list of text parts", where)
    return "\n".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    fields: Mapping[str, Any] = part if isinstance(part, dict) else {}
    kind = fields.get("type")
    if isinstance(kind, str) and kind not in ("text", "refusal"):
        raise InvalidRequest(f"{where}.type must be text: this server reads text only", f"{where}.type")
    text = fields.get(kind) if isinstance(kind, str) else None
    if not isinstance(text, str):
        raise InvalidRequest(f'{where} must be a text part: {{"type": "text", "text": "..."}}', where)
    return text
