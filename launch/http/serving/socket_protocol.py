"""uvicorn's HTTP protocol, with the bounds that it lacks: on heads, on slow clients, and on how many there are.

Its parser keeps whatever a client sends as headers or trailers, however much and for however long, before the
application sees anything; and what a client does not read is kept until the client goes. Use it as
``uvicorn.Config(app, http=BoundedHttpProtocol, ws="none")``.
"""

import asyncio
import contextlib
import socket
import sys
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from quire.launch.http.schema.errors import ApiError, out_of_memory
from quire.launch.supervision.descriptors import RESERVED_DESCRIPTORS, descriptors_for_clients

# Of a request's scope: it came over a connection beyond the bound, so only what is cheap is answered.
CROWDED = "crowded"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """What one client may take of a server's memory and time before it is cut off. Sizes in bytes, times in seconds.

    Attributes:
        head_bytes: a request line with its headers; also what a body may bring besides itself, as chunk marks and
            trailers do, beyond its own size.
        head_s: until a head is there, counted from the connection's start or the answer before it.
        body_s, body_bytes_per_s: a body has ``body_s`` and a second more for so many bytes that came.
        rest_s: a body that goes on after its answer, such as one that was too large, is read for so long.
        stall_s, stall_bytes: a reader that is behind must take so much in that time.
        linger_s: the same for what is left to be read of a connection that we closed; and how long a client whose
            request was refused may go on sending.
        num_pipelined: requests that may wait for the answer to the one before them.
        send_buffer: what the kernel keeps for one reader (it doubles the figure); left alone, it grows to megabytes.
        connections: beyond them only open routes are answered; ``spare_connections`` further on, nothing is. None: as
            many as there are file descriptors for, whenever that is asked.
        check_s: how often all this is looked at.
    """

    head_bytes: int = 128 * 1024
    head_s: float = 20.0
    body_s: float = 30.0
    body_bytes_per_s: int = 16 * 1024
    rest_s: float = 5.0
    stall_s: float = 30.0
    stall_bytes: int = 4 * 1024
    linger_s: float = 5.0
    num_pipelined: int = 8
    send_buffer: int = 128 * 1024
    connections: int | None = None
    spare_connections: int = RESERVED_DESCRIPTORS // 4
    check_s: float = 1.0

    def max_connections(self) -> int:
        return descriptors_for_clients() if self.connections is None else self.connections


class Phase(Enum):
    """What is awaited of a client."""

    HEAD = 1
    BODY = 2
    ANSWER = 3
    """Nothing: it is our turn."""
    REST = 4
    """The end of a body whose request is answered already."""
    CLOSED = 5
    """That it reads what we said last; what it still sends is dropped."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """Closes a connection whose client sends too much, sends too slowly or does not read; a subclass has other limits.

    One recurring timer per connection looks at all of it, so that no path through uvicorn can leave a timer unset.
    """

    limits: ClassVar[ConnectionLimits] = ConnectionLimits()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._phase = Phase.HEAD
        self._since = self.loop.time()
        self._num_bytes = 0  # of the head that is coming, or of the body
        self._overhead = 0
        self._unread: tuple[float, int] | None = None  # how many bytes waited for a reader that is behind, and when
        self._unfinished: list[RequestResponseCycle] = []  # by age; the first is being answered
        self._timer: asyncio.TimerHandle | None = None

    # ---- callbacks of uvicorn's transport and parser

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections() + self.limits.spare_connections:
            transport.abort()
            return
        self._enter(Phase.HEAD)
        self._check_later()
        with contextlib.suppress(OSError, AttributeError):  # not every transport has a TCP socket
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self.limits.send_buffer)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._phase = Phase.CLOSED
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._tell_gone()

    def data_received(self, data: bytes) -> None:
        before, taken = self._phase, self._num_bytes
        if before is Phase.CLOSED:
            return
        super().data_received(data)
        if self.transport.is_closing() or self._phase is not before:
            return
        # Counted only if these bytes did not complete the head: what follows a head may be any amount of body.
        if before is Phase.HEAD:
            self._num_bytes += len(data)
            if self._num_bytes > self.limits.head_bytes:
                self._refuse(ApiError(431, "the request's headers are too large", None, "headers_too_large"))
        elif before in (Phase.BODY, Phase.REST):
            self._overhead += len(data) - (self._num_bytes - taken)
            if self._overhead > self.limits.head_bytes + self._num_bytes:
                self._refuse(ApiError(400, "the body's chunks are too small, or its trailers too large"))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._phase is not Phase.HEAD:  # with the first byte of a connection, its time has begun already
            self._enter(Phase.HEAD)
        if len(self.connections) > self.limits.max_connections():
            self.scope["state"][CROWDED] = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._phase is Phase.HEAD:  # else a trailer: the application has its headers already
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._enter(Phase.BODY)
        super().on_headers_complete()
        self._unfinished = [cycle for cycle in self._unfinished if not cycle.response_complete]
        self._unfinished.append(self.cycle)
        if len(self.pipeline) > self.limits.num_pipelined:
            raise ValueError("too many requests before the answer to the first")  # the parser's caller refuses it
        if self.pipeline:
            self.flow.resume_reading()  # unread, a connection that ends is not seen to

    def on_body(self, body: bytes) -> None:
        self._num_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        # The answer may have been quicker than the end of the body.
        self._enter(Phase.HEAD if self._phase is Phase.REST else Phase.ANSWER)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if not self.pipeline:  # else what comes in belongs to a later request
            if self._phase is Phase.ANSWER:
                self._enter(Phase.HEAD)
            elif self._phase is Phase.BODY:
                self._enter(Phase.REST)
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        # Called while the parser's error is handled; what a callback of ours raised stands behind it.
        error = sys.exception()
        if error is not None and isinstance(error.__context__, MemoryError):
            self._refuse(out_of_memory())
        else:
            self._refuse(ApiError(400, "this is not HTTP/1.1", None, "invalid_http"))

    # ---- the bounds

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        self._since = self.loop.time()
        self._num_bytes = self._overhead = 0

    def _check_later(self) -> None:
        self._timer = self.loop.call_later(self.limits.check_s, self._check)

    def _check(self) -> None:
        now = self.loop.time()
        self._check_reader(now)
        if self.flow.read_paused:
            self._since = now  # what is late is not the client
        elif not self.transport.is_closing():
            self._check_writer(now)
        self._check_later()

    def _check_reader(self, now: float) -> None:
        """Cut off a client that takes next to nothing of what waits for it."""
        closing = self.transport.is_closing()
        if not closing and not self.flow.write_paused:
            self._unread = None
            return
        size = self.transport.get_write_buffer_size()
        if self._unread is None:
            self._unread = (now, size)
        elif now > self._unread[0] + (self.limits.linger_s if closing else self.limits.stall_s):
            if size > self._unread[1] - self.limits.stall_bytes:
                self.transport.abort()
            self._unread = (now, size)

    def resume_writing(self) -> None:
        self._unread = None  # it has read most of it
        super().resume_writing()

    def _check_writer(self, now: float) -> None:
        """Cut off a client that takes too long to say what it wants."""
        late = now - self._since
        match self._phase:
            case Phase.HEAD if late > self.limits.head_s:
                self.transport.close()
            case Phase.BODY if late > self.limits.body_s + self._num_bytes / self.limits.body_bytes_per_s:
                self._refuse(ApiError(408, "the body did not come in time", None, "request_timeout"))
            case Phase.REST if late > self.limits.rest_s:
                self.transport.close()
            case Phase.CLOSED if late > self.limits.linger_s:
                self.transport.abort()

    def _refuse(self, error: ApiError) -> None:
        """Answer in the application's place where it has not begun to, and read no more.

        The client may still be sending; closed at once, its system would throw the answer away with the connection.
        """
        self._enter(Phase.CLOSED)
        if self.transport.is_closing():
            return
        cycles = self._tell_gone()
        if len(cycles) > 1 or (cycles and cycles[0].response_started):
            self.transport.close()
            return
        body = error.body()
        head = f"HTTP/1.1 {error.status} Refused\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        extra = "".join(f"{name}: {value}\r\n" for name, value in error.headers.items())
        self.transport.write(f"{head}{extra}connection: close\r\n\r\n".encode() + body)
        self.transport.write_eof()

    def _tell_gone(self) -> list[RequestResponseCycle]:
        """Mark all requests of this connection as disconnected; uvicorn marks the youngest only.

        Returns:
            those that were not answered.
        """
        cycles = [cycle for cycle in self._unfinished if not cycle.response_complete]
        for cycle in cycles:
            cycle.disconnected = True
            cycle.message_event.set()
        return cycles
