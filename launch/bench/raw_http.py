"""A keep-alive HTTP connection with no more than a load generator needs: whole requests out, whole answers in."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

TIMEOUT_S = 300.0
LIMIT = 1 << 22


class Connection:
    """Sends requests that are whole bytes already. Connects when it must: at first, and after the server closed."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._pair: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        """(status, body). Raises OSError, EOFError or TimeoutError: no whole answer came."""
        async with asyncio.timeout(TIMEOUT_S):
            try:
                status, headers = await self._begin(request)
                assert self._pair is not None
                body = await _body(self._pair[0], headers)
            except BaseException:
                self.cut()
                raise
        if headers.get(b"connection") == b"close":
            self.cut()
        return status, body

    async def _begin(self, request: bytes) -> tuple[int, dict[bytes, bytes]]:
        """Send it, and take the answer's head.

        A server may close a connection that was idle for long just as the next request is on its way: then, as every
        HTTP client does, once again on a new one.
        """
        fresh = self._pair is None
        try:
            return await _head(await self.send(request))
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            if fresh or (isinstance(error, asyncio.IncompleteReadError) and error.partial):
                raise
        self.cut()
        return await _head(await self.send(request))

    async def send(self, request: bytes) -> asyncio.StreamReader:
        """Where the answer will come."""
        if self._pair is None or self._pair[0].at_eof():
            self.cut()
            self._pair = await asyncio.open_connection(*self._address, limit=LIMIT)
        reader, writer = self._pair
        writer.write(request)
        await writer.drain()
        return reader

    def cut(self) -> None:
        """Leave at once, whatever is under way."""
        if self._pair is not None:
            self._pair[1].transport.abort()
            self._pair = None


@asynccontextmanager
async def connected(address: tuple[str, int]) -> AsyncIterator[Connection]:
    """A connection that is cut behind the block."""
    connection = Connection(address)
    try:
        yield connection
    finally:
        connection.cut()
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0)  # the transport closes its socket in the loop's next turn


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[bytes, bytes]]:
    lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
    pairs = (line.partition(b":") for line in lines[1:] if line)
    return int(lines[0].split(b" ")[1]), {name.lower(): value.strip().lower() for name, _, value in pairs}


async def _body(reader: asyncio.StreamReader, headers: dict[bytes, bytes]) -> bytes:
    if headers.get(b"transfer-encoding") != b"chunked":
        return await reader.readexactly(int(headers.get(b"content-length", b"0")))
    parts: list[bytes] = []
    while True:
        size = int(await reader.readuntil(b"\r\n"), 16)
        parts.append((await reader.readexactly(size + 2))[:-2])
        if not size:
            return b"".join(parts)
