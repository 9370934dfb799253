"""Questions as prompts: a conversation, of which all of them have the tokens, then one question each."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from quire.frontend.text.chat_template import Message
from quire.frontend.text.decisions.questions import Question
from quire.frontend.text.image_parts import MessageImages
from quire.frontend.text.prompts import ModelLimits, Prompt, Spans, conversation_prompt
from quire.frontend.text.text_in import ChatOptions, TextIn, context_length_exceeded
from quire.protocol.errors import InvalidRequest
from quire.protocol.request.thinking import ThinkingState, without_plain

LEAD = (
    "Read the question below about the",
    " input above. Write one of its allowed answers as listed, and no more.\n\n",
)
"""What comes before each question. Between two words, no tokenizer known joins tokens: there the prompts are cut."""
PLACE, ANSWER = "quire-asks-here", "quire-answers-here"
"""Texts that stand for the question and the answer in a rendering."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A question as tokens. ``answers``: those of each allowed answer, as the model is to write it."""

    question: Question
    prompt: Prompt
    answers: list[tuple[int, ...]]


class Asker:
    """Asks questions about one conversation, which is rendered and tokenized once for all of them."""

    def __init__(
        self,
        messages: Sequence[Message],
        options: ChatOptions,
        text_in: TextIn,
        limits: ModelLimits,
        markers: tuple[Sequence[int], Sequence[int]],
    ) -> None:
        """
        Args:
            messages: the result of ``check_messages``.
            markers: token ids of the thinking markers; empty without.

        Raises:
            InvalidRequest: as ``encode_messages``, or the template does not write messages as they are.
        """
        self._options, self._text_in, self._limits, self._markers = options, text_in, limits, markers
        rendered = text_in.render_chat(_with_question(messages), options, limits.max_model_len)
        head, found, self._end = rendered.rpartition(PLACE)
        if not found:
            text = "this model's chat template does not write the text of messages as it is"
            raise InvalidRequest(text, "input", "unsupported")
        self._first = head.removesuffix(LEAD[1])
        self._then = head[len(self._first) :]
        self._shared = text_in.encode_marked(self._first)
        whole = text_in.encode_conversation(rendered)
        self._is_cut = self._joined(self._then + PLACE + self._end) == whole
        self._closing = self._closing_tokens(*whole)
        self._lead = self._before_answer()
        self._answers: dict[str, tuple[int, ...]] = {}

    def ask(self, question: Question) -> Asked:
        """Return the question as tokens.

        Raises:
            InvalidRequest: it does not fit into the context, or two of its answers have the same tokens.
        """
        try:
            written = self._text_in.marked(question.text, self._limits.max_model_len)
            rest = self._then + written + self._end
            ids, plain = self._joined(rest) if self._is_cut else self._text_in.encode_conversation(self._first + rest)
            prompt = conversation_prompt(
                [*ids, *self._closing], plain, rest, self._options, self._text_in, self._limits
            )
            answers = [self._tokens(answer) for answer in question.answers]
        except InvalidRequest as error:
            raise InvalidRequest(error.message, question.where, error.code) from None
        if len(set(answers)) < len(answers) or () in answers:
            text = f"{question.where} has answers that this model's tokenizer cannot tell apart"
            raise InvalidRequest(text, question.where, "unsupported_value")
        if (size := len(prompt.token_ids) + max(map(len, answers)) - 1) >= self._limits.max_model_len:
            raise context_length_exceeded(self._limits.max_model_len, str(size), question.where)
        return Asked(question, prompt, answers)

    def _joined(self, rest: str) -> tuple[list[int], Spans]:
        (shared, before), (ids, plain) = self._shared, self._text_in.encode_marked(rest)
        return [*shared, *ids], [*before, *((begin + len(shared), end + len(shared)) for begin, end in plain)]

    def _closing_tokens(self, ids: list[int], plain: Spans) -> list[int]:
        """Return the marker that ends the thoughts which the template leaves open, if it does."""
        start, end = self._markers
        is_open = bool(start) and ThinkingState(start, end, without_plain(ids, plain).tolist()).is_open
        return [*end] if is_open else []

    def _before_answer(self) -> str:
        """Return the blanks that the template writes between the prompt and an answer, as Llama 2's does."""
        turns: list[Message] = [{"role": "user", "content": PLACE}, {"role": "assistant", "content": ANSWER}]
        asks, answers = (
            replace(self._options, add_generation_prompt=opens, images=MessageImages()) for opens in (True, False)
        )
        prompt = self._text_in.render_chat(turns[:1], asks, self._limits.max_model_len)
        begin, found, _ = self._text_in.render_chat(turns, answers, self._limits.max_model_len).partition(ANSWER)
        blanks = begin[len(prompt) :]
        return blanks if found and begin.startswith(prompt) and blanks.isspace() else ""

    def _tokens(self, answer: str) -> tuple[int, ...]:
        """Return the tokens of an answer behind the prompt, which a tokenizer may write otherwise at its beginning."""
        if answer not in self._answers:
            encode, text = self._text_in.encode_rendered, self._text_in.marked(answer, self._limits.max_model_len)
            before, ids = encode(self._end), encode(self._end + self._lead + text)
            follows = ids[: len(before)] == before and not self._closing
            self._answers[answer] = tuple(ids[len(before) :] if follows else encode(self._lead + text))
        return self._answers[answer]


def num_shared(asked: Sequence[Asked]) -> int:
    """Return the number of tokens with which all prompts begin."""
    first, *others = (each.prompt.token_ids for each in asked)
    shared = len(first)
    for ids in others:
        shared = min(shared, len(ids))
        differs = np.flatnonzero(first[:shared] != ids[:shared])
        shared = int(differs[0]) if len(differs) else shared
    return shared


def _with_question(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with PLACE as a question at the end: in the user's last message, or in one of its own.

    Many templates refuse two messages of the user in a row.
    """
    text, last = "".join(LEAD) + PLACE, messages[-1]
    if last["role"] != "user":
        return [*messages, {"role": "user", "content": text}]
    content, text = last["content"], f"\n\n{text}"
    asked = content + text if isinstance(content, str) else [*content, {"type": "text", "text": text}]
    return [*messages[:-1], {**last, "content": asked}]
