"""uvicorn's HTTP protocol, with the bounds that it lacks on a request's head.

Its parser keeps whatever a client sends as headers, however much and for however long, before the application sees
anything. Use it as ``uvicorn.Config(app, http=BoundedHttpProtocol)``.
"""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from quire.launch.http.errors import ApiError

MAX_HEAD_BYTES = 128 * 1024
HEAD_TIMEOUT_S = 20.0


class BoundedHttpProtocol(HttpToolsProtocol):
    """Closes a connection whose request line and headers are too large, or not there in time."""

    _head_bytes = 0
    _head_complete = False
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begin_head()

    def on_headers_complete(self) -> None:
        self._end_head()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # Counted only if these bytes did not complete the head: what follows a head may be any amount of body.
        if not self._head_complete and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(ApiError(431, "the request's headers are too large", None, "headers_too_large"), "431")

    def _begin_head(self) -> None:
        self._end_head()
        self._head_complete = False
        self._head_bytes = 0
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._give_up)

    def _end_head(self) -> None:
        self._head_complete = True
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()

    def _refuse(self, error: ApiError, status: str) -> None:
        body = error.body()
        head = f"HTTP/1.1 {status} Refused\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self.transport.close()
