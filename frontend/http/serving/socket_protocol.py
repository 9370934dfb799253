"""uvicorn's HTTP protocol with limits on request heads, slow clients, and the number of connections.

uvicorn's parser buffers headers and trailers without a limit on size or time, before the application sees the
request. Output that a client does not read is buffered until the client disconnects. Use as
``uvicorn.Config(app, http=BoundedHttpProtocol, ws="none")``: web sockets begin as HTTP requests (``Upgrade``), so that
all checks of requests hold for them, too.
"""

import asyncio
import contextlib
import socket
import sys
from enum import Enum
from functools import partial
from typing import Any, ClassVar

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from quire.frontend.http.schema.errors import ApiError, out_of_memory
from quire.frontend.http.serving.connections import ConnectionLimits, Connections, client_of
from quire.frontend.http.serving.outbox import ChunkWriter, Outbox, without_chunks
from quire.frontend.http.serving.request_heads import InvalidHead, check_head, is_handshake

# Keys of the request's state. The connection exceeds the limit on connections, so only open routes are served:
TOO_MANY_CONNECTIONS = "too_many_connections"
# The client, as ``connections.client_of`` returns it:
CLIENT = "client"
# The ``Upgrade`` of a request that asks for a web socket:
UPGRADE = "upgrade"
# The ``ChunkWriter`` of the response:
WRITER = "writer"


class Phase(Enum):
    """What the client has to send next."""

    HEAD = 1
    BODY = 2
    ANSWER = 3
    """Nothing: the server has to respond."""
    REST = 4
    """The rest of a body whose response is complete."""
    REFUSED = 5
    """Nothing: one request too many is refused after the responses to the earlier ones."""
    SOCKET = 6
    """Frames of a web socket, which the application reads and limits."""
    CLOSED = 7
    """Nothing: the client should read the last response, and what it sends is dropped."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """Closes connections of clients that send too much, send too slowly or do not read. Tests subclass it for other
    limits.

    ``check``, called regularly while the connection is open, checks all limits, so that no path through uvicorn can
    forget to set a timer.
    """

    limits: ClassVar[ConnectionLimits] = ConnectionLimits()

    def __init__(
        self, *args: Any, counted: Connections | None = None, outbox: Outbox | None = None, **kwargs: Any
    ) -> None:
        """``counted``, ``outbox``: of the connections of this server; None: this connection is the only one."""
        super().__init__(*args, **kwargs)
        self._outbox = outbox or Outbox()
        self._counted = counted or Connections(self.limits)
        self._is_counted = False
        self.client_id = ""
        self._phase = Phase.HEAD
        self._since = self.loop.time()
        self._num_bytes = 0  # received of the current head or body
        self._num_bytes_before = 0  # of the body at time ``_since``
        self._overhead = 0
        self._unread: tuple[float, int] | None = None  # (time, bytes) at a slow reader's last progress
        self._unfinished: list[RequestResponseCycle] = []  # oldest first, which is the one being served

    # ---- callbacks of uvicorn's transport and parser

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections() + self.limits.spare_connections:
            transport.abort()
            return
        self.client_id = client_of(transport.get_extra_info("peername"))
        self._is_counted = self._counted.add(self)
        self._enter(Phase.HEAD)
        self._counted.watch(self)
        with contextlib.suppress(OSError, AttributeError):  # the transport may have no TCP socket
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self.limits.send_buffer)

    def evict(self) -> None:
        self._is_counted = False
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._is_counted:
            self._is_counted = False
            self._counted.remove(self)
        self._counted.unwatch(self)
        self._phase = Phase.CLOSED
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._disconnect_cycles()

    def data_received(self, data: bytes) -> None:
        before, num_bytes_before = self._phase, self._num_bytes
        if before is Phase.CLOSED:
            return
        if before is Phase.REFUSED:
            self._num_bytes += len(data)
            if self._num_bytes > self.limits.head_bytes:
                self.transport.abort()
            return
        if before is Phase.SOCKET:
            self._receive_frames(data)
            return
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except HttpParserError as error:
            self.send_400_response(str(error))
        if self.transport.is_closing() or self._phase is not before:
            return
        # Not counted if these bytes complete the head: they may contain any amount of the body.
        if before is Phase.HEAD:
            self._num_bytes += len(data)
            if self._num_bytes > self.limits.head_bytes:
                self._refuse(ApiError(431, "request headers too large", None, "headers_too_large"))
        elif before in (Phase.BODY, Phase.REST):
            self._overhead += len(data) - (self._num_bytes - num_bytes_before)
            if self._overhead > self.limits.head_bytes + self._num_bytes:
                self._refuse(ApiError(400, "request body chunks too small or trailers too large"))

    def _parse(self, data: bytes) -> None:
        """Read requests; one that asks for another protocol than a web socket is read like any other.

        The parser ends HTTP after the head of such a request, so that its body would be the next request. It gets the
        head again, without ``Upgrade`` and as it has read it, because another reader of heads could disagree with it.
        """
        while data:
            if self._phase is Phase.ANSWER and UPGRADE in self.scope["state"]:
                self._refuse(ApiError(400, "a web socket must not be used before it is accepted", None, "invalid_http"))
                return
            try:
                self.parser.feed_data(data)
                return
            except HttpParserUpgrade as ended:
                data = data[ended.args[0] :]
            if UPGRADE not in self.scope["state"]:
                version = self.parser.get_http_version().encode()
                fields = [b"%b: %b\r\n" % field for field in self.headers if field[0] != b"upgrade"]
                first = b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, version)
                data = b"".join((first, *fields, b"\r\n", data))
                self.parser = HttpRequestParser(self)  # the old one reads nothing after ``Connection: close``
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._phase is not Phase.HEAD:  # else the first request, timed from the start of the connection
            self._enter(Phase.HEAD)
        if not self._is_counted:
            self._is_counted = self._counted.add(self)  # there may be room by now
        self.scope["state"][TOO_MANY_CONNECTIONS] = not self._is_counted
        self.scope["state"][CLIENT] = self.client_id

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._phase is Phase.HEAD:  # else a trailer, after the application got its headers
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        head = self.parser.get_method(), self.parser.get_http_version(), self.headers
        check_head(*head)
        upgrades = self.parser.should_upgrade() and is_handshake(*head) and self._is_answered
        if self.parser.should_upgrade() and not upgrades:
            return  # the head comes again
        self._enter(Phase.BODY)
        self.expect_100_continue &= head[1] != "1.0"
        super().on_headers_complete()
        self._unfinished = [cycle for cycle in self._unfinished if not cycle.response_complete]
        self._unfinished.append(self.cycle)
        if len(self.pipeline) > self.limits.num_pipelined:
            self.pipeline[0] = (self.cycle, self._refuse_pipelined)  # responds after the earlier ones
            self._enter(Phase.REFUSED)
            raise InvalidHead  # ends the parsing
        if self.pipeline:
            self.flow.resume_reading()  # a paused connection would not notice that its client closes it
        if upgrades:
            self.scope["state"][UPGRADE] = Upgrade(self, self.cycle)
        elif self.scope["http_version"] != "1.0":
            self.scope["state"][WRITER] = ChunkWriter(self.transport, self._outbox)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        is_old = cycle.scope["http_version"] == "1.0"
        super()._start_asgi_task(cycle, partial(without_chunks, cycle, app) if is_old else app)

    def on_body(self, body: bytes) -> None:
        self._num_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade() and UPGRADE not in self.scope["state"]:
            return
        # The response may have been sent before the end of the body.
        self._enter(Phase.HEAD if self._phase is Phase.REST else Phase.ANSWER)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if not self.pipeline:  # else the phase is that of a later request
            if self._phase is Phase.ANSWER:
                self._enter(Phase.HEAD)
            elif self._phase is Phase.BODY:
                self._enter(Phase.REST)
        super().on_response_complete()

    def _receive_frames(self, data: bytes) -> None:
        self.cycle.body += data
        if len(self.cycle.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        self.cycle.message_event.set()

    def shutdown(self) -> None:
        super().shutdown()
        if self._phase is Phase.SOCKET:
            self.scope["state"][UPGRADE].is_shutting_down = True
            self.cycle.message_event.set()

    async def _refuse_pipelined(self, *asgi: Any) -> None:
        limit = self.limits.num_pipelined
        self._refuse(ApiError(400, f"at most {limit} pipelined requests may wait for a response", None, "invalid_http"))

    def send_400_response(self, msg: str) -> None:
        if self._phase is Phase.REFUSED:
            return
        # Called in the handler of the parser's error, whose context is the exception that a callback raised.
        error = sys.exception()
        cause = None if error is None else error.__context__
        if isinstance(cause, MemoryError):
            self._refuse(out_of_memory())
        else:
            text = str(cause) if isinstance(cause, InvalidHead) else "invalid HTTP/1.1 request"
            self._refuse(ApiError(400, text, None, "invalid_http"))

    # ---- limits

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        self.set_idle(phase is Phase.HEAD and self._is_answered)
        self._since = self.loop.time()
        self._num_bytes = self._num_bytes_before = self._overhead = 0

    @property
    def _is_answered(self) -> bool:
        """Whether the newest request has its complete response, or there was none."""
        return self.cycle is None or self.cycle.response_complete

    def set_idle(self, is_idle: bool) -> None:
        if self._is_counted:
            self._counted.set_idle(self, is_idle)

    def check(self, now: float) -> None:
        self._check_reader(now)
        if self.flow.read_paused or self.pipeline or (self._phase is Phase.HEAD and not self._is_answered):
            # The server does not read, or the client waits for the response to an earlier request: it is not late.
            self._since, self._num_bytes_before = now, self._num_bytes
        elif not self.transport.is_closing():
            self._check_writer(now)

    def _check_reader(self, now: float) -> None:
        """Abort the connection of a client that reads too slowly."""
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
        self._unread = None  # the client has read most of it
        super().resume_writing()

    def _check_writer(self, now: float) -> None:
        """Close the connection of a client that sends its request too slowly."""
        late = now - self._since
        match self._phase:
            case Phase.HEAD if late > self.limits.head_s:
                self.transport.close()
            case Phase.BODY if late > self.limits.body_s:
                if self._num_bytes - self._num_bytes_before < self.limits.body_s * self.limits.body_bytes_per_s:
                    self._refuse(ApiError(408, "request body timed out", None, "request_timeout"))
                self._since, self._num_bytes_before = self.loop.time(), self._num_bytes
            case Phase.REST if late > self.limits.rest_s:
                self.transport.close()
            case Phase.CLOSED if late > self.limits.linger_s:
                self.transport.abort()

    def _refuse(self, error: ApiError) -> None:
        """Send an error, unless the application's response has started, and stop reading.

        The client may still be sending. If the connection were closed at once, the client's kernel would discard the
        response together with the connection.
        """
        self._enter(Phase.CLOSED)
        if self.transport.is_closing():
            return
        cycles = self._disconnect_cycles()
        if len(cycles) > 1 or (cycles and cycles[0].response_started):
            self.transport.close()
            return
        body = error.body()
        head = f"HTTP/1.1 {error.status} Refused\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        extra = "".join(f"{name}: {value}\r\n" for name, value in (*self.config.headers, *error.headers.items()))
        self.transport.write(f"{head}{extra}connection: close\r\n\r\n".encode() + body)
        self._end_writing()

    def _end_writing(self) -> None:
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:  # TLS
            self.transport.close()

    def _disconnect_cycles(self) -> list[RequestResponseCycle]:
        """Mark all requests of this connection as disconnected; uvicorn marks only the newest.

        Returns:
            those without a complete response.
        """
        cycles = [cycle for cycle in self._unfinished if not cycle.response_complete]
        for cycle in cycles:
            cycle.disconnected = True
            cycle.message_event.set()
        return cycles

    # ---- web sockets, as ``Upgrade``

    def begin_socket(self, cycle: RequestResponseCycle) -> None:
        self._enter(Phase.SOCKET)
        cycle.chunked_encoding, cycle.expected_content_length = False, sys.maxsize
        cycle.keep_alive = cycle.more_body = True
        cycle.message_event.clear()

    def end_socket(self, cycle: RequestResponseCycle) -> None:
        if self._phase is Phase.SOCKET:
            self._enter(Phase.CLOSED)
            cycle.disconnected = True  # nothing follows
            self.flow.resume_reading()  # what the client still sends is dropped
            if not self.transport.is_closing():
                self._end_writing()


class Upgrade:
    """The connection of one request as a stream in both directions.

    Between ``begin`` and ``end``, the request's body is what the client sends, and the body of its response, which has
    the status 101, is what the server sends.
    """

    def __init__(self, protocol: BoundedHttpProtocol, cycle: RequestResponseCycle) -> None:
        self._protocol = protocol
        self._cycle = cycle
        self.is_shutting_down = False
        """The server stops: ``receive`` returns once, and the application should end the stream."""

    @property
    def limits(self) -> ConnectionLimits:
        return self._protocol.limits

    def begin(self) -> None:
        """Call this before the start of the response."""
        self._protocol.begin_socket(self._cycle)

    def set_idle(self, is_idle: bool) -> None:
        """Record whether the client waits for nothing: the connection may then be closed to make room for another."""
        self._protocol.set_idle(is_idle)

    def end(self) -> None:
        """Send what is written, then close the connection."""
        self._protocol.end_socket(self._cycle)
