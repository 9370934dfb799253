"""Messages between front ends, over unix sockets: the size of each, and then its bytes."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

TIMEOUT_S = 5.0
SIZE_BYTES = 8
FRONT_END_SILENT = "the front end that may have it does not answer: retry later"


Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def listen(address: Path, answer: Answer) -> asyncio.Server:
    """Call ``answer`` for each connection to the socket. A socket that an earlier process left is replaced."""
    with contextlib.suppress(FileNotFoundError):
        address.unlink()
    return await asyncio.start_unix_server(answer, str(address))


def write_frame(writer: asyncio.StreamWriter, message: Any) -> None:
    data = msgspec.msgpack.encode(message)
    writer.write(len(data).to_bytes(SIZE_BYTES) + data)


async def read_frame(reader: asyncio.StreamReader, most: int | None = None) -> bytes:
    """Return one message, still encoded; raise EOFError if it has more than ``most`` bytes, or the connection ends."""
    size = int.from_bytes(await reader.readexactly(SIZE_BYTES))
    if most is not None and size > most:
        raise EOFError
    return await reader.readexactly(size)
