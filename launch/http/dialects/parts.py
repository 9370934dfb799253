"""An answer's text as parts: thoughts, text and tool calls, which each API writes in its own form."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from quire.launch.http.routes.tool_calls import AnyCalls, CallsAfterReasoning, NamedCall
from quire.launch.http.schema.schema import ChatRequest
from quire.launch.http.serving.server import Server
from quire.launch.text.prompts import Prompt, encode_messages

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

    def __init__(self, request: ChatRequest, thinking_end: str) -> None:
        use = request.tool_use
        self._calls = None
        if use is not None:
            self._calls = CallsAfterReasoning(
                AnyCalls() if use.function is None else NamedCall(use.function), thinking_end
            )

    def push(self, text: str, *, last: bool) -> list[Part]:
        """Return what ``text`` adds. ``last``: it ends the answer."""
        if self._calls is None:
            return [Part("text", text)] if text else []
        thought, calls = self._calls.push(text, last=last)
        found = [Part("call", call.arguments, call.name or "") for call in calls]
        return [Part("thought", thought), *found] if thought else list(found)


async def encode_conversation(
    server: Server, request: ChatRequest, size: int
) -> tuple[ChatRequest, Prompt, AnswerParts]:
    """Render and tokenize a conversation; return the request to submit, its prompt, and the parser of its answer.

    ``size``: bytes of the request body.
    """
    prompt = await server.conversations.run(
        size, request.options, lambda: encode_messages(request.messages, request.options, server.text_in, server.engine)
    )
    thinking_end = ""
    if request.tool_use is not None:
        thinking_end = server.settings.thinking.end_before_answer(prompt.token_ids, request.params)
        if thinking_end:
            request = replace(request, params=msgspec.structs.replace(request.params, skip_special_tokens=False))
    return request, prompt, AnswerParts(request, thinking_end)


def merged(parts: Sequence[Part]) -> list[Part]:
    """Return whole parts, given all deltas of an answer."""
    whole: list[Part] = []
    for part in parts:
        if whole and part.continues(whole[-1]):
            whole[-1] = replace(whole[-1], text=whole[-1].text + part.text)
        else:
            whole.append(part)
    return whole
