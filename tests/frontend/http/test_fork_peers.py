"""Responses that one front end passes on from another, which may refuse, fail or die."""

import asyncio
import struct
from pathlib import Path
from typing import Any

import pytest

from quire.frontend.http.routes.fork_peers import ForkQuestion, ask_peers, fork_address, share_forks
from quire.frontend.http.schema.bodies import ForkBody
from quire.frontend.http.schema.errors import ApiError, ClientDisconnected
from quire.protocol.errors import InvalidRequest

QUESTION = ForkQuestion("cmpl-1", 7, "", ForkBody(n=2))
START = {"type": "http.response.start", "status": 200, "headers": [(b"x", b"y")]}


def part(body: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}


async def ends(scope: Any, receive: Any, send: Any) -> None:
    for message in (START, part(b"one"), part(b"two", more=False)):
        await send(message)


async def fails_in_time(scope: Any, receive: Any, send: Any) -> None:
    raise InvalidRequest("too many", "n")


async def fails_late(scope: Any, receive: Any, send: Any) -> None:
    await send(START)
    await send(part(b"one"))
    raise RuntimeError("a bug")


async def waits_for_disconnect(scope: Any, receive: Any, send: Any) -> None:
    await send(START)
    assert (await receive())["type"] == "http.disconnect"
    scope["state"]["left"].set()


async def pass_on(tmp_path: Path, app: Any, left: asyncio.Event | None = None) -> list[dict[str, Any]] | None:
    """Return the messages that the client of the first front end gets; None if the second one has no such request."""
    sent: list[dict[str, Any]] = []
    leaves = asyncio.Event()

    def fork(scope: Any, name: str, body: ForkBody) -> Any:
        assert (name, body, scope["state"]["tenant"]) == ("cmpl-1", QUESTION.body, 7)
        scope["state"]["left"] = left
        if isinstance(app, Exception):
            raise app
        return app

    async def send(message: Any) -> None:
        sent.append(message)
        if left is not None:
            leaves.set()

    async def receive() -> dict[str, Any]:
        await leaves.wait()
        return {"type": "http.disconnect"}

    async with await share_forks(fork, fork_address(tmp_path, 1)):
        relayed = await ask_peers([fork_address(tmp_path, 0), fork_address(tmp_path, 1)], QUESTION)
        if relayed is None:
            return None
        try:
            await relayed({}, receive, send)
        finally:
            if left is not None:
                await left.wait()
    return sent


def test_a_response_is_passed_on(tmp_path: Path) -> None:
    assert asyncio.run(pass_on(tmp_path, ends)) == [START, part(b"one"), part(b"two", more=False)]
    assert asyncio.run(pass_on(tmp_path, None)) is None


@pytest.mark.parametrize(
    ("app", "status"), [(fails_in_time, 400), (InvalidRequest("wrong", "n"), 400), (ApiError(409, "ended"), 409)]
)
def test_a_refusal_is_passed_on(tmp_path: Path, app: Any, status: int) -> None:
    sent = asyncio.run(pass_on(tmp_path, app))
    assert sent is not None
    assert sent[0]["status"] == status


def test_a_response_that_breaks_off_is_not_whole(tmp_path: Path) -> None:
    with pytest.raises(ApiError, match="the front end that has the request has died"):
        asyncio.run(pass_on(tmp_path, fails_late))


def test_the_other_front_end_ends_what_a_client_leaves(tmp_path: Path) -> None:
    async def test() -> None:
        with pytest.raises(ClientDisconnected):
            await pass_on(tmp_path, waits_for_disconnect, asyncio.Event())

    asyncio.run(test())


@pytest.mark.parametrize("data", [b"", b"\x00" * 20, struct.pack(">Q", 2**40), struct.pack(">Q", 3) + b"abc"])
def test_a_connection_without_a_question_harms_nothing(tmp_path: Path, data: bytes) -> None:
    async def test() -> None:
        async with await share_forks(lambda *_: ends, fork_address(tmp_path, 1)):
            reader, writer = await asyncio.open_unix_connection(str(fork_address(tmp_path, 1)))
            writer.write(data)
            writer.write_eof()
            assert await reader.read() == b""
            writer.close()

    asyncio.run(test())
    assert asyncio.run(pass_on(tmp_path, ends)) is not None
