"""Server-sent events, and the end of work whose client has gone."""

import asyncio
from collections import deque
from collections.abc import Coroutine, Sequence
from typing import Any

from starlette.types import Receive, Send

from quire.launch.http.schema.errors import ApiError, ClientGone

DONE = b"[DONE]"
HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # nginx would otherwise collect a stream before it passes it on
    (b"x-accel-buffering", b"no"),
)

# What may wait for a reader that is behind, besides what its connection holds. A write is what one step brought.
MAX_UNSENT_WRITES = 256
MAX_UNSENT_BYTES = 1024 * 1024
# Of large writes, by requests with many answers, at least so many: a reader that keeps up is behind by one or two.
MIN_UNSENT_WRITES = 4


class SlowReader(Exception):
    """A client is so far behind that its request was given up."""


class EventStream:
    """One streamed response. Its status line waits for the first event, so that a refusal can still have its own.

    Writes go out in a task of its own, so that a reader that stops does not stop the caller, and what it leaves
    unread is counted here and nowhere else. A context manager: left without an exception, all of it has been sent.
    """

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._request_id = request_id
        self._started = False
        self._unsent: deque[bytes] = deque()
        self._num_unsent_bytes = 0
        self._ended = False
        self._news = asyncio.Event()
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
        """All events in one write, however many there are.

        Raises:
            SlowReader: too much is unsent already.
        """
        body = b"".join(b"data: %b\n\n" % event for event in events)
        if self._is_behind(len(body)):
            await asyncio.sleep(0)  # let the sender run, in case this task did not
            if self._is_behind(len(body)):
                raise SlowReader
        if not self._started:
            self._started = True
            self._sender = asyncio.ensure_future(self._send_all())
        self._unsent.append(body)
        self._num_unsent_bytes += len(body)
        self._ended = last
        self._news.set()

    async def fail(self, error: ApiError) -> None:
        """End with an error: as an event if events are out, else as the whole response."""
        if self._started:
            await self.write([error.body()], last=True)
            return
        response = error.response()
        await self._send({"type": "http.response.start", "status": error.status, "headers": response.raw_headers})
        await self._send({"type": "http.response.body", "body": response.body, "more_body": False})

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
                self._news.clear()
                await self._news.wait()
            body = self._unsent[0]
            more = len(self._unsent) > 1 or not self._ended
            await self._send({"type": "http.response.body", "body": body, "more_body": more})
            # Only now: while it waits for the reader, it counts.
            self._unsent.popleft()
            self._num_unsent_bytes -= len(body)


async def until_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do ``work``, or cancel it as soon as the client goes. The request's body must have been read.

    Raises:
        ClientGone: the client went first.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        await working
    finally:
        watching.cancel()
        working.cancel()
        # Only after this has the work's own clean-up run: its sequences are aborted.
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
