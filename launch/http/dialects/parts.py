"""An answer's text as parts: thoughts, text and tool calls, which each API writes in its own form."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, assert_never

from quire.launch.http.routes import conversation
from quire.launch.http.routes.conversation import AnswerReader
from quire.launch.http.schema.schema import ChatRequest
from quire.launch.http.serving.server import Server
from quire.launch.text.parsing.answer_parser import CallDelta, CallDropped, Content, Thought
from quire.launch.text.prompts import Prompt

Kind = Literal["thought", "text", "call"]


@dataclass(frozen=True, slots=True)
class Part:
    """What one delta adds to a part of the answer.

    Attributes:
        text: added text; the arguments of a call.
        name: the function's name, in the first delta of a call only.
    """

    kind: Kind
    text: str
    name: str = ""

    def continues(self, other: "Part | None") -> bool:
        """Whether this delta belongs to the same part of the answer as ``other``."""
        return other is not None and other.kind == self.kind and not self.name


class AnswerParts:
    """The parser of one answer."""

    def __init__(self, reader: AnswerReader) -> None:
        self._reader = reader

    def push(self, text: str, *, last: bool) -> list[Part]:
        """Return what ``text`` adds. ``last``: it ends the answer.

        A call that turns out not to be one is left out if it began in this text; its text follows as content.
        """
        found: list[tuple[int, Part]] = []
        for event in self._reader.push(text, last=last):
            match event:
                case Content(text=added):
                    found.append((-1, Part("text", added)))
                case Thought(text=added):
                    found.append((-1, Part("thought", added)))
                case CallDelta(index=index, name=name, arguments=arguments):
                    found.append((index, Part("call", arguments, name or "")))
                case CallDropped(index=dropped):
                    found = [(index, part) for index, part in found if index != dropped]
                case _:
                    assert_never(event)
        return [part for _, part in found]


async def encode_conversation(
    server: Server, request: ChatRequest, size: int
) -> tuple[ChatRequest, Prompt, AnswerParts]:
    """Render and tokenize a conversation; return the request to submit, its prompt, and the parser of its answer.

    ``size``: bytes of the request body.
    """
    prompt, new_reader = await conversation.encode_conversation(server, request, size)
    return request, prompt, AnswerParts(new_reader())


def merged(parts: Sequence[Part]) -> list[Part]:
    """Return whole parts, given all deltas of an answer."""
    whole: list[Part] = []
    for part in parts:
        if whole and part.continues(whole[-1]):
            whole[-1] = replace(whole[-1], text=whole[-1].text + part.text)
        else:
            whole.append(part)
    return whole
