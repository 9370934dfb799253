"""Server-sent events, and noticing that nobody listens any more."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from starlette.types import Receive, Send

from quire.launch.http.errors import ApiError, ClientGone

DONE = b"[DONE]"
HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # nginx would otherwise collect a stream before it passes it on
    (b"x-accel-buffering", b"no"),
)


class EventStream:
    """One streamed response. Its status line waits for the first event, so that a refusal can still have its own."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._request_id = request_id
        self._started = False

    async def write(self, events: Sequence[bytes], *, last: bool = False) -> None:
        """All events in one write, however many there are."""
        if not self._started:
            self._started = True
            headers = [*HEADERS, (b"x-request-id", self._request_id.encode())]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        body = b"".join(b"data: %b\n\n" % event for event in events)
        await self._send({"type": "http.response.body", "body": body, "more_body": not last})

    async def fail(self, error: ApiError) -> None:
        """End with an error: as an event if events are out, else as the whole response."""
        if self._started:
            await self.write([error.body()], last=True)
            return
        response = error.response()
        await self._send({"type": "http.response.start", "status": error.status, "headers": response.raw_headers})
        await self._send({"type": "http.response.body", "body": response.body, "more_body": False})


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
