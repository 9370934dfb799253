"""Forks, sessions and stored responses of another front end, which may refuse, fail, be silent or die."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, ClassVar

import httpx
import psutil
import pytest
from served import Served
from starlette.requests import Request

from quire.frontend.http.app import make_app
from quire.frontend.http.schema.errors import ApiError, ClientDisconnected
from quire.frontend.http.serving import peers as peers_module
from quire.frontend.http.serving.peers import Peers
from quire.frontend.http.serving.server import ServerSettings
from quire.frontend.http.stored.response_files import ResponseFiles
from quire.frontend.ids import front_end_of, new_id
from quire.frontend.sessions.session_store import SessionStore
from quire.protocol.errors import InvalidRequest

GREEDY = {"temperature": 0, "max_tokens": 100}
START = {"type": "http.response.start", "status": 200, "headers": [(b"x", b"y")]}
THEIRS = {"authorization": "Bearer theirs"}


class Parents:
    """Notes the parents of spans."""

    seen: ClassVar[list[bytes]] = []

    def record(self, headers: Any, span: Any) -> None:
        self.seen.append(dict(headers).get(b"traceparent", b""))

    def close(self) -> None:
        pass


@contextlib.asynccontextmanager
async def front_ends(engine: Any, text_in: Any, directory: Path, count: int = 3) -> AsyncIterator[list[Any]]:
    """Yield a client for each front end of a server."""
    async with contextlib.AsyncExitStack() as stack:
        clients = []
        for index in range(count):
            settings = ServerSettings(
                text_in=text_in,
                served_model_names=("tiny",),
                api_keys=("mine", "theirs"),
                sessions=SessionStore(index=index),
                tracer=Parents(),
                peers=Peers(directory, index, count),
                response_files=ResponseFiles(directory / "responses", index),
            )
            app = make_app(engine, settings)
            server = await settings.peers.listen(app.state.for_peers)
            assert server is not None
            stack.callback(server.close)
            headers = {"authorization": "Bearer mine"}
            client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", headers=headers)
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


async def opened(client: httpx.AsyncClient) -> str:
    session_id: str = (await client.post("/v1/sessions")).json()["id"]
    return session_id


@pytest.mark.parametrize("given", ["", "trace-7/a_ff"])
def test_ids_have_the_number_of_their_front_end(given: str) -> None:
    for index in (0, 7, 63):
        assert front_end_of(new_id("cmpl-", index, given)) == index
    for other in (f"cmpl-1\n{'0' * 32}", "resp_1", "٣" * 16, "a" * 256):
        assert front_end_of(other) is None


class TestRelay:
    """A response that one front end passes on from another."""

    async def pass_on(self, tmp_path: Path, app: Any, left: asyncio.Event | None = None) -> list[Any] | None:
        """Return the messages that the client of front end 0 gets; None if front end 1 has died."""
        sent: list[Any] = []
        leaves = asyncio.Event()

        async def answer(scope: Any, receive: Any, send: Any) -> None:
            shown = [scope[key] for key in ("method", "path", "query_string", "headers")]
            assert shown == ["POST", "/v1/x", b"order=asc", [(b"traceparent", b"t")]]
            assert scope["state"] == {"tenant": 7, "request_id": "mine"}
            assert (await receive())["body"] == b"body"
            if isinstance(app, Exception):
                raise app
            await app(receive, send)

        async def send(message: Any) -> None:
            sent.append(message)
            if left is not None:
                leaves.set()

        async def receive() -> Any:
            await leaves.wait()
            return {"type": "http.disconnect"}

        scope = {"type": "http", "method": "POST", "path": "/v1/x", "query_string": b"order=asc"}
        scope["headers"] = [(b"authorization", b"Bearer secret"), (b"traceparent", b"t")]
        scope["state"] = {"tenant": 7, "request_id": "mine"}
        here, there = Peers(tmp_path, 0, 2), Peers(tmp_path, 1, 2)
        server = await there.listen(answer) if app is not None else None
        async with server or contextlib.nullcontext():
            for local in (new_id("cmpl-", 0), new_id("cmpl-", 2), "cmpl-1"):
                assert await here.relay(Request(scope), local, b"body") is None
            relayed = await here.relay(Request(scope), new_id("cmpl-", 1), b"body")
            if relayed is None:
                return None
            try:
                await relayed({}, receive, send)
            finally:
                if left is not None:
                    await left.wait()
        return sent

    def test_a_response_is_passed_on(self, tmp_path: Path) -> None:
        parts = [{"type": "http.response.body", "body": b"part", "more_body": more} for more in (True, False)]

        async def answer(receive: Any, send: Any) -> None:
            for message in (START, *parts):
                await send(message)

        assert asyncio.run(self.pass_on(tmp_path, answer)) == [START, *parts]
        assert asyncio.run(self.pass_on(tmp_path, None)) is None

    @pytest.mark.parametrize(("error", "status"), [(InvalidRequest("wrong", "n"), 400), (ApiError(409, "ended"), 409)])
    def test_a_refusal_is_passed_on(self, tmp_path: Path, error: Any, status: int) -> None:
        sent = asyncio.run(self.pass_on(tmp_path, error))
        assert sent is not None
        assert sent[0]["status"] == status

    def test_a_response_that_breaks_off_is_not_whole(self, tmp_path: Path) -> None:
        async def answer(receive: Any, send: Any) -> None:
            await send(START)
            raise RuntimeError("a bug")

        with pytest.raises(ApiError, match="the front end that has the request has died"):
            asyncio.run(self.pass_on(tmp_path, answer))

    def test_the_other_front_end_ends_what_a_client_leaves(self, tmp_path: Path) -> None:
        async def test() -> None:
            left = asyncio.Event()

            async def answer(receive: Any, send: Any) -> None:
                await send(START)
                assert (await receive())["type"] == "http.disconnect"
                left.set()

            with pytest.raises(ClientDisconnected):
                await self.pass_on(tmp_path, answer, left)

        asyncio.run(test())


@pytest.mark.parametrize("data", [b"", b"\xff" * 8, bytes(20), b"\x00" * 7 + b"\x01\xc0", b"\x00" * 7 + b"\x05hello"])
def test_a_connection_without_a_request_harms_nothing(run: Any, tmp_path: Path, data: bytes) -> None:
    async def test(first: Any, second: Any, third: Any) -> None:
        reader, writer = await asyncio.open_unix_connection(str(Peers(tmp_path).address(0)))
        writer.write(data)
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()
        session = await opened(first)
        assert (await second.get(f"/v1/sessions/{session}")).status_code == 200

    run(test)


def test_front_ends_that_have_died_or_do_not_answer(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(first: Any, second: Any, third: Any) -> None:
        session, stored, kept = await opened(first), await create(first), await create(second)
        address = Peers(tmp_path).address(0)
        urls = [f"/v1/sessions/{session}", f"/v1/responses/{stored['id']}"]
        continued = {"input": "more", "previous_response_id": stored["id"]}
        address.unlink()
        answers = [await third.get(url) for url in urls] + [await third.post("/v1/responses", json=continued)]
        assert [answer.status_code for answer in answers] == [404, 200, 200]  # a stored response is a file, too
        fork = await third.post(f"/v1/requests/{new_id('cmpl-', 0)}/fork", json={})
        assert (fork.status_code, fork.json()["error"]["code"]) == (404, "request_not_found")
        assert (await third.get(f"/v1/responses/{kept['id']}")).status_code == 200

        asked: list[asyncio.StreamWriter] = []
        silent = await asyncio.start_unix_server(lambda reader, writer: asked.append(writer), str(address))
        monkeypatch.setattr(peers_module, "TIMEOUT_S", 0.05)
        answers = [await third.get(url) for url in urls]
        assert [(answer.status_code, answer.headers["retry-after"]) for answer in answers] == [(503, "1")] * 2
        silent.close()
        for writer in asked:
            writer.close()
            await writer.wait_closed()

    run(test)


class TestSessions:
    @pytest.mark.parametrize("stream", [False, True])
    def test_each_front_end_continues_a_session(self, run: Any, engine: Any, stream: bool) -> None:
        async def test(first: Any, second: Any, third: Any) -> None:
            session = await opened(second)
            for number, client in enumerate((first, second, third)):
                body = {"prompt": [7 + number], "session": {"id": session, "piece": number}, "stream": stream, **GREEDY}
                parent = f"parent {number}"
                response = await client.post("/v1/completions", json={**body, "x": 1}, headers={"traceparent": parent})
                assert Parents.seen[-1] == parent.encode()
                assert response.headers["x-quire-ignored-fields"] == "x"
                assert response.status_code == 200 and ("[DONE]" in response.text) == stream
            assert [token for token in engine.added[-1].prompt if token in (7, 8, 9)] == [7, 8, 9]
            assert (await first.get(f"/v1/sessions/{session}")).json()["pieces"] == 3
            chat = {"messages": [{"role": "user", "content": "hello"}], "session": session}
            assert (await first.post("/v1/chat/completions", json=chat)).status_code == 400
            assert (await first.delete(f"/v1/sessions/{session}")).json()["status"] == "ended"
            assert (await second.get(f"/v1/sessions/{session}")).status_code == 404

        run(test)

    def test_refusals_are_passed_on(self, run: Any) -> None:
        async def test(first: Any, second: Any, third: Any) -> None:
            session = await opened(first)
            body = {"prompt": [7], "session": {"id": session, "piece": 3}}
            response = await second.post("/v1/completions", json=body)
            assert (response.status_code, response.json()["error"]["code"]) == (409, "session_out_of_order")
            assert (await second.get(f"/v1/sessions/{session}", headers=THEIRS)).status_code == 404
            body["session"] = session
            assert (await second.post("/v1/completions", json=body, headers=THEIRS)).status_code == 404

        run(test)


class TestResponses:
    def test_every_front_end_finds_a_response(self, run: Any) -> None:
        async def test(first: Any, second: Any, third: Any) -> None:
            stored = await create(first)
            for client in (first, second, third):
                assert (await client.get(f"/v1/responses/{stored['id']}")).json() == stored
                items = (await client.get(f"/v1/responses/{stored['id']}/input_items?order=asc")).json()["data"]
                assert items[0]["content"][0]["text"] == "hello"

        run(test)

    def test_conversation_over_several_front_ends(self, run: Any, engine: Any, tokenizer: Any) -> None:
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

    def test_deleted_response_is_found_nowhere(self, run: Any) -> None:
        async def test(first: Any, second: Any, third: Any) -> None:
            url = f"/v1/responses/{(await create(first))['id']}"
            for client in (first, second, third):
                assert (await client.get(url, headers=THEIRS)).status_code == 404
                assert (await client.delete(url, headers=THEIRS)).status_code == 404
            assert (await third.delete(url)).json()["deleted"] is True
            for client in (first, second, third):
                assert (await client.get(url)).status_code == 404
            assert (await second.delete(url)).status_code == 404

        run(test)

    @pytest.mark.full
    def test_front_ends_of_a_server(self) -> None:
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
