"""Server-sent events, and cancellation of work when its client disconnects."""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive, Send

from quire.launch.http.schema.errors import ApiError, ClientDisconnected

DONE = b"[DONE]"
HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # nginx would otherwise buffer the stream
    (b"x-accel-buffering", b"no"),
)

# Limits on what a slow reader leaves unsent, beyond the buffers of its connection. One step makes one write.
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
    """

    frame: bytes = b"data: %b\n\n"
    end: bytes | None = DONE
    error: Callable[[ApiError], bytes] = ApiError.body


DATA_EVENTS = EventStyle()
"""OpenAI's style: events without names, and ``[DONE]`` at the end."""


class SlowReader(Exception):
    """The client reads too slowly: its request is aborted."""


class EventStream:
    """One streamed response. The status line is sent with the first event, so that a refusal before it has its own
    status.

    A separate task sends the writes, so that a slow reader does not block the caller. Unsent data is limited here and
    nowhere else. A context manager: a normal exit waits until everything is sent.
    """

    def __init__(self, send: Send, request_id: str, style: EventStyle = DATA_EVENTS) -> None:
        self._send = send
        self._request_id = request_id
        self._style = style
        self.started = False
        self._unsent: deque[bytes] = deque()
        self._num_unsent_bytes = 0
        self._ended = False
        self._written = asyncio.Event()
        self._sender: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "EventStream":
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if self._sender is None:
            return
        if kind is not None:
            self._sender.cancel()
        await asyncio.wait((self._sender,))
        if kind is None:
            await self._sender

    async def write(self, events: Sequence[bytes], *, last: bool = False) -> None:
        """Queue all events as one write.

        Raises:
            SlowReader: too much is unsent.
        """
        frame = self._style.frame
        body = b"".join(frame % event for event in events)
        if not body and not last:
            return
        if self._is_behind(len(body)):
            await asyncio.sleep(0)  # the sender may not have run yet
            if self._is_behind(len(body)):
                raise SlowReader
        if not self.started:
            self.started = True
            self._sender = asyncio.ensure_future(self._send_all())
        self._unsent.append(body)
        self._num_unsent_bytes += len(body)
        self._ended = last
        self._written.set()

    async def fail(self, error: ApiError) -> None:
        """End the started stream with an error as its last event."""
        await self.write([self._style.error(error)], last=True)

    def _is_behind(self, num_bytes: int) -> bool:
        num_writes = len(self._unsent)
        too_large = self._num_unsent_bytes + num_bytes > MAX_UNSENT_BYTES and num_writes >= MIN_UNSENT_WRITES
        return num_writes >= MAX_UNSENT_WRITES or too_large

    async def _send_all(self) -> None:
        headers = [*HEADERS, (b"x-request-id", self._request_id.encode())]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        more = True
        while more:
            if not self._unsent:
                self._written.clear()
                await self._written.wait()
            body = self._unsent[0]
            more = len(self._unsent) > 1 or not self._ended
            await self._send({"type": "http.response.body", "body": body, "more_body": more})
            # After the send, because data that waits for the reader counts as unsent.
            self._unsent.popleft()
            self._num_unsent_bytes -= len(body)


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
