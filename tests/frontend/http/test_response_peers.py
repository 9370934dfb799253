"""Responses that another front end has stored."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from served import Served

from quire.frontend.http.app import make_app
from quire.frontend.http.serving.server import ServerSettings
from quire.frontend.http.stored import response_peers
from quire.frontend.http.stored.response_peers import ResponsePeers, peer_address, share_responses


@contextlib.asynccontextmanager
async def front_ends(engine: Any, text_in: Any, directory: Path, count: int = 3) -> AsyncIterator[list[Any]]:
    """Yield a client for each of several applications that share their responses, as front ends do."""
    async with contextlib.AsyncExitStack() as stack:
        clients = []
        for index in range(count):
            others = [peer_address(directory, other) for other in range(count) if other != index]
            settings = ServerSettings(
                text_in=text_in,
                served_model_names=("tiny",),
                api_keys=("mine", "theirs"),
                response_peers=ResponsePeers(others),
            )
            app = make_app(engine, settings)
            server = await share_responses(app.state.response_store, peer_address(directory, index))
            stack.callback(server.close)
            headers = {"authorization": "Bearer mine"}
            transport = httpx.ASGITransport(app)
            client = httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers)
            clients.append(await stack.enter_async_context(client))
        yield clients


@pytest.fixture
def run(engine: Any, text_in: Any, tmp_path: Path) -> Any:
    engine.max_model_len = 4000

    def run(test: Any) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(20), front_ends(engine, text_in, tmp_path) as clients:
                await test(*clients)

        asyncio.run(bounded())

    return run


async def create(client: httpx.AsyncClient, **fields: Any) -> Any:
    answer = await client.post("/v1/responses", json={"input": "hello", **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_every_front_end_finds_a_response(run: Any) -> None:
    async def test(first: Any, second: Any, third: Any) -> None:
        stored = await create(first)
        for client in (first, second, third):
            assert (await client.get(f"/v1/responses/{stored['id']}")).json() == stored
            items = (await client.get(f"/v1/responses/{stored['id']}/input_items")).json()["data"]
            assert items[0]["content"][0]["text"] == "hello"

    run(test)


def test_conversation_over_several_front_ends(run: Any, engine: Any, tokenizer: Any) -> None:
    async def test(first: Any, second: Any, third: Any) -> None:
        one = await create(first, input="number one")
        two = await create(second, input="number two", previous_response_id=one["id"])
        reference = {"type": "item_reference", "id": two["output"][0]["id"]}
        await create(third, input=[{"role": "user", "content": "number three"}], previous_response_id=two["id"])
        prompt = tokenizer.decode(engine.added[-1].prompt)
        assert [prompt.count(f"number {word}") for word in ("one", "two", "three")] == [1, 1, 1]
        await create(third, input=[reference, {"role": "user", "content": "number four"}])
        assert "one two three" in tokenizer.decode(engine.added[-1].prompt)

    run(test)


def test_deleted_response_is_found_nowhere(run: Any) -> None:
    async def test(first: Any, second: Any, third: Any) -> None:
        stored = await create(first)
        assert (await third.delete(f"/v1/responses/{stored['id']}")).json()["deleted"] is True
        for client in (first, second, third):
            assert (await client.get(f"/v1/responses/{stored['id']}")).status_code == 404
        assert (await second.delete(f"/v1/responses/{stored['id']}")).status_code == 404

    run(test)


def test_response_of_another_key_is_found_nowhere(run: Any) -> None:
    async def test(first: Any, second: Any, third: Any) -> None:
        stored = await create(first)
        theirs = {"authorization": "Bearer theirs"}
        for client in (first, second, third):
            path = f"/v1/responses/{stored['id']}"
            assert (await client.get(path, headers=theirs)).status_code == 404
            assert (await client.delete(path, headers=theirs)).status_code == 404
        assert (await second.get(f"/v1/responses/{stored['id']}")).status_code == 200

    run(test)


def test_front_end_that_has_died(run: Any, tmp_path: Path) -> None:
    async def test(first: Any, second: Any, third: Any) -> None:
        stored, kept = await create(first), await create(second)
        peer_address(tmp_path, 0).unlink()
        answer = await third.get(f"/v1/responses/{stored['id']}")
        assert (answer.status_code, "it may have been dropped" in answer.text) == (404, True)
        assert (await third.get(f"/v1/responses/{kept['id']}")).status_code == 200

    run(test)


def test_front_end_that_does_not_answer(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(first: Any, second: Any, third: Any) -> None:
        peer_address(tmp_path, 0).unlink()
        asked: list[asyncio.StreamWriter] = []
        address = str(peer_address(tmp_path, 0))
        silent = await asyncio.start_unix_server(lambda reader, writer: asked.append(writer), address)
        monkeypatch.setattr(response_peers, "TIMEOUT_S", 0.05)
        answer = await third.get("/v1/responses/resp_1")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        silent.close()
        for writer in asked:
            writer.close()
            await writer.wait_closed()

    run(test)


def test_many_references_are_refused(run: Any) -> None:
    """Each one to another front end costs a question; their number is limited."""

    async def test(first: Any, second: Any, third: Any) -> None:
        stored = [await create(first) for _ in range(66)]
        items = [{"type": "item_reference", "id": each["output"][0]["id"]} for each in stored]
        assert (await second.post("/v1/responses", json={"input": items})).status_code == 404
        assert (await second.post("/v1/responses", json={"input": items[:60]})).status_code == 200

    run(test)


@pytest.mark.parametrize("data", [b"", b"\xff" * 8, bytes(8), b"\x00" * 7 + b"\x01\xc0", b"\x00" * 7 + b"\x05hello"])
def test_damaged_question(engine: Any, text_in: Any, tmp_path: Path, data: bytes) -> None:
    async def test() -> None:
        async with front_ends(engine, text_in, tmp_path) as (first, second, _):
            reader, writer = await asyncio.open_unix_connection(str(peer_address(tmp_path, 0)))
            writer.write(data)
            writer.write_eof()
            assert await reader.read() == b""
            writer.close()
            stored = await create(first)
            assert (await second.get(f"/v1/responses/{stored['id']}")).status_code == 200

    engine.max_model_len = 4000
    asyncio.run(test())


@pytest.mark.full
def test_front_ends_of_a_server() -> None:
    """Each connection may reach either of two processes. One of them is killed."""
    served = Served("--api-server-count", "2")
    body = {"input": "hello", "max_output_tokens": 2}
    ids = [httpx.post(f"{served.url}/v1/responses", json=body, timeout=60).json()["id"] for _ in range(12)]
    urls = [f"{served.url}/v1/responses/{each}" for each in ids]
    assert [httpx.get(url).status_code for url in urls * 3] == [200] * 36
    processes = psutil.Process(served.process.pid).children(recursive=True)
    victim = next(each for each in processes if "quire.frontend.http" in each.cmdline())
    victim.kill()
    statuses = [httpx.get(url).status_code for url in urls]
    assert set(statuses) <= {200, 404}
    assert [httpx.get(url).status_code for url in urls * 2] == statuses * 2
    assert served.stop() == 0
