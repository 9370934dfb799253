"""A minimal HTTP client for load generators; httptools parses the responses.

A full HTTP library takes as long per part of a response as the server does, so on shared cores it would distort the
measurement.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import httptools

TIMEOUT_S = 300.0
CONNECT_S = 30.0


@dataclass(slots=True)
class Reply:
    """A response, as far as received.

    Attributes:
        pieces: (time on ``time.perf_counter``, body bytes without framing), as the socket delivered them.
        whole: the response is complete.
    """

    status: int = 0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    whole: bool = False

    @property
    def body(self) -> bytes:
        return b"".join(piece for _, piece in self.pieces)


class Link(asyncio.Protocol):
    """One TCP connection, which fills one reply at a time. ``lost``: the error that ended it, or None."""

    def __init__(self) -> None:
        self.lost: Exception | None = None
        self.changed = asyncio.Event()
        self._body: list[bytes] = []
        self.expect(Reply())

    def expect(self, reply: Reply) -> None:
        """Assign all further data to ``reply``."""
        self._reply = reply
        self._parser = httptools.HttpResponseParser(self)
        self.changed.clear()

    @property
    def is_reusable(self) -> bool:
        return self.lost is None and bool(self._parser.should_keep_alive())

    # ---- called by asyncio

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.lost = EOFError(f"not an HTTP answer: {error}")
        if self._body:
            self._reply.pieces.append((time.perf_counter(), b"".join(self._body)))
            self._body.clear()
        self.changed.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = self.lost or exc or EOFError("the server closed the connection")
        self.changed.set()

    # ---- called by httptools

    def on_headers_complete(self) -> None:
        self._reply.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        self._reply.whole = True


class Connection:
    """Sends encoded requests one at a time. Connects for the first one and after a close.

    Attributes:
        port: the client's port; 0 before the first connection.
    """

    def __init__(self, address: tuple[str, int]) -> None:
        self.port = 0
        self._address = address
        self._pair: tuple[asyncio.Transport, Link] | None = None

    async def fetch(self, request: bytes, reply: Reply | None = None) -> Reply:
        """Send a request and return the complete response; ``reply`` is filled meanwhile.

        A server may close an idle connection while the next request is on its way. Like other HTTP clients, this one
        then sends the request once more on a new connection.

        Raises:
            OSError, EOFError, TimeoutError: the response is incomplete.
        """
        reply = Reply() if reply is None else reply
        async with asyncio.timeout(TIMEOUT_S):
            is_new = self._pair is None
            try:
                return await self._exchange(request, reply)
            except (ConnectionError, EOFError):
                if is_new or reply.status:
                    raise
            return await self._exchange(request, reply)

    async def _exchange(self, request: bytes, reply: Reply) -> Reply:
        async for _ in self.pieces(request, reply):
            pass
        return reply

    async def pieces(self, request: bytes, reply: Reply) -> AsyncIterator[bytes]:
        """Yield the body as it arrives. Raises OSError, EOFError or TimeoutError if it stays incomplete."""
        num_taken = 0
        try:
            link = await self.send(request, reply)
            while not reply.whole or num_taken < len(reply.pieces):
                if num_taken == len(reply.pieces):
                    if link.lost is not None:
                        raise link.lost
                    await link.changed.wait()
                    link.changed.clear()
                for _, piece in reply.pieces[num_taken:]:
                    num_taken += 1
                    yield piece
            if not link.is_reusable:
                self.cut()
        except BaseException:
            self.cut()
            raise

    async def send(self, request: bytes, reply: Reply) -> Link:
        """Send a request on a connection that fills ``reply``."""
        if self._pair is None or self._pair[1].lost is not None:
            self.cut()
            async with asyncio.timeout(CONNECT_S):
                self._pair = await asyncio.get_running_loop().create_connection(Link, *self._address)
            self.port = self._pair[0].get_extra_info("sockname")[1]
        transport, link = self._pair
        link.expect(reply)
        transport.write(request)
        return link

    def cut(self) -> None:
        """Abort the connection at once."""
        if self._pair is not None:
            self._pair[0].abort()
            self._pair = None


@asynccontextmanager
async def connected(address: tuple[str, int]) -> AsyncIterator[Connection]:
    """Yield a connection that is aborted after the block."""
    connection = Connection(address)
    try:
        yield connection
    finally:
        connection.cut()
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0)  # the transport closes its socket in the next iteration of the loop


async def get(port: int, path: str) -> tuple[int, str]:
    """Return (status, body) of a GET on this machine."""
    async with connected(("127.0.0.1", port)) as connection:
        reply = await connection.fetch(f"GET {path} HTTP/1.1\r\nHost: quire\r\nConnection: close\r\n\r\n".encode())
        return reply.status, reply.body.decode(errors="replace")
