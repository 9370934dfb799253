"""Answers in the form of the Responses API: one object, or a stream of events."""

import random
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
        *,
        response_id: str = "",
        created: int = 0,
    ) -> None:
        """``response_id``, ``created``: of a response that an earlier process has begun."""
        super().__init__(response_id or server.new_id("resp_"))
        self.style = EventStyle(b"%b", transport.end, self.failed)
        self._transport = transport
        self._request = request
        self._num_prompt_tokens = num_prompt_tokens
        self._reader = TokenReader(reader)
        self._server = server
        self._store = store
        self._created = created or int(time.time())
        self._random = random.Random(self.request_id)  # the ids of items are the same in each process
        self._number = 0
        """Number of the next event."""
        self._has_begun = False
        self._frames: list[bytes] | None = []
        """Events that are not yet returned; None if the response is not streamed."""
        self._output: list[dict[str, Any]] = []
        """Finished items."""
        self._open: OpenItem | None = None
        self._last: Part | None = None
        self._waiting: list[PlacedLogprobs] = []
        """Log probabilities of tokens whose text is not sent yet; those of thoughts and calls are left out."""

    def queue(self) -> None:
        """Begin a response that runs in the background."""
        response = self._response("queued", None)
        self._emit("response.created", response=response)
        self._emit("response.queued", response=response)

    def event(self, index: int, delta: OutputDelta, usage: Usage | None) -> bytes:
        if not self._has_begun:
            self._has_begun = True
            response = self._response("in_progress", None)
            if not self._number:
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
            self._open = new_item(part, tool, self._request.seals_thoughts, self._new_id)
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

    def _new_id(self, prefix: str) -> str:
        """Return an id whose end has the number of the front end, as that of the response."""
        return f"{prefix}{self._random.getrandbits(120):030x}{self.request_id[-2:]}"

    @property
    def output(self) -> list[dict[str, Any]]:
        """The items that are complete."""
        return self._output

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
