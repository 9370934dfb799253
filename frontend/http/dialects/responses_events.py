"""Answers in the form of the Responses API: one object, or a stream of events."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.frontend.engine.answers import OutputDelta, PlacedLogprobs
from quire.frontend.http.dialects.parts import Dropped, Part, read_parts, whole_parts
from quire.frontend.http.dialects.responses_body import ResponsesRequest
from quire.frontend.http.dialects.responses_items import OpenItem, new_item
from quire.frontend.http.routes.chat import format_logprobs
from quire.frontend.http.routes.conversation import AnswerReader, TokenReader, tool_of
from quire.frontend.http.routes.formatter import Collected, ResponseFormatter, Usage
from quire.frontend.http.schema.errors import TYPE_OF_STATUS, ApiError
from quire.frontend.http.serving.server import Server
from quire.frontend.http.serving.sse import EventStyle

Store = Callable[[str, bytes, Sequence[dict[str, Any]]], None]
"""Stores a response, given its id, itself as JSON, and its output items."""


@dataclass(frozen=True, slots=True)
class EventFraming:
    """How events are sent.

    Attributes:
        framed: returns the bytes of one event, given its type and its JSON.
        end: bytes after the last event, or None.
        error: returns the JSON of the event that is the only one of a failure, given its number; None: the failure has
            OpenAI's two events.
    """

    framed: Callable[[str, bytes], bytes]
    end: bytes | None = None
    error: Callable[[ApiError, int], bytes] | None = None


SSE = EventFraming(lambda kind, data: b"event: %b\ndata: %b\n\n" % (kind.encode(), data), b"data: [DONE]\n\n")


class ResponsesFormatter(ResponseFormatter):
    """Formats the one answer of a request. The answer's items are finished one after the other."""

    def __init__(
        self,
        server: Server,
        request: ResponsesRequest,
        num_prompt_tokens: int,
        reader: AnswerReader,
        store: Store | None,
        transport: EventFraming = SSE,
    ) -> None:
        super().__init__(server.new_id("resp_"))
        self.style = EventStyle(b"%b", transport.end, self._failed)
        self._transport = transport
        self._request = request
        self._num_prompt_tokens = num_prompt_tokens
        self._reader = TokenReader(reader)
        self._server = server
        self._store = store
        self._created = int(time.time())
        self._number = 0
        """Number of the next event."""
        self._frames: list[bytes] | None = []
        """Events that are not yet returned; None if the response is not streamed."""
        self._output: list[dict[str, Any]] = []
        """Finished items."""
        self._open: OpenItem | None = None
        self._last: Part | None = None
        self._waiting: list[PlacedLogprobs] = []
        """Log probabilities of tokens whose text is not sent yet; those of thoughts and calls are left out."""

    def event(self, index: int, delta: OutputDelta, usage: Usage | None) -> bytes:
        if not self._number:
            response = self._response("in_progress", None)
            self._emit("response.created", response=response)
            self._emit("response.in_progress", response=response)
        last = delta.finish_reason is not None
        events = self._reader.push(delta.texts or (delta.text,), last=last)
        parts = read_parts(events) if self._request.generate else []
        self._waiting += (delta.logprobs or [])[: -1 if delta.has_end_token else None]
        for part in parts:
            self._add(part)
        if last:
            counts = token_counts(
                self._num_prompt_tokens,
                delta.num_cached_tokens,
                delta.num_output_tokens,
                self._reader.num_thought_tokens,
            )
            response = self._finish(delta, counts)
            self._emit(f"response.{response['status']}", response=response)
        return self._take_frames()

    def tool(self, index: int) -> str:
        return tool_of(self._reader.reader)

    def response(self, answers: Sequence[Collected], usage: Usage) -> bytes:
        (answer,) = answers
        self._frames = None
        parts = whole_parts(self._reader.push(answer.texts, last=True)) if self._request.generate else []
        if len(parts) == 1:
            # The token that ends the answer has no text.
            self._waiting = [each for each in answer.logprobs or () if each.text_offset < len(parts[0].text)]
        for part in parts:
            self._add(part)
        cached, num_output = usage.prompt_tokens_details.cached_tokens, usage.completion_tokens
        counts = token_counts(self._num_prompt_tokens, cached, num_output, self._reader.num_thought_tokens)
        return msgspec.json.encode(self._finish(answer, counts))

    def _add(self, part: Part | Dropped) -> None:
        """Add a part to the open item, or open one for it."""
        if isinstance(part, Dropped):
            self._close("incomplete")
            return
        if not part.continues(self._last) or self._open is None:
            self._close("completed")
            tool = self._request.tools.name(part.name)
            self._open = new_item(part, tool, self._request.seals_thoughts, self._server.new_id)
            self._emit_all(self._open.begin())
        self._last = part
        logprobs = format_logprobs(self._waiting, self._server.token_texts).content if part.kind == "text" else []
        self._waiting = []
        self._emit_all(self._open.add(part.text, logprobs))

    def _close(self, status: str) -> None:
        if self._open is not None:
            self._emit_all(self._open.end(status))
            self._output.append(self._open.item)
            self._open = None

    def _finish(self, answer: OutputDelta | Collected, usage: dict[str, Any]) -> dict[str, Any]:
        """End the answer, store it if the client asked for that, and return the response."""
        status = "incomplete" if answer.finish_reason == "length" and self._request.generate else "completed"
        self._close(status)
        response = self._response(status, usage) | ({"timeline": answer.timeline} if answer.timeline else {})
        if self._store is not None:
            self._store(self.request_id, msgspec.json.encode(response), self._output)
        return response

    def _response(self, status: str, usage: dict[str, Any] | None) -> dict[str, Any]:
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self.request_id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": cut,
            "model": self._request.chat.model,
            "output": list(self._output),
            "store": self._request.store and self._server.response_store.is_enabled,
            "usage": usage,
            **self._request.echo,
        }

    def _failed(self, error: ApiError) -> bytes:
        """Return the events that end a stream with an error."""
        if self._transport.error is not None:
            return self._transport.framed("error", self._transport.error(error, self._number))
        code = error.code or "server_error"
        # OpenAI has these fields in the event itself, Open Responses in its error.
        fields = {"code": code, "message": error.message, "param": error.param}
        self._emit("error", **fields, error={"type": TYPE_OF_STATUS.get(error.status, "server_error"), **fields})
        response = self._response("failed", None) | {"error": {"code": code, "message": error.message}}
        self._emit("response.failed", response=response)
        return self._take_frames()

    def _emit(self, kind: str, **fields: Any) -> None:
        if self._frames is not None:
            data = msgspec.json.encode({"type": kind, "sequence_number": self._number, **fields})
            self._frames.append(self._transport.framed(kind, data))
            self._number += 1

    def _emit_all(self, events: Sequence[tuple[str, dict[str, Any]]]) -> None:
        if self._frames is not None:
            for kind, fields in events:
                self._emit(kind, output_index=len(self._output), **fields)

    def _take_frames(self) -> bytes:
        assert self._frames is not None
        frames = b"".join(self._frames)
        self._frames.clear()
        return frames


def token_counts(num_prompt: int, num_cached: int, num_output: int, num_thought: int) -> dict[str, Any]:
    """Return the usage of a response."""
    return {
        "input_tokens": num_prompt,
        "input_tokens_details": {"cached_tokens": num_cached, "cache_write_tokens": 0},
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": min(num_thought, num_output)},
        "total_tokens": num_prompt + num_output,
    }
