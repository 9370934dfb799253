"""Answers in the form of Anthropic's Messages API: one object, or a stream of named events."""

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from quire.frontend.engine.answers import OutputDelta
from quire.frontend.http.dialects.messages_body import MessagesRequest
from quire.frontend.http.dialects.parts import Dropped, Part, read_parts, whole_parts
from quire.frontend.http.routes.conversation import AnswerReader, tool_of
from quire.frontend.http.routes.formatter import Collected, Usage
from quire.frontend.http.routes.tool_calls import new_call_id
from quire.frontend.http.serving.sse import EventStyle
from quire.protocol.wire.timeline import TimelineEvent

UNSIGNED = "unsigned"
"""Signature of a thought. Clients refuse or drop a thought without one; this server needs none."""


class MessageUsage(msgspec.Struct, frozen=True):
    """``input_tokens`` are those of the prompt that were not in the prefix cache."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class TextBlock(msgspec.Struct, frozen=True, tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, frozen=True, tag="thinking"):
    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, frozen=True, tag="tool_use"):
    id: str
    name: str
    input: msgspec.Raw


Block = TextBlock | ThinkingBlock | ToolUseBlock


class AnthropicMessage(msgspec.Struct, frozen=True):
    id: str
    model: str
    content: list[Block]
    stop_reason: str | UnsetType
    stop_sequence: str | UnsetType
    usage: MessageUsage
    type: str = "message"
    role: str = "assistant"
    timeline: list[TimelineEvent] | UnsetType = UNSET


class MessageStart(msgspec.Struct, frozen=True, tag="message_start"):
    message: AnthropicMessage


class BlockStart(msgspec.Struct, frozen=True, tag="content_block_start"):
    index: int
    content_block: Block


class TextDelta(msgspec.Struct, frozen=True, tag="text_delta"):
    text: str


class ThinkingDelta(msgspec.Struct, frozen=True, tag="thinking_delta"):
    thinking: str


class SignatureDelta(msgspec.Struct, frozen=True, tag="signature_delta"):
    signature: str


class InputDelta(msgspec.Struct, frozen=True, tag="input_json_delta"):
    partial_json: str


class BlockDelta(msgspec.Struct, frozen=True, tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockStop(msgspec.Struct, frozen=True, tag="content_block_stop"):
    index: int


class StopFields(msgspec.Struct, frozen=True):
    stop_reason: str
    stop_sequence: str | UnsetType


class MessageDelta(msgspec.Struct, frozen=True, tag="message_delta"):
    delta: StopFields
    usage: MessageUsage
    timeline: list[TimelineEvent] | UnsetType = UNSET


class MessageStop(msgspec.Struct, frozen=True, tag="message_stop"):
    pass


class MessageFormatter:
    """Formats the one answer of a request. A stream has one open block at a time."""

    def __init__(self, request: MessagesRequest, num_prompt_tokens: int, reader: AnswerReader, request_id: str) -> None:
        self.request_id = request_id
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
            message = self._message([], UNSET, UNSET, self._usage(delta.num_cached_tokens, 0))
            frames.append(_event("message_start", MessageStart(message)))
        last = delta.finish_reason is not None
        for part in read_parts(self._reader.push(delta.text, last=last)):
            frames += self._add(part)
        if last:
            frames += self._close()
            reason, sequence = self._stop(delta.finish_reason, delta.stop_reason, delta.num_output_tokens)
            counts = self._usage(delta.num_cached_tokens, delta.num_output_tokens)
            ended = MessageDelta(StopFields(reason, sequence), counts, delta.timeline or UNSET)
            frames.append(_event("message_delta", ended))
            frames.append(_event("message_stop", MessageStop()))
        return b"".join(frames)

    def usage_event(self, usage: Usage) -> bytes:
        return b""  # message_delta has it

    def tool(self, index: int) -> str:
        return tool_of(self._reader)

    def response(self, answers: Sequence[Collected], usage: Usage) -> bytes:
        (answer,) = answers
        parts = whole_parts(self._reader.push("".join(answer.texts), last=True))
        self._calls = {part.index for part in parts if part.kind == "call"}
        reason, sequence = self._stop(answer.finish_reason, answer.stop_reason, usage.completion_tokens)
        counts = self._usage(usage.prompt_tokens_details.cached_tokens, usage.completion_tokens)
        message = self._message([_block(part) for part in parts if part.text], reason, sequence, counts)
        return msgspec.json.encode(msgspec.structs.replace(message, timeline=answer.timeline or UNSET))

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
            frames.append(_event("content_block_start", BlockStart(self._index, _empty_block(part))))
        self._open = part
        if part.text:
            frames.append(_event("content_block_delta", BlockDelta(self._index, _delta(part))))
        return frames

    def _close(self) -> list[bytes]:
        """Return the events that end the open block."""
        if self._open is None:
            return []
        frames: list[bytes] = []
        if self._open.kind == "thought":
            frames.append(_event("content_block_delta", BlockDelta(self._index, SignatureDelta(UNSIGNED))))
        self._open = None
        return [*frames, _event("content_block_stop", BlockStop(self._index))]

    def _stop(
        self, finish_reason: str | None, stop_reason: int | str | None, num_tokens: int
    ) -> tuple[str, str | UnsetType]:
        """Return ``stop_reason`` and ``stop_sequence``: left out, as some clients refuse null."""
        match finish_reason:
            case "length":
                full = num_tokens < self._max_tokens
                return "model_context_window_exceeded" if full else "max_tokens", UNSET
            case "stop" if isinstance(stop_reason, str):
                return "stop_sequence", stop_reason
            case "stop" if self._calls:
                return "tool_use", UNSET
            case _:
                return "end_turn", UNSET

    def _usage(self, num_cached: int, num_output: int) -> MessageUsage:
        return MessageUsage(self._num_prompt_tokens - num_cached, 0, num_cached, num_output)

    def _message(
        self, content: list[Block], reason: str | UnsetType, sequence: str | UnsetType, usage: MessageUsage
    ) -> AnthropicMessage:
        return AnthropicMessage(self.request_id, self._model, content, reason, sequence, usage)


def frame(name: str, data: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


def _event(name: str, event: msgspec.Struct) -> bytes:
    return frame(name, msgspec.json.encode(event))


def _empty_block(part: Part) -> Block:
    match part.kind:
        case "text":
            return TextBlock("")
        case "thought":
            return ThinkingBlock("", "")
        case "call":
            return ToolUseBlock(part.id or new_call_id(), part.name, msgspec.Raw(b"{}"))


def _delta(part: Part) -> TextDelta | ThinkingDelta | InputDelta:
    match part.kind:
        case "text":
            return TextDelta(part.text)
        case "thought":
            return ThinkingDelta(part.text)
        case "call":
            return InputDelta(part.text)


def _block(part: Part) -> Block:
    match part.kind:
        case "text":
            return TextBlock(part.text)
        case "thought":
            return ThinkingBlock(part.text, UNSIGNED)
        case "call" if _is_object(part.text):
            return ToolUseBlock(part.id or new_call_id(), part.name, msgspec.Raw(part.text.encode()))
        case "call":
            # Arguments that were cut off. An input must be an object, and an empty one would be taken for the call's.
            return TextBlock(part.text)


def _is_object(text: str) -> bool:
    try:
        found: Any = msgspec.json.decode(text)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return False
    return isinstance(found, dict)
