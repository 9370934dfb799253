"""Converts the inputs of a request for vectors or scores to prompts, for HTTP and the offline API."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
from tokenizers import normalizers

from quire.frontend.text.chat_template import Message
from quire.frontend.text.pooling.chat_texts import ChatText, ChatTexts
from quire.frontend.text.pooling.pairs import (
    PREFIX,
    SUFFIX,
    SpecialTokens,
    TextPair,
    gives_types,
    judged_text,
    kept_tokens,
)
from quire.frontend.text.pooling.truncation import Side, cut, first_tokens
from quire.frontend.text.prompts import ModelLimits, Prompt, check_token_ids
from quire.frontend.text.text_in import ChatOptions, TextIn
from quire.protocol.errors import InvalidRequest, wrong_value
from quire.protocol.model.pooling_config import PoolingConfig
from quire.protocol.request.pooling_params import PoolingParams, PoolingTask

COMPARED = 4
"""Tokens of two texts that are both too long, as a multiple of their limit, by which the longer one is found."""


class PoolingConversation(NamedTuple):
    """Messages that are rendered with the chat template."""

    messages: list[Message]
    options: ChatOptions


PoolingInput: TypeAlias = str | ChatText | list[int] | TextPair | PoolingConversation


@dataclass(frozen=True, slots=True)
class Truncation:
    """How long a prompt may be. ``most``: tokens to which it is cut; None: a longer one is refused."""

    most: int | None = None
    side: Side = "right"


@dataclass(frozen=True)
class InputEncoder:
    """Encodes the inputs of a model with pooling. Made once, because it keeps what it has learnt of the template.

    Attributes:
        limits: the engine's limits.
        pooling: how the model makes vectors, and the longest prompt that it was made for.
    """

    text_in: TextIn
    limits: ModelLimits
    pooling: PoolingConfig

    @cached_property
    def chat(self) -> ChatTexts:
        """Renders texts with the chat template, for models that read them so."""
        return ChatTexts(self.text_in, self.pooling.message_format, self.pooling.template_variables)

    @property
    def max_tokens(self) -> int:
        """The longest prompt that the model reads."""
        return min(self.pooling.max_tokens or self.limits.max_model_len, self.limits.max_model_len)

    def truncation(self, most: Any, side: Any = None) -> Truncation:
        """Check ``truncate_prompt_tokens`` and ``truncation_side``; -1: the model's maximum.

        Raises:
            InvalidRequest: another type, or out of range.
        """
        if side not in (None, "left", "right"):
            raise wrong_value("truncation_side", "left or right", side)
        if most is not None and (type(most) is not int or not (most == -1 or 1 <= most <= self.max_tokens)):
            allowed = f"-1 or an integer from 1 to {self.max_tokens}, the longest prompt of this model"
            raise wrong_value("truncate_prompt_tokens", allowed, most)
        return Truncation(self.max_tokens if most == -1 else most, side or self.text_in.truncation_side)

    def encode(
        self, given: PoolingInput, truncation: Truncation, param: str, *, add_special_tokens: bool = True
    ) -> Prompt:
        """Return the prompt of one input.

        Args:
            param: field of the input, for errors.
            add_special_tokens: let the tokenizer add its own special tokens to text.

        Raises:
            InvalidRequest: it has no tokens, is too long, has an id outside the vocabulary, or is text without a
                tokenizer.
        """
        if self.pooling.lowercase:
            given = _lowercase(given)
        try:
            ids, second_text = self._ids(given, truncation, param, add_special_tokens)
        except InvalidRequest as error:
            if error.code != "context_length_exceeded":
                raise
            raise self._too_long(param, f"more than {self.max_tokens}") from None
        if not ids:
            raise InvalidRequest(f"{param} must hold at least one token", param)
        if len(ids) > self.max_tokens:
            raise self._too_long(param, str(len(ids)))
        checked = check_token_ids(ids, self.limits.vocab_size, param)
        text = given.text if isinstance(given, ChatText) else given if isinstance(given, str) else None
        return Prompt(np.array(checked, dtype=np.int32), text, second_text=second_text)

    def _ids(self, given: PoolingInput, truncation: Truncation, param: str, special: bool) -> tuple[list[int], int]:
        """Return the token ids, and the ``second_text`` of the prompt."""
        match given:
            case str():
                return self._text_ids(given, truncation, param, special), 0
            case ChatText():
                return self._rendered_ids([given.text], given.system, truncation, param), 0
            case TextPair() if self.pooling.message_format and self.chat.reads_pairs:
                return self._rendered_ids(given[:2], given.instruction, truncation, param), 0
            case TextPair() if self.pooling.label_token_ids:
                return self._judged_ids(given, truncation, param), 0
            case TextPair():
                return self._pair_ids(given, truncation, param, special)
            case PoolingConversation():
                # Each part of a rendered conversation has a meaning: its length is limited before it is cut.
                ids = self.text_in.encode_chat(*given, self.limits.max_model_len)
                return (ids if truncation.most is None else cut(ids, truncation.most, truncation.side)), 0
            case _:
                is_cut = truncation.most is not None and isinstance(given, list)
                return (cut(given, truncation.most or 0, truncation.side) if is_cut else given), 0

    def _text_ids(self, text: str, truncation: Truncation, param: str, special: bool) -> list[int]:
        if truncation.most is None:
            return self.text_in.encode(text, add_special_tokens=special, max_tokens=self.max_tokens, param=param)
        added = self._special(special, is_pair=False)
        room = self._room(truncation.most, len(added))
        return added.around(first_tokens(self.text_in, text, room, truncation.side, param))

    def _pair_ids(self, pair: TextPair, truncation: Truncation, param: str, special: bool) -> tuple[list[int], int]:
        text_in, added = self.text_in, self._special(special, is_pair=True)
        texts = pair.instruction + pair.first, pair.second
        if truncation.most is None:
            first, second = (text_in.encoding(text, max_tokens=self.max_tokens, param=param).ids for text in texts)
            return added.around(first, second), added.second_text(first)
        room, side = self._room(truncation.most, len(added)), truncation.side

        def read(most: int) -> tuple[list[int], list[int]]:
            one, other = (first_tokens(text_in, text, most, side, param) for text in texts)
            return one, other

        first, second = read(room)
        compared = first, second
        if len(first) == len(second) == room and room % 2:  # the longer text gets one token more
            compared = read(COMPARED * room)
        kept_first, kept_second = kept_tokens(len(compared[0]), len(compared[1]), room)
        first, second = cut(first, kept_first, side), cut(second, kept_second, side)
        return added.around(first, second), added.second_text(first)

    def _rendered_ids(self, texts: Sequence[str], system: str, truncation: Truncation, param: str) -> list[int]:
        """Return the prompt of a model that reads texts with its chat template, which is never cut off."""
        try:
            if truncation.most is None:
                return self.chat.encode(texts, system, self.max_tokens)
            self._room(truncation.most, sum(map(len, self.chat.frame(len(texts), system))))
            return self.chat.encode_cut(texts, system, truncation.most, truncation.side, param)
        except InvalidRequest as error:
            if error.param != "messages":
                raise
            raise InvalidRequest(f"{param}: {error.message}", param, error.code) from None

    def _judged_ids(self, pair: TextPair, truncation: Truncation, param: str) -> list[int]:
        """Return the prompt of a model that answers yes or no. What is around the texts is never cut off."""
        prefix = self.text_in.encode(PREFIX, add_special_tokens=False, param=param)
        suffix = self.text_in.encode(SUFFIX, add_special_tokens=False, param=param)
        text = judged_text(pair)
        if truncation.most is None:
            found = self.text_in.encoding(text, max_tokens=self.max_tokens, param=param, is_plain=True).ids
        else:
            room = self._room(truncation.most, len(prefix) + len(suffix))
            found = first_tokens(self.text_in, text, room, truncation.side, param, is_plain=True)
        return [*prefix, *found, *suffix]

    def _special(self, wanted: bool, *, is_pair: bool) -> SpecialTokens:
        text_in = self.text_in
        if not wanted or text_in.tokenizer is None:
            return SpecialTokens([], [], [])
        has_types = gives_types(text_in.input_names, text_in.tokenizer_info.get("tokenizer_class", ""))
        return SpecialTokens.of(text_in.tokenizer, is_pair=is_pair, gives_types=has_types)

    def _room(self, most: int, num_fixed: int) -> int:
        """Return the tokens of text that are left beside those of every prompt."""
        if most <= num_fixed:
            text = f"truncate_prompt_tokens must be at least {num_fixed + 1}: {num_fixed} tokens are in every prompt"
            raise InvalidRequest(f"{text} (got {most})", "truncate_prompt_tokens")
        return most - num_fixed

    def _too_long(self, param: str, given: str) -> InvalidRequest:
        text = f"{param} has {given} tokens, and this model reads at most {self.max_tokens}"
        advice = "shorten it, or set truncate_prompt_tokens to -1"
        return InvalidRequest(f"{text}: {advice}", param, "context_length_exceeded")


def _lowercase(given: PoolingInput) -> PoolingInput:
    """Convert texts to lower case, character by character as tokenizers do; token ids and conversations stay."""
    lower = normalizers.Lowercase().normalize_str
    match given:
        case str():
            return lower(given)
        case ChatText(text, system):
            return ChatText(lower(text), lower(system))
        case TextPair(first, second, instruction):
            return TextPair(lower(first), lower(second), lower(instruction))
        case _:
            return given


def prompt_text(pooling: PoolingConfig, name: str | None) -> str:
    """Return the text that is put before each input: that of this name, or (None) of the model's default.

    Raises:
        InvalidRequest: the model has no prompt of this name.
    """
    wanted = pooling.default_prompt if name is None else name
    if wanted in pooling.prompts or not wanted:
        return pooling.prompts.get(wanted, "")
    known = ", ".join(sorted(pooling.prompts)) or "none"
    raise wrong_value("prompt_name", f"a prompt of this model ({known})", wanted)


def with_prompt(pooling: PoolingConfig, prompt: str, text: str) -> PoolingInput:
    """Return a text with the prompt before it, in the form that the model reads."""
    return ChatText(text, prompt) if pooling.message_format else prompt + text


def for_prompt(params: PoolingParams, prompt: Prompt) -> PoolingParams:
    """Return the parameters of one prompt of a request."""
    return msgspec.structs.replace(params, second_text=prompt.second_text) if prompt.second_text else params


def pooling_params(
    pooling: PoolingConfig, task: PoolingTask, dimensions: Any = None, *, use_activation: bool = True
) -> PoolingParams:
    """Return the parameters of a task that the model has; the caller has checked that.

    Raises:
        InvalidRequest: the model has no vectors of this size.
    """
    if dimensions is None:
        return PoolingParams(task, 0, use_activation)
    if task == "classify":
        raise InvalidRequest("dimensions cannot be combined with the task classify", "dimensions", "unsupported_value")
    if allowed := pooling.dimensions_allowed(dimensions if type(dimensions) is int else 0):
        raise wrong_value("dimensions", allowed, dimensions)
    return PoolingParams(task, dimensions, use_activation)
