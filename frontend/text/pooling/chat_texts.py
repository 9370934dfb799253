"""Texts that are rendered as messages with the chat template, for models that sentence-transformers saved so."""

from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple

from quire.frontend.text.chat_template import Message
from quire.frontend.text.pooling.truncation import Side, first_part
from quire.frontend.text.text_in import ChatOptions, TextIn
from quire.protocol.errors import InvalidRequest

ROLES = {1: ("user",), 2: ("query", "document")}
"""Roles of the messages, by the number of texts."""
PROBES = ("alpha", "bravo"), ("charlie", "bravo"), ("alpha", "foxtrot")
FILLERS = "0", "1 2 3 4"
NO_TEMPLATE = "this model reads texts with its chat template, and it has none: set --chat-template, or give token ids"


class ChatText(NamedTuple):
    """A text that becomes the message of a user, after a system message unless ``system`` is ""."""

    text: str
    system: str = ""


class ChatTexts:
    """Renders one text as a user's message, or two as a query and a document, and encodes the conversation."""

    def __init__(
        self, text_in: TextIn, message_format: Literal["", "flat", "structured"], variables: Mapping[str, Any]
    ) -> None:
        """``variables``: of the template; ``add_generation_prompt`` may be one of them."""
        self._text_in = text_in
        self._is_structured = message_format == "structured"
        given = dict(variables)
        self._options = ChatOptions(bool(given.pop("add_generation_prompt", False)), variables=given or None)
        self._frame = lru_cache(maxsize=256)(self._find_frame)

    @cached_property
    def reads_pairs(self) -> bool:
        """Whether the template writes both texts of a pair, which templates of usual chat models do not."""
        try:
            made = [self._render(probe, "") for probe in PROBES]
        except InvalidRequest:
            return False
        return made[0] not in made[1:]

    def encode(self, texts: Sequence[str], system: str, max_tokens: int) -> list[int]:
        """Return the token ids of a conversation.

        Raises:
            InvalidRequest: no tokenizer, no template, the template refuses the messages, or they have more than
                ``max_tokens`` tokens for certain.
        """
        return self._text_in.encode_rendered(self._render(texts, system, max_tokens))

    def frame(self, num_texts: int, system: str) -> tuple[list[int], list[int]]:
        """Return the tokens before and after the texts.

        Raises:
            InvalidRequest: as ``encode``.
        """
        return self._frame(num_texts, system)

    def encode_cut(self, texts: Sequence[str], system: str, most: int, side: Side, param: str) -> list[int]:
        """Return ``most`` token ids at most: without the last ones, or the first ones, of what is in the frame.

        Only as much of each text is rendered and tokenized as is needed. ``most``: more than the frame has.

        Raises:
            InvalidRequest: as ``encode``.
        """
        before, after = self.frame(len(texts), system)
        parts = [first_part(self._text_in, text, most, side, param) for text in texts]
        ids = self._encode_all(parts, system)
        if len(ids) <= most and parts != list(texts):  # the template has left out some of the text
            ids = self._encode_all(texts, system)
        if len(ids) <= most:
            return ids
        return [*ids[: most - len(after)], *after] if side == "right" else [*before, *ids[len(before) - most :]]

    def _encode_all(self, texts: Sequence[str], system: str) -> list[int]:
        """Return all token ids of a conversation, of any length."""
        return self.encode(texts, system, _any_length(texts, system))

    def _find_frame(self, num_texts: int, system: str) -> tuple[list[int], list[int]]:
        one, other = (self._encode_all([text] * num_texts, system) for text in FILLERS)
        num_before = _num_equal(one, other)
        num_after = _num_equal(one[num_before:][::-1], other[num_before:][::-1])
        return one[:num_before], one[len(one) - num_after :]

    def _render(self, texts: Sequence[str], system: str, max_tokens: int | None = None) -> str:
        if self._text_in.template is None and self._text_in.tokenizer is not None:
            raise InvalidRequest(NO_TEMPLATE, "messages")
        messages = [self._message("system", system)] if system else []
        messages += [self._message(*each) for each in zip(ROLES[len(texts)], texts, strict=True)]
        return self._text_in.render_chat(messages, self._options, max_tokens or _any_length(texts, system))

    def _message(self, role: str, text: str) -> Message:
        return {"role": role, "content": [{"type": "text", "text": text}] if self._is_structured else text}


def _any_length(texts: Sequence[str], system: str) -> int:
    """Return more tokens than a template makes of these texts."""
    return 65536 + len(system) + sum(map(len, texts))


def _num_equal(one: list[int], other: list[int]) -> int:
    """Return at how many places, from the first one on, both lists are equal."""
    places = zip(one, other, strict=False)
    return next((place for place, (left, right) in enumerate(places) if left != right), min(len(one), len(other)))
