"""Messages between front ends, over unix sockets: the size of each, and then its bytes."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from quire.frontend.http.schema.errors import ClientDisconnected

TIMEOUT_S = 5.0
SIZE_BYTES = 8
FRONT_END_SILENT = "the front end that may have it does not answer: retry later"
Q = TypeVar("Q")
Answer = Callable[[Q, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def listen(address: Path, kind: type[Q], most: int, answer: Answer[Q]) -> asyncio.Server:
    """Call ``answer`` with the question of each connection to the socket. One that an earlier process left is replaced.

    ``most``: bytes that a question may have.
    """

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # the other process has ended, or gave up
        ended = OSError, EOFError, TimeoutError, msgspec.MsgspecError, ClientDisconnected
        with contextlib.closing(writer), contextlib.suppress(*ended):
            async with asyncio.timeout(TIMEOUT_S):
                question = msgspec.msgpack.decode(await read_frame(reader, most), type=kind)
            await answer(question, reader, writer)

    with contextlib.suppress(FileNotFoundError):
        address.unlink()
    return await asyncio.start_unix_server(serve, str(address))


def write_frame(writer: asyncio.StreamWriter, message: Any) -> None:
    data = msgspec.msgpack.encode(message)
    writer.write(len(data).to_bytes(SIZE_BYTES) + data)


async def read_frame(reader: asyncio.StreamReader, most: int | None = None) -> bytes:
    """Return one message, still encoded; raise EOFError if it has more than ``most`` bytes, or the connection ends."""
    size = int.from_bytes(await reader.readexactly(SIZE_BYTES))
    if most is not None and size > most:
        raise EOFError
    return await reader.readexactly(size)
