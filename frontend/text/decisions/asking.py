"""Questions as prompts: a conversation, of which all of them have the tokens, then one question each."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from quire.frontend.text.chat_template import Message
from quire.frontend.text.decisions.questions import Question, question_text
from quire.frontend.text.decisions.reads import Asked, Decisions, Tokens
from quire.frontend.text.prompts import ModelLimits, Spans, conversation_prompt
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
        """``messages``: the result of ``check_messages``; ``markers``: tokens of the thinking markers, or empty.

        Raises:
            InvalidRequest: as ``encode_messages``, or the template does not write messages as they are.
        """
        self._options, self._text_in, self._limits = options, text_in, limits
        asking = _with_question(messages)
        rendered = text_in.render_chat(asking, options, limits.max_model_len)
        head, found, self._end = rendered.rpartition(PLACE)
        if not found:
            text = "this model's chat template does not write the text of messages as it is"
            raise InvalidRequest(text, "input", "unsupported")
        self._first = head.removesuffix(LEAD[1])
        self._then = head[len(self._first) :]
        self._shared = text_in.encode_marked(self._first)
        ids, plain = text_in.encode_conversation(rendered)
        self._is_cut = self._joined(self._then + PLACE + self._end) == (ids, plain)
        start, end = markers
        # The template may leave a thought open, although thinking is off: then its end follows.
        is_open = bool(start) and ThinkingState(start, end, without_plain(ids, plain).tolist()).is_open
        self._closing = [*end] if is_open else []
        # Llama 2's writes a blank between the prompt and an answer.
        answered = text_in.render_chat(
            [*asking, {"role": "assistant", "content": ANSWER}],
            replace(options, add_generation_prompt=False),
            limits.max_model_len,
        )
        blanks = answered.rpartition(ANSWER)[0].rpartition(PLACE)[2].removeprefix(self._end)
        self._blanks = blanks if blanks.isspace() else ""
        self._answer_tokens = cache(self._encode_answer)

    def ask(self, questions: Sequence[Question]) -> Decisions:
        """Return what must be read; raise InvalidRequest, with its path, for a question that cannot be asked."""
        return Decisions([self._ask(question, f"questions[{i}]") for i, question in enumerate(questions)])

    def _ask(self, question: Question, where: str) -> Asked:
        most, text = self._limits.max_model_len, question_text(question, where)
        try:
            rest = self._then + self._text_in.marked(text, most) + self._end
            ids, plain = self._joined(rest) if self._is_cut else self._text_in.encode_conversation(self._first + rest)
            ids = [*ids, *self._closing]
            prompt = conversation_prompt(ids, plain, rest, self._options, self._text_in, self._limits)
            answers = [self._answer_tokens(answer) for answer, _ in question.options()]
        except InvalidRequest as error:
            raise InvalidRequest(error.message, where, error.code) from None
        if len(set(answers)) < len(answers) or () in answers:
            why = "that are equal, or that this model's tokenizer cannot tell apart"
            raise InvalidRequest(f"{where} has answers {why}", where, "unsupported_value")
        if (size := len(ids) + max(map(len, answers)) - 1) >= most:
            raise context_length_exceeded(most, str(size), where)
        return Asked(question, where, prompt, answers)

    def _joined(self, rest: str) -> tuple[list[int], Spans]:
        (shared, before), (ids, plain) = self._shared, self._text_in.encode_marked(rest)
        return [*shared, *ids], [*before, *((begin + len(shared), end + len(shared)) for begin, end in plain)]

    def _encode_answer(self, answer: str) -> Tokens:
        """Return the tokens of an answer behind the prompt, which a tokenizer may write otherwise at its beginning."""
        encode, text = self._text_in.encode_rendered, self._text_in.marked(answer, self._limits.max_model_len)
        before, ids = encode(self._end), encode(self._end + self._blanks + text)
        follows = ids[: len(before)] == before and not self._closing
        return tuple(ids[len(before) :] if follows else encode(self._blanks + text))


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
