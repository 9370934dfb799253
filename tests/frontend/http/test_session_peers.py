"""Requests that continue a session of another front end."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest

from quire.frontend.http.app import make_app
from quire.frontend.http.routes import fork_peers
from quire.frontend.http.routes.session_peers import session_address, share_sessions
from quire.frontend.http.serving.server import ServerSettings
from quire.frontend.sessions.session_store import SessionStore

GREEDY = {"temperature": 0, "max_tokens": 100}


class Parents:
    """Notes the parents of spans."""

    seen: ClassVar[list[bytes]] = []

    def record(self, headers: Any, span: Any) -> None:
        self.seen.append(dict(headers).get(b"traceparent", b""))

    def close(self) -> None:
        pass


@contextlib.asynccontextmanager
async def front_ends(engine: Any, text_in: Any, directory: Path, count: int = 2) -> AsyncIterator[list[Any]]:
    """Yield a client for each of several applications that share their sessions, as front ends do."""
    async with contextlib.AsyncExitStack() as stack:
        clients = []
        for index in range(count):
            settings = ServerSettings(
                text_in=text_in,
                served_model_names=("tiny",),
                api_keys=("mine", "theirs"),
                sessions=SessionStore(index=index),
                tracer=Parents(),
                session_peers={other: session_address(directory, other) for other in range(count) if other != index},
            )
            app = make_app(engine, settings)
            server = await share_sessions(app.router, session_address(directory, index))
            stack.callback(server.close)
            headers = {"authorization": "Bearer mine"}
            transport = httpx.ASGITransport(app)
            client = httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers)
            clients.append(await stack.enter_async_context(client))
        yield clients


@pytest.fixture
def run(engine: Any, text_in: Any, tmp_path: Path) -> Any:
    def run(test: Any) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(20), front_ends(engine, text_in, tmp_path) as clients:
                await test(*clients)

        asyncio.run(bounded())

    return run


async def opened(client: httpx.AsyncClient) -> str:
    session_id: str = (await client.post("/v1/sessions")).json()["id"]
    return session_id


@pytest.mark.parametrize("stream", [False, True])
def test_either_front_end_continues_a_session(run: Any, engine: Any, stream: bool) -> None:
    async def test(first: Any, second: Any) -> None:
        session = await opened(second)
        for number, client in enumerate((first, second, first)):
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


def test_refusals_are_passed_on(run: Any) -> None:
    async def test(first: Any, second: Any) -> None:
        session = await opened(first)
        body = {"prompt": [7], "session": {"id": session, "piece": 3}}
        response = await second.post("/v1/completions", json=body)
        assert (response.status_code, response.json()["error"]["code"]) == (409, "session_out_of_order")
        theirs = {"authorization": "Bearer theirs"}
        assert (await second.get(f"/v1/sessions/{session}", headers=theirs)).status_code == 404
        body["session"] = session
        assert (await second.post("/v1/completions", json=body, headers=theirs)).status_code == 404

    run(test)


@pytest.mark.full
def test_front_ends_that_have_died_or_do_not_answer(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(first: Any, second: Any) -> None:
        session = await opened(first)
        session_address(tmp_path, 0).unlink()
        assert (await second.get(f"/v1/sessions/{session}")).status_code == 404
        asked: list[asyncio.StreamWriter] = []
        address = str(session_address(tmp_path, 0))
        silent = await asyncio.start_unix_server(lambda reader, writer: asked.append(writer), address)
        monkeypatch.setattr(fork_peers, "TIMEOUT_S", 0.05)
        answer = await second.get(f"/v1/sessions/{session}")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        silent.close()
        for writer in asked:
            writer.close()
            await writer.wait_closed()

    run(test)


@pytest.mark.parametrize("data", [b"", b"\xff" * 8, bytes(8), b"\x00" * 7 + b"\x05hello"])
def test_a_connection_without_a_question_harms_nothing(engine: Any, text_in: Any, tmp_path: Path, data: bytes) -> None:
    async def test() -> None:
        async with front_ends(engine, text_in, tmp_path) as (first, second):
            reader, writer = await asyncio.open_unix_connection(str(session_address(tmp_path, 0)))
            writer.write(data)
            writer.write_eof()
            assert await reader.read() == b""
            writer.close()
            session = await opened(first)
            assert (await second.get(f"/v1/sessions/{session}")).status_code == 200

    asyncio.run(test())
