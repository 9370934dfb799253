"""Parts of streamed bodies, written directly to their connections."""

import asyncio


class Outbox:
    """Writes the parts that all streams have added in one turn of the event loop together.

    Making the parts of a step and writing them each touch much code and data, so that taking turns between both would
    cost a sixth more. Clients on the same machine are also woken less often.
    """

    def __init__(self) -> None:
        self._parts: list[tuple[asyncio.Transport, bytes]] = []

    def add(self, transport: asyncio.Transport, part: bytes) -> None:
        if not self._parts:
            asyncio.get_running_loop().call_soon(self.flush)
        self._parts.append((transport, part))

    def flush(self) -> None:
        parts, self._parts = self._parts, []
        for transport, part in parts:
            if not transport.is_closing():
                transport.write(part)


class ChunkWriter:
    """Implements ``sse.BodyWriter`` for a response with chunked encoding.

    Passing each part through the application's layers as a message of ASGI would cost more than making it.
    """

    __slots__ = ("_outbox", "_transport")

    def __init__(self, transport: asyncio.Transport, outbox: Outbox) -> None:
        self._transport = transport
        self._outbox = outbox

    @property
    def num_unsent(self) -> int:
        return self._transport.get_write_buffer_size()

    def write(self, part: bytes) -> None:
        self._outbox.add(self._transport, b"%x\r\n%b\r\n" % (len(part), part))

    def flush(self) -> None:
        self._outbox.flush()
