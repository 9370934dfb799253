"""Answers in the form of Anthropic's Messages API: one object, or a stream of named events."""

from collections.abc import Sequence
from typing import Any

import msgspec

from quire.frontend.engine.answers import OutputDelta
from quire.frontend.http.dialects.messages_body import MessagesRequest
from quire.frontend.http.dialects.parts import Dropped, Part, is_object, read_parts, whole_parts
from quire.frontend.http.routes.conversation import AnswerReader
from quire.frontend.http.routes.formatter import Collected, ResponseFormatter, Usage
from quire.frontend.http.routes.text_template import TextTemplate
from quire.frontend.http.routes.tool_calls import new_call_id
from quire.frontend.http.serving.sse import EventStyle
from quire.protocol.wire.timeline import TimelineEvent

UNSIGNED = "unsigned"
"""Signature of a thought. Clients refuse or drop a thought without one; this server needs none."""


DELTAS = {
    "text": ("text_delta", "text"),
    "thought": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}
"""Type of a delta, and the member with its text, by kind of part."""

Fields = dict[str, Any]


class MessageFormatter(ResponseFormatter):
    """Formats the one answer of a request. A stream has one open block at a time."""

    def __init__(self, request: MessagesRequest, num_prompt_tokens: int, reader: AnswerReader, request_id: str) -> None:
        super().__init__(request_id, [reader])
        self.style = EventStyle(b"%b", None, lambda error: frame("error", error.messages_body()))
        self._model = request.chat.model
        self._max_tokens = request.max_tokens
        self._num_prompt_tokens = num_prompt_tokens
        self._reader = reader
        self._started = False
        self._index = -1
        self._open: Part | None = None
        self._calls: set[int] = set()

    def event(self, index: int, delta: OutputDelta, usage: Usage | None) -> bytes:
        frames: list[bytes] = []
        if not self._started:
            self._started = True
            # The first delta's tokens are counted at the end.
            message = self._message([], {}, self._usage(delta.num_cached_tokens, 0), None)
            frames.append(_event("message_start", message=message))
        last = delta.finish_reason is not None
        for part in read_parts(self._reader.push(delta.text, last=last)):
            frames += self._add(part)
        if last:
            frames += self._close()
            ended = self._stop(delta.finish_reason, delta.stop_reason, delta.num_output_tokens)
            counts = self._usage(delta.num_cached_tokens, delta.num_output_tokens)
            frames.append(_event("message_delta", delta=ended, usage=counts, **_timeline(delta.timeline)))
            frames.append(_event("message_stop"))
        return b"".join(frames)

    def response(self, answers: Sequence[Collected], usage: Usage) -> bytes:
        (answer,) = answers
        parts = whole_parts(self._reader.push("".join(answer.texts), last=True))
        self._calls = {part.index for part in parts if part.kind == "call"}
        ended = self._stop(answer.finish_reason, answer.stop_reason, usage.completion_tokens)
        counts = self._usage(usage.prompt_tokens_details.cached_tokens, usage.completion_tokens)
        blocks = [_block(part) for part in parts if part.text]
        return msgspec.json.encode(self._message(blocks, ended, counts, answer.timeline))

    def _add(self, part: Part | Dropped) -> list[bytes]:
        """Return the events of a part: the start of a block, if it begins one, and a delta."""
        if isinstance(part, Dropped):
            self._calls.discard(part.index)
            return self._close()
        frames: list[bytes] = []
        if not part.continues(self._open):
            frames += self._close()
            self._index += 1
            if part.kind == "call":
                self._calls.add(part.index)
            frames.append(_event("content_block_start", index=self._index, content_block=_empty_block(part)))
            kind, member = DELTAS[part.kind]
            self._deltas = TextTemplate(lambda text: self._delta({"type": kind, member: text}))
        self._open = part
        if part.text:
            frames.append(self._deltas.fill(part.text))
        return frames

    def _close(self) -> list[bytes]:
        """Return the events that end the open block."""
        if self._open is None:
            return []
        frames: list[bytes] = []
        if self._open.kind == "thought":
            frames.append(self._delta({"type": "signature_delta", "signature": UNSIGNED}))
        self._open = None
        return [*frames, _event("content_block_stop", index=self._index)]

    def _delta(self, delta: Fields) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _stop(self, finish_reason: str | None, stop_reason: int | str | None, num_tokens: int) -> Fields:
        """Return ``stop_reason`` and, if one ended it, ``stop_sequence``: some clients refuse null."""
        match finish_reason:
            case "length":
                full = num_tokens < self._max_tokens
                return {"stop_reason": "model_context_window_exceeded" if full else "max_tokens"}
            case "stop" if isinstance(stop_reason, str):
                return {"stop_reason": "stop_sequence", "stop_sequence": stop_reason}
            case "stop" if self._calls:
                return {"stop_reason": "tool_use"}
            case _:
                return {"stop_reason": "end_turn"}

    def _usage(self, num_cached: int, num_output: int) -> Fields:
        """Return the token counts; those of the input are without what was in the prefix cache."""
        found = {"input_tokens": self._num_prompt_tokens - num_cached, "cache_creation_input_tokens": 0}
        return {**found, "cache_read_input_tokens": num_cached, "output_tokens": num_output}

    def _message(
        self, content: list[Fields], ended: Fields, usage: Fields, timeline: list[TimelineEvent] | None
    ) -> Fields:
        fields = {"id": self.request_id, "model": self._model, "content": content, **ended, "usage": usage}
        return {**fields, "type": "message", "role": "assistant", **_timeline(timeline)}


def _timeline(events: list[TimelineEvent] | None) -> Fields:
    return {"timeline": events} if events else {}


def frame(name: str, data: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


def _event(name: str, **fields: Any) -> bytes:
    return frame(name, msgspec.json.encode({"type": name, **fields}))


def _empty_block(part: Part) -> Fields:
    match part.kind:
        case "text":
            return {"type": "text", "text": ""}
        case "thought":
            return {"type": "thinking", "thinking": "", "signature": ""}
        case "call":
            return _tool_use(part, b"{}")


def _block(part: Part) -> Fields:
    match part.kind:
        case "thought":
            return {"type": "thinking", "thinking": part.text, "signature": UNSIGNED}
        case "call" if is_object(part.text):
            return _tool_use(part, part.text.encode())
        case _:
            # Also arguments that were cut off: an input must be an object, and an empty one would be taken for theirs.
            return {"type": "text", "text": part.text}


def _tool_use(part: Part, arguments: bytes) -> Fields:
    call_id = part.id or new_call_id()
    return {"type": "tool_use", "id": call_id, "name": part.name, "input": msgspec.Raw(arguments)}
