"""Server-sent events, and cancellation of work when its client disconnects."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.types import Receive, Send

from quire.frontend.http.schema.errors import ApiError, ClientDisconnected
from quire.frontend.http.serving.outbox import ChunkWriter

SlowWork = Callable[[], Awaitable[None]]
DONE = b"[DONE]"
HEADERS = (
    (b"cache-control", b"no-cache"),
    # nginx would otherwise buffer the stream
    (b"x-accel-buffering", b"no"),
)

# Limits on what a slow reader leaves unsent, beyond the buffers of the kernel. One step makes one write.
MAX_UNSENT_WRITES = 256
MAX_UNSENT_BYTES = 1024 * 1024
# Allowed in any case, for large writes of requests with many sequences: a fast reader is behind by one or two.
MIN_UNSENT_WRITES = 4


@dataclass(frozen=True, slots=True)
class EventStyle:
    """How one API writes its events.

    Attributes:
        frame: the format of an event around its data.
        end: data of an additional last event, or None.
        error: returns the data of an event that ends the stream with an error.
        media_type: of the whole stream.
    """

    frame: bytes = b"data: %b\n\n"
    end: bytes | None = DONE
    error: Callable[[ApiError], bytes] = ApiError.body
    media_type: bytes = b"text/event-stream; charset=utf-8"


DATA_EVENTS = EventStyle()
"""OpenAI's style: events without names, and ``[DONE]`` at the end."""


class SlowReader(Exception):
    """The client reads too slowly: its request is aborted."""


class EventStream:
    """One streamed response. The status line is sent with the first event, so that a refusal before it has its own
    status.

    Nothing waits for a slow reader: unsent data is limited here and nowhere else.
    """

    __slots__ = ("_frame", "_num_unsent_writes", "_request_id", "_send", "_style", "_writer", "started")

    def __init__(
        self, send: Send, request_id: str, writer: ChunkWriter | None, style: EventStyle = DATA_EVENTS
    ) -> None:
        """``writer``: None on a server that has none; each write is then slow work."""
        self._send = send
        self._request_id = request_id
        self._writer = writer
        self._style = style
        self._frame = style.frame
        self.started = False
        self._num_unsent_writes = 0
        """Writes since all was sent."""

    def write(self, events: Sequence[bytes], *, last: bool = False) -> SlowWork | None:
        """Write all events at once. Return what the caller must run before the next write, if anything.

        Raises:
            SlowReader: too much is unsent.
        """
        frame = self._frame
        body = frame % events[0] if len(events) == 1 else b"".join([frame % event for event in events])
        if not body and not last:
            return None
        if self._writer is None or not self.started or last:
            return partial(self._send_part, body, last=last)
        unsent = self._writer.write(body)
        if not unsent:
            self._num_unsent_writes = 1
        elif self._is_behind(unsent + len(body)):
            raise SlowReader
        else:
            self._num_unsent_writes += 1
        return None

    def _is_behind(self, num_bytes: int) -> bool:
        num_writes = self._num_unsent_writes
        return num_writes >= MAX_UNSENT_WRITES or (num_bytes > MAX_UNSENT_BYTES and num_writes >= MIN_UNSENT_WRITES)

    async def fail(self, error: ApiError) -> None:
        """End the started stream with an error as its last event."""
        await self._send_part(self._style.frame % self._style.error(error), last=True)

    async def _send_part(self, body: bytes, *, last: bool) -> None:
        if not self.started:
            self.started = True
            own = (b"content-type", self._style.media_type), (b"x-request-id", self._request_id.encode())
            headers = [*HEADERS, *own]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        elif self._writer is not None:
            self._writer.flush()
        await self._send({"type": "http.response.body", "body": body, "more_body": not last})


async def run_until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run ``work``; cancel it if the client disconnects. The request's body must have been read.

    Raises:
        ClientDisconnected: the client disconnected first.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnected
        await working
    finally:
        watching.cancel()
        working.cancel()
        # Waits for the cleanup of ``work``, which aborts its sequences.
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
