"""Converts prompts and conversations to validated token ids, for HTTP and the offline API.

Every input path ends in ``prompt_from_ids``, the only place where token ids are compared with the vocabulary size, and
the prompt's length with the context.
"""

from collections.abc import Callable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from quire.frontend.images.source import StoredItem
from quire.frontend.text.chat_template import RESERVED_VARIABLES, Message
from quire.frontend.text.control_text import written_end
from quire.frontend.text.parsing.thoughts import Thoughts
from quire.frontend.text.placed_items import PlacedItem, place_images
from quire.frontend.text.text_in import ChatOptions, TextIn, context_length_exceeded
from quire.protocol.errors import InvalidRequest, printable, wrong_value
from quire.protocol.request.sampling_params import MAX_BAD_WORD_LENGTH, MAX_BAD_WORDS, SamplingParams

MAX_PROMPTS = 2048
# Over all answers of a request. The prompt is sent to the engine once per answer: at most 64 MiB.
MAX_SUBMITTED_TOKENS = 2**24
# Log probabilities are kept until the answer is complete: about 200 bytes each for a prompt, 100 for an answer.
MAX_PROMPT_LOGPROBS = 2**22
MAX_ANSWER_LOGPROBS = 2**25
# Routed experts are kept until the answer is complete: about 800 bytes for a token of 48 layers with 8 experts each.
MAX_ROUTED_TOKENS = 2**22

Spans = ListLike[tuple[int, int]]
"""Ranges of tokens, each from its first one to before its last."""


class ModelLimits(Protocol):
    """The two numbers of a model that bound a request. An EngineClient implements this."""

    @property
    def max_model_len(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """One validated prompt.

    Attributes:
        text: the prompt's text, if it was given as text.
        end: the last characters of a rendered conversation, after the last text of the request in them.
        shown: special tokens that are in the answer's text even if such tokens are skipped.
        second_text: index of the first token of the second text of a pair, if the tokenizer gives it another type;
            0: it does not, or the prompt is one text.
        until: makes a function of one answer, which returns whether the answer is complete with the text it is given.
        thoughts: makes what finds the thoughts of one answer, on which stop strings do not act; None: it has none.
        plain_spans: ranges of tokens in which no thinking marker counts.
        items: images and given rows, in order. Their files exist as long as the prompt.
    """

    token_ids: npt.NDArray[np.int32]
    text: str | None = None
    end: str = ""
    shown: frozenset[int] = frozenset()
    until: Callable[[], Callable[[str], bool]] | None = None
    second_text: int = 0
    thoughts: Callable[[], Thoughts] | None = None
    plain_spans: Spans = ()
    items: tuple[PlacedItem, ...] = ()

    @property
    def num_image_tokens(self) -> int:
        """Number of positions that take rows of images."""
        return sum(each.content.num_rows for each in self.items if each.content.kind == "image")


def split_prompts(value: Any, param: str = "prompt", most: int | None = MAX_PROMPTS) -> list[str | list[int]]:
    """Split OpenAI's prompt field: a string, a list of token ids, or a list of either.

    ``most``: the largest number of prompts; None: any, for callers that submit a few at a time.

    Raises:
        InvalidRequest: another type, no prompts, or more than ``most``.
    """
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise wrong_value(param, "a string, a list of token ids, or a list of these", value)
    if not value:
        raise InvalidRequest(f"{param} must not be empty", param)
    # If the first element is neither a string nor a list, this is one prompt of ids; encode_prompt checks their types.
    if not isinstance(value[0], str | list):
        return [value]
    if most is not None and len(value) > most:
        raise InvalidRequest(f"{param} must hold at most {most} prompts (got {len(value)})", param)
    if not all(isinstance(item, type(value[0])) for item in value):
        raise InvalidRequest(f"{param} must hold either strings or lists of token ids", param)
    return value


def encode_prompt(
    value: str | list[int],
    text_in: TextIn,
    limits: ModelLimits,
    param: str = "prompt",
    *,
    add_special_tokens: bool = True,
) -> Prompt:
    """Encode and validate one prompt, given as text or as token ids.

    ``add_special_tokens``: let the tokenizer add its own special tokens to text.

    Raises:
        InvalidRequest: it is empty or too long, has an id outside the vocabulary, or is text without a tokenizer.
    """
    if isinstance(value, str):
        if not value:
            raise InvalidRequest(f"{param} must not be empty", param)
        ids = text_in.encode(value, add_special_tokens=add_special_tokens, max_tokens=limits.max_model_len)
        return prompt_from_ids(ids, limits, param, text=value)
    return prompt_from_ids(value, limits, param)


def encode_messages(messages: list[Message], options: ChatOptions, text_in: TextIn, limits: ModelLimits) -> Prompt:
    """Encode a conversation with the chat template. ``messages``: the result of ``check_messages``."""
    rendered = text_in.render_chat(messages, options, limits.max_model_len)
    return conversation_prompt(*text_in.encode_conversation(rendered), rendered, options, text_in, limits)


def conversation_prompt(
    ids: list[int], plain: Spans, rendered: str, options: ChatOptions, text_in: TextIn, limits: ModelLimits
) -> Prompt:
    """Return the prompt of a rendered conversation with these tokens. ``plain``: its ``plain_spans``."""
    prompt = prompt_from_ids(ids, limits, "messages")
    items = place_images(ids, options.images.stored, text_in.image_token_id)
    end = written_end(rendered) if options.add_generation_prompt else ""
    return replace(prompt, end=end, plain_spans=plain, items=items)


def prompt_of_rows(rows: StoredItem, limits: ModelLimits) -> Prompt:
    """Return the prompt that consists of given embeddings. Its token ids are 0, which nothing reads.

    Raises:
        InvalidRequest: it is longer than the context.
    """
    prompt = prompt_from_ids([0] * rows.num_rows, limits, "prompt_embeds")
    item = PlacedItem(rows, ((0, rows.num_rows),))
    return replace(prompt, plain_spans=((0, rows.num_rows),), items=(item,))


def moved(spans: Spans, offset: int) -> list[tuple[int, int]]:
    """Return ranges of tokens behind ``offset`` others; these are a range, too, unless there are none."""
    before = [(0, offset)] if offset > 0 else []
    return before + [(begin + offset, end + offset) for begin, end in spans]


def prompt_from_ids(ids: list[int], limits: ModelLimits, param: str = "prompt", text: str | None = None) -> Prompt:
    """Return the prompt with these token ids, after validating them.

    Args:
        param: field that errors name.
        text: the text that the ids were encoded from, or None for a prompt given as ids.

    Raises:
        InvalidRequest: the list is empty, has more ids than the context has room for, or has an id outside the
            vocabulary. Whether an output token has room too is checked by ``fit_params``.
    """
    if not ids:
        raise InvalidRequest(f"{param} must hold at least one token", param)
    if len(ids) > limits.max_model_len:
        raise context_length_exceeded(limits.max_model_len, str(len(ids)), param)
    return Prompt(np.array(check_token_ids(ids, limits.vocab_size, param), dtype=np.int32), text)


def check_token_ids(ids: Any, vocab_size: int, param: str) -> list[int]:
    """Return ``ids`` as a list; raise InvalidRequest unless all are ints (not bools) from 0 to ``vocab_size - 1``."""
    good = isinstance(ids, list) and all(type(token) is int for token in ids)
    if not good or (ids and not (min(ids) >= 0 and max(ids) < vocab_size)):
        wrong = ids
        if isinstance(ids, list):
            wrong = next(token for token in ids if type(token) is not int or not 0 <= token < vocab_size)
        text = f"{param} must hold token ids, integers from 0 to {vocab_size - 1} (got {printable(wrong)})"
        raise InvalidRequest(text, param)
    return list(ids)


def check_params(params: SamplingParams, limits: ModelLimits) -> None:
    """Check the parameters that depend on the model, which SamplingParams cannot check itself."""
    for name, ids in params.named_token_ids().items():
        check_token_ids(ids, limits.vocab_size, name)


def tokenize_bad_words(params: SamplingParams, text_in: TextIn, limits: ModelLimits) -> SamplingParams:
    """Return ``params`` with ``bad_words`` replaced by their token ids.

    Each word is banned as given, and also with a blank before it if that gives other tokens.

    Raises:
        InvalidRequest: there is no tokenizer, or a word has no tokens, too many, or a token outside the vocabulary.
    """
    if not params.bad_words:
        return params
    if text_in.tokenizer is None:
        raise InvalidRequest("bad_words need a tokenizer, which this model does not have", "bad_words")
    token_sequences = [list(ids) for ids in params.bad_words_token_ids]
    for word in params.bad_words:
        for text in (word, " " + word.lstrip()):
            ids = text_in.encode(text, add_special_tokens=False, param="bad_words")
            if not 1 <= len(ids) <= MAX_BAD_WORD_LENGTH:
                raise InvalidRequest(
                    f"each of bad_words must be from 1 to {MAX_BAD_WORD_LENGTH} tokens long (got {printable(word)}, "
                    f"which has {len(ids)})",
                    "bad_words",
                )
            check_token_ids(ids, limits.vocab_size, "bad_words")
            if ids not in token_sequences[-1:]:
                token_sequences.append(ids)
    if len(token_sequences) > 2 * MAX_BAD_WORDS:
        given = f"{len(token_sequences)} sequences of tokens"
        raise InvalidRequest(f"bad_words must be a list of at most {MAX_BAD_WORDS} strings (got {given})", "bad_words")
    return msgspec.structs.replace(params, bad_words=[], bad_words_token_ids=token_sequences)


def fit_params(params: SamplingParams, prompt: Prompt, limits: ModelLimits, *, clamp: bool) -> SamplingParams:
    """Return ``params`` for one sample of this prompt: without n, stop strings and seed, with ``max_tokens`` set.

    Args:
        clamp: reduce a ``max_tokens`` that exceeds the context instead of refusing it; for a default that the client
            did not request.

    Raises:
        InvalidRequest: prompt and ``max_tokens`` together exceed the context. A prompt that is scored may fill it: the
            one token after it is sampled, but never computed.
    """
    if any(item.content.kind == "rows" for item in prompt.items):
        _check_without_ids(params)
    num_prompt_tokens = len(prompt.token_ids)
    room = max(limits.max_model_len - num_prompt_tokens, int(params.prompt_logprobs is not None))
    if not room:
        raise context_length_exceeded(limits.max_model_len, str(num_prompt_tokens), "prompt")
    wanted = room if params.max_tokens is None else params.max_tokens
    if wanted > room and not clamp:
        raise InvalidRequest(
            f"max_tokens is {wanted}, but this model's maximum context length is {limits.max_model_len} tokens and "
            f"your prompt has {num_prompt_tokens} tokens: max_tokens must be from 1 to {room}",
            "max_tokens",
            "context_length_exceeded",
        )
    plain = [list(span) for span in prompt.plain_spans]
    return msgspec.structs.replace(params, n=1, stop=[], seed=None, max_tokens=min(wanted, room), plain_spans=plain)


def _check_without_ids(params: SamplingParams) -> None:
    """Raise InvalidRequest for a parameter that reads the token ids of the prompt, which embeddings do not have."""
    for name, unset in (("prompt_logprobs", None), ("repetition_penalty", 1.0)):
        if (value := getattr(params, name)) != unset:
            text = f"{name} cannot be combined with prompt_embeds, which have no token ids (got {value})"
            raise InvalidRequest(text, name, "unsupported_value")


def check_volume(params: ListLike[SamplingParams], prompts: ListLike[Prompt], n: int) -> None:
    """Check the limits on products of fields, which bound the memory of one request, before it is submitted.

    Args:
        params: results of ``fit_params``, one per prompt; each prompt has ``n`` answers.

    Raises:
        InvalidRequest: a product is too large, with the field to reduce.
    """
    pairs = [(each, len(prompt.token_ids)) for each, prompt in zip(params, prompts, strict=True)]
    submitted = n * sum(length for _, length in pairs)
    if submitted > MAX_SUBMITTED_TOKENS:
        text = f"the tokens of all prompts times n must be at most {MAX_SUBMITTED_TOKENS} (got {submitted})"
        raise InvalidRequest(text, "n")
    of_prompts = sum(length * (each.prompt_logprobs + 1) for each, length in pairs if each.prompt_logprobs is not None)
    if n * of_prompts > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"the tokens of all prompts times n times (prompt_logprobs + 1) must be at most {MAX_PROMPT_LOGPROBS} "
            f"(got {n * of_prompts})",
            "prompt_logprobs",
        )
    routed = sum(length + (each.max_tokens or 0) for each, length in pairs if each.return_routed_experts)
    if n * routed > MAX_ROUTED_TOKENS:
        text = f"with return_routed_experts, all prompts and answers may have {MAX_ROUTED_TOKENS} tokens"
        raise InvalidRequest(f"{text} (got up to {n * routed}): lower n or max_tokens", "return_routed_experts")
    of_answers = sum((each.max_tokens or 0) * (each.logprobs + 1) for each in params if each.logprobs is not None)
    if n * of_answers > MAX_ANSWER_LOGPROBS:
        raise InvalidRequest(
            f"max_tokens times the number of answers times (logprobs + 1) must be at most {MAX_ANSWER_LOGPROBS} "
            f"(got {n * of_answers})",
            "logprobs",
        )


def check_template_variables(value: Any) -> dict[str, Any]:
    """Validate vLLM's ``chat_template_kwargs``: template variables, except those that the server sets."""
    name = "chat_template_kwargs"
    if not isinstance(value, dict):
        raise wrong_value(name, "an object", value)
    taken = RESERVED_VARIABLES.intersection(value)
    if taken:
        raise InvalidRequest(f"{name} must not set {min(taken)}", name)
    return value


def template_variables(effort: str | None, kwargs: Any) -> dict[str, Any] | None:
    """Return the variables for the chat template: those of the client, and those that express its effort.

    ``reasoning_effort`` is read by the templates of gpt-oss and others. Templates that can only turn thinking on and
    off read ``enable_thinking`` (Qwen3, GLM) or ``thinking`` (DeepSeek, Granite).
    """
    variables = {} if kwargs is None else check_template_variables(kwargs)
    if effort is not None:
        thinks = effort != "none"
        variables = {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks, **variables}
    return variables or None
