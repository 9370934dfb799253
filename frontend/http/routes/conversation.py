"""From a parsed chat request to its prompt, and to the readers of its answers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from quire.frontend.http.routes.tool_calls import RequiredCalls
from quire.frontend.http.schema.schema import ChatRequest
from quire.frontend.http.serving.server import Server
from quire.frontend.sessions.chat_piece import encode_chat_piece
from quire.frontend.sessions.open_session import OpenSession
from quire.frontend.text.continuation import encode_extended
from quire.frontend.text.parsing.answer_parser import AnswerParser, CallDelta, CallDropped, Content, Event, Thought
from quire.frontend.text.parsing.choose_format import marker_format
from quire.frontend.text.parsing.thoughts import Thoughts
from quire.frontend.text.prompts import Prompt


class AnswerReader(Protocol):
    """Reads the text of one answer as thoughts, content and calls."""

    def push(self, text: str, *, last: bool) -> list[Event]:
        """Return what ``text`` adds. ``last``: it ends the answer."""
        ...


class PlainAnswer:
    """Reader of an answer that is content only."""

    def push(self, text: str, *, last: bool) -> list[Event]:
        return [Content(text)] if text else []


class FirstCall:
    """Reader of an answer that ends with its first call, for clients that allow no parallel calls.

    ``is_complete``: the call is whole, or something followed it; the rest of the answer is not read.
    """

    def __init__(self, answer: AnswerParser) -> None:
        self._answer = answer
        self._index: int | None = None
        self.is_complete = False

    def push(self, text: str, *, last: bool) -> list[Event]:
        kept: list[Event] = []
        if self.is_complete:
            return kept
        for event in self._answer.push(text, last=last):
            match event:
                case CallDelta() if self._index in (None, event.index):
                    self._index = event.index
                case CallDropped():
                    self._index = None
                case _ if self._index is not None:
                    self.is_complete = True
                    return kept
            kept.append(event)
        self.is_complete = self._index is not None and self._answer.has_whole_calls
        return kept


class TokenReader:
    """Reads an answer by its tokens, and counts those of thoughts.

    A token counts if text of a thought is known with it, and so do those before it whose text was held back since the
    last one. So the tokens of the markers around a thought do not.
    """

    def __init__(self, reader: AnswerReader) -> None:
        self.reader = reader
        self.num_thought_tokens = 0
        self._num_held = 0
        """Tokens since the last one that told anything."""
        self._in_thought = False

    def push(self, texts: Sequence[str], *, last: bool) -> list[Event]:
        """Return what the texts of these tokens add. ``last``: they end the answer."""
        if len(texts) == 1:  # most by far
            return self._push(texts[0], last=last)
        whole: list[Event] = []
        for index, text in enumerate(texts, 1):
            whole += self._push(text, last=last and index == len(texts))
        return whole

    def _push(self, text: str, *, last: bool) -> list[Event]:
        events = self.reader.push(text, last=last)
        self._num_held += 1
        if events:
            ends_thought = type(events[-1]) is Thought
            if ends_thought or (len(events) > 1 and any(type(event) is Thought for event in events)):
                self.num_thought_tokens += self._num_held if self._in_thought else 1
            self._num_held, self._in_thought = 0, ends_thought
        return events


class NotedAnswer:
    """Reader that notes the calls that another reader finds."""

    def __init__(self, reader: AnswerReader) -> None:
        self._reader = reader
        self._names: dict[int, str] = {}

    def push(self, text: str, *, last: bool) -> list[Event]:
        events = self._reader.push(text, last=last)
        for event in events:
            if isinstance(event, CallDelta) and event.name:
                self._names[event.index] = event.name
            elif isinstance(event, CallDropped):
                self._names.pop(event.index, None)
        return events

    @property
    def tool(self) -> str:
        """The name of the first call, or ""."""
        return next(iter(self._names.values()), "")


def tool_of(reader: AnswerReader) -> str:
    """Return the name of the first tool that an answer calls; "" if there is none, or its calls are not noted."""
    return reader.tool if isinstance(reader, NotedAnswer) else ""


async def encode_conversation(
    server: Server,
    request: ChatRequest,
    size: int,
    session: OpenSession | None = None,
    so_far: OpenSession | None = None,
) -> tuple[Prompt, Callable[[], AnswerReader]]:
    """Render and tokenize the messages. Return the prompt, and what makes the reader of each answer to it.

    Readers note calls if the scheduler wants to know them.

    Args:
        size: bytes of the body.
        session: what the messages continue, whose tokens the prompt is without.
        so_far: what the messages may begin with, whose tokens the prompt then begins with.
    """
    prompt, new_reader = await _encode(server, request, size, session, so_far)
    if not server.settings.notes_tools or new_reader is PlainAnswer:
        return prompt, new_reader
    return prompt, lambda: NotedAnswer(new_reader())


async def _encode(
    server: Server, request: ChatRequest, size: int, session: OpenSession | None, so_far: OpenSession | None
) -> tuple[Prompt, Callable[[], AnswerReader]]:
    messages, options = request.messages, request.options
    await options.images.read(server.settings.images)

    def encode() -> Prompt:
        if so_far is not None and so_far.tokens:
            return encode_extended(messages, so_far.token_ids, options, server.text_in, server.engine)
        return encode_chat_piece(session or OpenSession(0, 0.0), messages, options, server.text_in, server.engine)

    prompt = await server.conversations.run(size, options, encode)
    use, thinking, answers = request.tool_use, server.settings.thinking, server.settings.answer_format
    if use is not None:
        end = thinking.end_before_answer(prompt, request.params)
        # The marker is searched for in the text, and may be a special token.
        if end:
            thoughts = partial(Thoughts, marker_format(thinking.start_text, end), thinking.start_text)
            prompt = replace(prompt, shown=frozenset(thinking.end), thoughts=thoughts)
        return prompt, lambda: RequiredCalls(use, end)
    form = None if answers is None else answers.for_request(with_tools=bool(options.tools))
    if answers is None or form is None:
        return prompt, PlainAnswer
    tools = {tool["function"]["name"]: _properties(tool["function"]) for tool in options.tools or ()}
    prefix = answers.prefix(prompt.end)
    find_thoughts = answers.thoughts(prompt.end, with_tools=bool(options.tools))
    prompt = replace(prompt, shown=answers.special_ids, thoughts=find_thoughts)

    free_answer = partial(AnswerParser, form, tools, prefix, has_only_calls=request.has_only_calls)
    if request.parallel_calls or not tools:
        return prompt, free_answer

    def first_call() -> FirstCall:
        return FirstCall(free_answer())

    def until() -> Callable[[str], bool]:
        reader = first_call()

        def is_complete(text: str) -> bool:
            reader.push(text, last=False)
            return reader.is_complete

        return is_complete

    return replace(prompt, until=until), first_call


def _properties(function: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = (function.get("parameters") or {}).get("properties")
    return properties if isinstance(properties, dict) else {}
