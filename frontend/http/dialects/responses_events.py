"""Answers in the form of the Responses API: one object, or a stream of events."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.frontend.engine.answers import OutputDelta, PlacedLogprobs
from quire.frontend.http.dialects.chat_fields import renamed
from quire.frontend.http.dialects.parts import Dropped, Part, read_parts, whole_parts
from quire.frontend.http.dialects.responses_body import SEALED_THOUGHTS, ResponsesRequest
from quire.frontend.http.dialects.responses_items import OpenItem, new_item
from quire.frontend.http.routes.chat import format_logprobs
from quire.frontend.http.routes.conversation import AnswerReader, TokenReader, encode_conversation
from quire.frontend.http.routes.formatter import Collected, ResponseFormatter, Usage
from quire.frontend.http.schema.errors import TYPE_OF_STATUS, ApiError
from quire.frontend.http.serving.server import Server
from quire.frontend.http.serving.sse import EventStyle
from quire.frontend.sessions.open_session import OpenSession
from quire.frontend.text.prompts import Prompt
from quire.protocol.errors import InvalidRequest

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


async def encode_request(
    server: Server, parsed: ResponsesRequest, num_body_bytes: int, so_far: OpenSession | None = None
) -> tuple[Prompt, Callable[[], AnswerReader]]:
    """Return the prompt, and what makes the reader of its answer. ``so_far``: as of ``encode_conversation``."""
    size = num_body_bytes + sum(map(len, parsed.before))
    try:
        return await encode_conversation(server, parsed.chat, size, so_far=so_far)
    except InvalidRequest as error:
        raise renamed(error, {"messages": "input"}, ()) from None


class ResponsesFormatter(ResponseFormatter):
    """Formats the one answer of a request. The answer's items are finished one after the other."""

    def __init__(
        self,
        server: Server,
        request: ResponsesRequest,
        prompt: Prompt,
        reader: AnswerReader,
        transport: EventFraming = SSE,
        *,
        store: Store | None = None,
        response_id: str = "",
        created: int = 0,
    ) -> None:
        """``store``: stores the response; ``response_id``, ``created``: of one that an earlier process has begun."""
        super().__init__(response_id or server.new_id("resp_"), [reader])
        self.style = EventStyle(b"%b", transport.end, self.failed)
        self._transport = transport
        self._request = request
        self._num_prompt_tokens = len(prompt.token_ids)
        self._reader = TokenReader(reader)
        self._server = server
        self._store = store
        self._created = created or int(time.time())
        self._number = 0
        """Number of the next event."""
        self._status = ""
        self._frames: list[bytes] | None = []
        """Events that are not yet returned; None if the response is not streamed."""
        self.output: list[dict[str, Any]] = []
        """Finished items."""
        self._open: OpenItem | None = None
        self._last: Part | None = None
        self._waiting: list[PlacedLogprobs] = []
        """Log probabilities of tokens whose text is not sent yet; those of thoughts and calls are left out."""

    def begin(self, status: str) -> None:
        """Begin a response. ``status``: in_progress, or queued in the background."""
        self._status, response = status, self._response(status, None)
        if not self._number:
            self._emit("response.created", response=response)
        self._emit(f"response.{status}", response=response)

    def event(self, index: int, delta: OutputDelta, usage: Usage | None) -> bytes:
        if self._status != "in_progress":
            self.begin("in_progress")
        last = delta.finish_reason is not None
        events = self._reader.push(delta.texts or (delta.text,), last=last)
        self._waiting += (delta.logprobs or [])[: -1 if delta.has_end_token else None]
        for part in read_parts(events) if self._request.body.generate else ():
            self._add(part)
        if last:
            response = self._finish(delta, delta.num_cached_tokens, delta.num_output_tokens)
            self._emit(f"response.{response['status']}", response=response)
        return self._take_frames()

    def response(self, answers: Sequence[Collected], usage: Usage) -> bytes:
        (answer,) = answers
        self._frames = None
        parts = whole_parts(self._reader.push(answer.texts, last=True)) if self._request.body.generate else []
        if len(parts) == 1:
            # The token that ends the answer has no text.
            self._waiting = [each for each in answer.logprobs or () if each.text_offset < len(parts[0].text)]
        for part in parts:
            self._add(part)
        num_cached = usage.prompt_tokens_details.cached_tokens
        return msgspec.json.encode(self._finish(answer, num_cached, usage.completion_tokens))

    def _add(self, part: Part | Dropped) -> None:
        """Add a part to the open item, or open one for it."""
        if isinstance(part, Dropped):
            self._close("incomplete")
            return
        if not part.continues(self._last) or self._open is None:
            self._close("completed")
            tool, seals = self._request.tools.name(part.name), SEALED_THOUGHTS in (self._request.body.include or ())
            self._open = new_item(part, tool, seals, self.request_id, len(self.output))
            self._emit_all(self._open.begin())
        self._last = part
        logprobs = format_logprobs(self._waiting, self._server.token_texts).content if part.kind == "text" else []
        self._waiting = []
        self._emit_all(self._open.add(part.text, logprobs))

    def _close(self, status: str) -> None:
        if self._open is not None:
            self._emit_all(self._open.end(status))
            self.output.append(self._open.item)
            self._open = None

    def _finish(self, answer: OutputDelta | Collected, num_cached: int, num_output: int) -> dict[str, Any]:
        """End the answer, store it if the client asked for that, and return the response."""
        status = "incomplete" if answer.finish_reason == "length" and self._request.body.generate else "completed"
        self._close(status)
        usage = token_counts(self._num_prompt_tokens, num_cached, num_output, self._reader.num_thought_tokens)
        response = self._response(status, usage) | ({"timeline": answer.timeline} if answer.timeline else {})
        if self._store is not None:
            self._store(self.request_id, msgspec.json.encode(response), self.output)
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
            "output": list(self.output),
            "store": self._request.is_stored and self._server.response_store.is_enabled,
            "usage": usage,
            **self._request.echo,
        }

    def cancelled(self) -> None:
        """End a response that its client has cancelled."""
        self._close("incomplete")
        self._emit("response.cancelled", response=self._response("cancelled", None))

    def failed(self, error: ApiError) -> bytes:
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
        for kind, fields in events:
            self._emit(kind, output_index=len(self.output), **fields)

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
