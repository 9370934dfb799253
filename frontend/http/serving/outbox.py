"""The parts of streamed bodies on their connections: written directly as chunks, or without chunks for HTTP/1.0."""

import asyncio
import sys

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class Outbox:
    """Writes the parts that all streams have added in one turn of the event loop together.

    Making the parts of a step and writing them each touch much code and data, so that taking turns between both would
    cost a sixth more. Clients on the same machine are also woken less often.
    """

    def __init__(self) -> None:
        self.parts: list[tuple[asyncio.Transport, bytes]] = []

    def flush_soon(self) -> None:
        """Call this before the first part is added."""
        asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> None:
        parts, self.parts = self.parts, []
        for transport, part in parts:
            if not transport.is_closing():
                transport.write(part)


class ChunkWriter:
    """Writes the body of a started response with chunked encoding.

    Passing each part through the application's layers as a message of ASGI would cost more than making it.
    """

    __slots__ = ("_outbox", "_transport")

    def __init__(self, transport: asyncio.Transport, outbox: Outbox) -> None:
        self._transport = transport
        self._outbox = outbox

    def write(self, part: bytes) -> int:
        """Write a part soon, without waiting for the reader. Return the bytes before it that wait for the reader."""
        transport, outbox = self._transport, self._outbox
        if not outbox.parts:
            outbox.flush_soon()
        outbox.parts.append((transport, b"%x\r\n%b\r\n" % (len(part), part)))
        return transport.get_write_buffer_size()

    def flush(self) -> None:
        """Write all parts now, because the next one is a message of ASGI."""
        self._outbox.flush()


async def without_chunks(cycle: RequestResponseCycle, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Serve a client of HTTP/1.0: a response without a length ends with its connection, which uvicorn never keeps."""

    async def send_plain(message: Message) -> None:
        is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
        cycle.expected_content_length = len(message.get("body", b"")) if is_last else sys.maxsize
        await send(message)

    cycle.chunked_encoding = False
    await app(scope, receive, send_plain)
