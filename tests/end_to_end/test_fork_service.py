"""Forks of running requests over HTTP, of a server with two front ends: each connection may reach either of them."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from served import Served
from tiers import thinned

pytestmark = pytest.mark.full

FORK = {"n": 3, "temperature": 0.0, "num_tokens": 6}
BODIES: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "Once upon a time", "stop": [" friends"]},
    "chat/completions": {"messages": [{"role": "user", "content": "Tell me a story"}]},
}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    keys = ("--api-key", "one", "--api-key", "other", "--admin-api-key", "admin")
    served = Served("--deterministic", "--api-server-count", "2", "--max-num-seqs", "16", *keys)
    yield served
    assert served.stop() == 0


def client(served: Served, key: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=served.url, headers={"authorization": f"Bearer {key}"}, timeout=60)


async def post(served: Served, key: str, path: str, body: Any = None) -> httpx.Response:
    """POST on a connection of its own."""
    async with client(served, key) as once:
        return await once.post(path, json=body)


def text_of(choice: dict[str, Any]) -> str:
    written = choice["text"] if "text" in choice else choice.get("message", choice.get("delta"))["content"]
    return str(written or "")


class Parent:
    """A stream whose engine is paused in mid-answer."""

    def __init__(self, served: Served, path: str) -> None:
        self.served, self.path = served, path

    async def __aenter__(self) -> "Parent":
        self._client = client(self.served, "one")
        await self._begin()
        while not await self._is_running():  # the machine is busy: it ended before the pause
            await self._end()
            await self._begin()
        return self

    async def _begin(self) -> None:
        """Start the stream, and pause the engine after some tokens."""
        body = {"max_tokens": 300, "ignore_eos": True, "temperature": 0, "stream": True, **BODIES[self.path]}
        self.text = ""
        self._context = self._client.stream("POST", f"/v1/{self.path}", json=body)
        self._events = self._read((await self._context.__aenter__()).aiter_lines())
        for _ in range(8):
            self.id = (await anext(self._events))["id"]
        assert (await post(self.served, "admin", "/admin/pause?mode=keep")).status_code == 200

    async def _end(self) -> None:
        """Resume the engine, and read the rest of the stream."""
        await self.resume()
        async for _ in self._events:
            pass
        await self._context.__aexit__(None, None, None)

    async def _is_running(self) -> bool:
        async with client(self.served, "admin") as admin:
            return bool((await admin.get("/admin/state")).json()["running"])

    async def _read(self, lines: Any) -> Any:
        async for line in lines:
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                self.text += text_of(event["choices"][0])
                yield event

    async def __aexit__(self, *error: object) -> None:
        await self._end()
        await self._client.aclose()

    async def fork(self, key: str, **body: Any) -> httpx.Response:
        return await post(self.served, key, f"/v1/requests/{self.id}/fork", FORK | body)

    async def resume(self) -> None:
        assert (await post(self.served, "admin", "/admin/resume")).status_code == 200

    async def until_queued(self, count: int) -> None:
        """Wait until the engine has this many requests."""
        num_requests = 0
        async with client(self.served, "admin") as admin:
            while num_requests < count:
                found = (await admin.get("/admin/state")).json()
                num_requests = found["running"] + found["waiting"]


@pytest.mark.parametrize("path", thinned(BODIES, keep=1))
def test_forks_continue_the_answer(served: Served, path: str) -> None:
    """Greedy forks end as their parent does; those of a seed are the same from either front end."""

    async def test() -> None:
        async with Parent(served, path) as parent:
            greedy = [asyncio.create_task(parent.fork(key, max_tokens=300)) for key in ("one", "admin") * 3]
            seeded = [asyncio.create_task(parent.fork("one", temperature=1.0, seed=7)) for _ in range(6)]
            await parent.until_queued(1 + 36)
            await parent.resume()
            bodies = [(await task).json() for task in greedy + seeded]
        texts = [[text_of(choice) for choice in body["choices"]] for body in bodies]
        assert texts[:6] == [[parent.text] * 3] * 6
        assert texts[6:] == texts[6:7] * 6
        assert len({parent.text, *texts[6]}) == 4
        assert len({body["id"] for body in bodies} | {parent.id}) == 13
        usage = bodies[0]["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - 1
        assert usage["completion_tokens"] % 3 == 0

    asyncio.run(test())
    served.wait_until_idle()


def test_streams_begin_with_what_the_parent_has(served: Served) -> None:
    async def test() -> None:
        async with Parent(served, "completions") as parent:
            begun = parent.text
            for _ in range(4):  # either front end aborts what a client leaves
                async with client(served, "one") as leaving:
                    path, body = f"/v1/requests/{parent.id}/fork", {"n": 2, "stream": True}
                    async with leaving.stream("POST", path, json=body) as response:
                        assert response.status_code == 200
                        first = json.loads((await anext(response.aiter_lines())).removeprefix("data: "))
                        assert first["choices"][0]["text"].startswith(begun)
        assert len(parent.text) > len(begun)

    asyncio.run(test())
    served.wait_until_idle()


REFUSED: list[tuple[str, dict[str, Any], int, str, str]] = [
    ("other", {}, 404, "request_not_found", "is running; if there was one, it has ended"),
    ("one", {"n": 0}, 400, "invalid_value", "n must be an integer from 1 to 128 (got 0)"),
    ("one", {"index": 1}, 400, "invalid_value", "index must be from 0 to 0 (got 1)"),
    ("one", {"num_tokens": 1000}, 400, "invalid_value", "num_tokens must be from 0 to "),
    ("one", {"num_tokens": 5, "max_tokens": 5}, 400, "invalid_value", "max_tokens must be at least 6: the fork"),
    ("one", {"top_p": 0.5}, 400, "unknown_parameter", "unknown field 'top_p'"),
    ("one", {"temperature": 3}, 400, "invalid_value", "temperature must be a number from 0 to 2 (got 3)"),
    ("one", {"stream_options": {}}, 400, "invalid_value", "stream_options is only allowed when stream is true"),
]


def test_refusals(served: Served) -> None:
    """Of either front end."""

    async def test() -> None:
        async with Parent(served, "completions") as parent:
            for key, body, status, code, says in REFUSED * 4:
                answer = await parent.fork(key, **body)
                error = answer.json()["error"]
                assert (answer.status_code, error["code"]) == (status, code)
                assert says in error["message"]

    asyncio.run(test())
    served.wait_until_idle()


def test_what_cannot_be_forked(served: Served) -> None:
    async def test() -> None:
        async with Parent(served, "completions") as parent:
            pass
        for key in ("one", "admin"):  # it has ended
            assert (await parent.fork(key)).json()["error"]["code"] == "request_not_found"
        assert (await parent.fork("wrong")).status_code == 401

    asyncio.run(test())
