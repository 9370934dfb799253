"""The stored responses of the other front ends, asked for over unix sockets in the server's private directory.

A response is in the memory of the front end that made it. The next request may reach another one, which then asks.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from quire.frontend.http.schema.errors import ApiError
from quire.frontend.http.stored.peer_frames import FRONT_END_SILENT, TIMEOUT_S, listen, read_frame, write_frame
from quire.frontend.http.stored.response_store import ResponseStore, StoredResponse

MAX_QUESTION_BYTES = 64 * 1024
T = TypeVar("T")


class Question(msgspec.Struct, frozen=True):
    """``kind``: return the response with this id, return the response with this item, or delete the response."""

    kind: Literal["response", "item", "delete"]
    tenant: int
    id: str


class SharedResponse(msgspec.Struct, frozen=True):
    """A ``StoredResponse`` on the wire."""

    body: bytes
    conversation: tuple[bytes, ...]
    num_before: int
    num_input: int
    output_ids: tuple[str, ...]
    chain: str = ""


def peer_address(directory: Path, index: int) -> Path:
    """Return the socket of front end ``index``."""
    return directory / f"responses-{index}"


async def share_responses(store: ResponseStore, address: Path) -> asyncio.Server:
    """Answer the questions of other front ends."""

    async def answer(question: Question, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            write_frame(writer, _answer(store, question))
            await writer.drain()

    return await listen(address, Question, MAX_QUESTION_BYTES, answer)


def _answer(store: ResponseStore, question: Question) -> SharedResponse | bool | None:
    match question.kind:
        case "delete":
            return store.delete(question.tenant, question.id)
        case "item":
            found = store.with_item(question.tenant, question.id)
        case "response":
            found = store.get(question.tenant, question.id)
    if found is None:
        return None
    sizes = found.num_before, found.num_input
    return SharedResponse(found.body, found.conversation, *sizes, found.output_ids, found.chain)


class ResponsePeers:
    """The other front ends. All methods raise ApiError 503 if one of them does not answer.

    A front end that has died has no responses, and the one that replaces it begins with none.
    """

    def __init__(self, addresses: Sequence[Path] = ()) -> None:
        self._addresses = addresses

    async def get(self, tenant: int, response_id: str) -> StoredResponse | None:
        return await self._find(Question("response", tenant, response_id))

    async def with_item(self, tenant: int, item_id: str) -> StoredResponse | None:
        return await self._find(Question("item", tenant, item_id))

    async def delete(self, tenant: int, response_id: str) -> bool:
        """Return whether one of them had the response."""
        for address in self._addresses:
            if await _ask(address, Question("delete", tenant, response_id), bool):
                return True
        return False

    async def _find(self, question: Question) -> StoredResponse | None:
        for address in self._addresses:
            found = await _ask(address, question, SharedResponse)
            if found is not None:
                return StoredResponse(**msgspec.structs.asdict(found))
        return None


async def _ask(address: Path, question: Question, kind: type[T]) -> T | None:
    """Return the answer of one front end; None if it has died."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            reader, writer = await asyncio.open_unix_connection(str(address))
            try:
                write_frame(writer, question)
                return msgspec.msgpack.decode(await read_frame(reader), type=kind | None)
            finally:
                writer.close()
    except TimeoutError:
        raise ApiError(503, FRONT_END_SILENT, None, "engine_unavailable") from None
    except (OSError, EOFError):
        return None
