"""Responses in the background: polled, followed, cancelled, and continued after the death of their front end."""

import asyncio
import json
import resource
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.frontend.http.app import make_app
from quire.frontend.http.dialects.responses_background import MAX_DEATHS
from quire.frontend.http.serving.peers import Peers
from quire.frontend.http.serving.server import ServerSettings
from quire.frontend.http.stored import running_responses
from quire.frontend.http.stored.response_files import ResponseFiles
from quire.frontend.http.stored.stored_response import StoredResponse

REPLY = "one two three four five"
HANGS = 3
"""Tokens after which a front end is killed."""


class FrontEnd:
    """The front end of one number; made again, it is its successor."""

    def __init__(self, engine: Any, text_in: Any, folder: Path, index: int = 0, **settings: Any) -> None:
        given = {"response_files": ResponseFiles(folder, index), "peers": Peers(folder, index, 2), **settings}
        keys = {"api_keys": ("mine", "theirs"), "served_model_names": ("tiny",)}
        self.folder = folder
        self.app = make_app(engine, ServerSettings(text_in=text_in, **keys, **given))
        transport = httpx.ASGITransport(self.app)
        self.client = httpx.AsyncClient(
            transport=transport, base_url="http://test", headers={"authorization": "Bearer mine"}
        )

    async def begin(self, **fields: Any) -> Any:
        body = {"input": "hello", "background": True, **fields}
        answer = await self.client.post("/v1/responses", json=body)
        assert answer.status_code == 200, answer.text
        return events(answer.text) if fields.get("stream") else answer.json()

    async def get(self, response_id: str, path: str = "", *, status: int = 200, **query: Any) -> Any:
        answer = await self.client.get(f"/v1/responses/{response_id}{path}", params=query)
        assert answer.status_code == status, answer.text
        return events(answer.text) if query.get("stream") and status == 200 else answer.json()

    async def cancel(self, response_id: str, status: int = 200) -> Any:
        answer = await self.client.post(f"/v1/responses/{response_id}/cancel")
        assert answer.status_code == status, answer.text
        return answer.json()

    async def ended(self, response_id: str) -> Any:
        """Return the response as a poll shows it at its end, and which statuses were seen before."""
        while (shown := await self.get(response_id))["status"] in ("queued", "in_progress"):
            await asyncio.sleep(0)
        return shown


def events(text: str) -> list[Any]:
    """Return the events, whose numbers must count up, without their end."""
    *blocks, end, rest = text.split("\n\n")
    assert (end, rest) == ("data: [DONE]", "")
    found = [json.loads(block.partition("\ndata: ")[2]) for block in blocks]
    assert all(later["sequence_number"] - event["sequence_number"] == 1 for event, later in pairwise(found))
    return found


def text_of(response: Any) -> str:
    return "".join(part["text"] for item in response["output"] for part in item["content"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "responses"


@pytest.fixture
def front_end(engine: Any, text_in: Any, folder: Path) -> Callable[..., FrontEnd]:
    engine.max_model_len = 4000
    return lambda **settings: FrontEnd(engine, text_in, folder, **settings)


async def killed(front: FrontEnd, engine: Any, **fields: Any) -> tuple[str, bytes]:
    """Begin a response with events, and end its front end after HANGS tokens as a kill does: it stores nothing more.

    Return the id of the response, and the events that its client has got.
    """
    engine.hang_after, hung, sent = HANGS, asyncio.Event(), b""
    engine.on_hang = hung.set
    before = asyncio.all_tasks()
    body = json.dumps({"input": "hello", "background": True, "stream": True, **fields}).encode()
    scope = {"type": "http", "method": "POST", "path": "/v1/responses", "query_string": b""}
    given = iter([{"type": "http.request", "body": body}])

    async def receive() -> Any:
        return next(given, None) or await asyncio.Future()

    async def send(message: Any) -> None:
        nonlocal sent
        sent += message.get("body", b"")

    request = front.app({**scope, "headers": [(b"authorization", b"Bearer mine")]}, receive, send)
    asking = asyncio.create_task(request)
    await hung.wait()
    while sent.count(b"\n\n") < HANGS + 5:
        await asyncio.sleep(0)
    dead = asyncio.all_tasks() - before
    for task in dead:
        task.cancel()
    await asyncio.gather(asking, *dead, return_exceptions=True)
    engine.hang_after = None
    return engine.added[-1].request_id.removesuffix("-0"), sent


def test_polled_to_its_end(front_end: Any, engine: Any, finish: Callable[[Awaitable[None]], None]) -> None:
    async def test() -> None:
        front = front_end()
        begun = await front.begin(metadata={"a": "b"})
        assert (begun["status"], begun["background"], begun["output"]) == ("queued", True, [])
        assert (await front.get(begun["id"], stream=True, status=400))["error"]["param"] == "stream"
        whole = await front.ended(begun["id"])
        assert (whole["status"], text_of(whole), whole["metadata"]) == ("completed", REPLY, {"a": "b"})
        assert whole["created_at"] == begun["created_at"]
        again = await front.begin(input="And?", previous_response_id=whole["id"])
        assert (await front.ended(again["id"]))["previous_response_id"] == whole["id"]
        assert len(engine.added[1].prompt) > len(engine.added[0].prompt) + len(engine.added[0].tokens)

    finish(test())


def test_events_from_any_number(front_end: Any, finish: Callable[[Awaitable[None]], None]) -> None:
    async def test() -> None:
        front = front_end()
        streamed = await front.begin(stream=True)
        kinds = [event["type"] for event in streamed]
        assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
        response = streamed[-1]["response"]
        assert (kinds[-1], text_of(response)) == ("response.completed", REPLY)
        assert await front.get(response["id"]) == response
        for after in (0, 4, len(streamed) - 1):
            answer = await front.client.get(f"/v1/responses/{response['id']}?stream=true&starting_after={after}")
            assert events(answer.text) == streamed[after + 1 :]
            assert answer.headers["content-type"].startswith("text/event-stream")
        for wrong in ("-2", "x", "9" * 20):
            refused = await front.get(response["id"], stream="true", starting_after=wrong, status=400)
            assert refused["error"]["param"] == "starting_after"

    finish(test())


def test_cancelled(front_end: Any, engine: Any, finish: Callable[[Awaitable[None]], None]) -> None:
    async def test() -> None:
        front, engine.hang_after = front_end(), HANGS
        begun = await front.begin()
        await asyncio.sleep(0)
        refused = await front.client.post("/v1/responses", json={"input": "x", "previous_response_id": begun["id"]})
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "response_not_ended")
        cancelled = await front.cancel(begun["id"])
        assert cancelled["status"] == "cancelled" and engine.added[0].aborted
        assert cancelled == await front.cancel(begun["id"]) == await front.get(begun["id"])
        plain = await front.client.post("/v1/responses", json={"input": "x", "max_output_tokens": 1})
        assert "background" in (await front.cancel(plain.json()["id"], 400))["error"]["message"]
        path = f"/v1/responses/{(await front.begin())['id']}"
        assert (await front.client.delete(path)).status_code == 200
        assert (await front.client.get(path)).status_code == 404

    finish(test())


@pytest.mark.parametrize("fields", [{}, {"include": ["message.output_text.logprobs"]}], ids=["plain", "logprobs"])
def test_continued_by_the_next_front_end(
    front_end: Any, engine: Any, fields: Any, finish: Callable[[Awaitable[None]], None]
) -> None:
    async def test() -> None:
        first = front_end()
        ended = (await first.begin(stream=True, **fields))[-1]["response"]
        response_id, seen = await killed(first, engine, **fields)
        other, second = front_end(index=1), front_end()
        for front in (other, second):  # nothing has continued it yet
            assert (await front.get(response_id))["status"] == "queued"
            await front.get(response_id, stream=True, status=503)
            await front.cancel(response_id, 503)
            assert await front.get(ended["id"]) == ended  # it has ended before
        await second.app.state.continue_responses()
        answer = await second.client.get(f"/v1/responses/{response_id}", params={"stream": True})
        assert answer.content.startswith(seen) and seen.count(b".delta\n") == HANGS == engine.added[-1].num_known
        found = events(answer.text)[-1]["response"]
        assert found == await second.get(response_id)
        assert (found["status"], text_of(found)) == ("completed", REPLY)
        logprobs = [
            [part["logprobs"] for part in item["content"]] for each in (ended, found) for item in each["output"]
        ]
        assert logprobs[0] == logprobs[1]
        assert not list(second.folder.glob("*.begun"))

    finish(test())


def test_failed_when_it_cannot_be_continued(
    front_end: Any, engine: Any, finish: Callable[[Awaitable[None]], None]
) -> None:
    async def test() -> None:
        response_id, _ = await killed(front_end(), engine)
        for _ in range(MAX_DEATHS):
            front, before = front_end(), asyncio.all_tasks()
            engine.hang_after = 0
            await front.app.state.continue_responses()
            for task in asyncio.all_tasks() - before:
                task.cancel()
        shown = await front_end().get(response_id)
        assert (shown["status"], shown["error"]["message"]) == ("failed", "3 front ends have died while it ran")

    finish(test())


async def refused(front: FrontEnd, status: int, **fields: Any) -> str:
    answer = await front.client.post("/v1/responses", json={"input": "x", "background": True, **fields})
    assert answer.status_code == status, answer.text
    return str(answer.json()["error"]["message"])


def test_limit_of_those_that_wait(front_end: Any, engine: Any, finish: Callable[[Awaitable[None]], None]) -> None:
    async def test() -> None:
        front, engine.hang_after = front_end(), 0
        before = asyncio.all_tasks()
        begun = [(await front.begin())["id"] for _ in range(2)]
        for task in asyncio.all_tasks() - before:
            task.cancel()
        front = front_end(max_num_queued_reqs_per_key=1)
        await front.app.state.continue_responses()  # those that the server has admitted
        assert [(await front.get(each))["status"] for each in begun] == ["queued"] * 2
        assert "2 sequences of this API key or address are waiting (limit 1)" in await refused(front, 429)
        for each in begun:
            await front.cancel(each)
        await front.begin()
        assert "1 sequences of" in await refused(front, 429)

    finish(test())


def test_limits(front_end: Any, engine: Any, finish: Callable[[Awaitable[None]], None], monkeypatch: Any) -> None:
    async def test() -> None:
        assert "stores no responses" in await refused(front_end(max_stored_response_bytes=0), 400)
        front, engine.hang_after = front_end(max_stored_response_bytes=2000), HANGS
        assert "background needs store" in await refused(front, 400, store=False)
        assert "context length" in await refused(front, 400, input="hello " * 5000)
        large = {"metadata": {str(i): "x" * 500 for i in range(2)}}
        begun = await front.begin(**large)
        assert "background requests may have 0 bytes more (got 1" in await refused(front, 429, **large)
        await front.cancel(begun["id"])
        monkeypatch.setattr(running_responses, "MAX_OF_TENANT", 1)
        begun = await front.begin()
        assert "1 background responses run, and at most 1 may" in await refused(front, 429)
        theirs = {"authorization": "Bearer theirs"}
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel")):
            path = f"/v1/responses/{begun['id']}{path}"
            assert (await front.client.request(method, path, headers=theirs)).status_code == 404
        await front.cancel(begun["id"])
        engine.hang_after = None
        whole = front.client.post("/v1/responses", json={"input": "x", "background": True, "stream": True})
        assert "[DONE]" not in (await whole).text  # its events exceed the memory: they are no longer kept
        assert text_of(await front.ended(engine.added[-1].request_id.removesuffix("-0"))) == REPLY

    finish(test())


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """As on a full disk: a write is cut off there."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_without_room_for_files(front_end: Any, engine: Any, finish: Callable[[Awaitable[None]], None]) -> None:
    async def test() -> None:
        front = front_end()
        begun = front.folder / f"{(await killed(front, engine))[0]}.begun"
        with largest_file(begun.stat().st_size - 1):  # room for the request, and less for its answer than that one had
            assert "no room" in await refused(front, 503, metadata={"a": "x" * 2000})
            assert text_of((await front.begin(stream=True))[-1]["response"]) == REPLY
        assert list(front.folder.iterdir()) == [begun]

    finish(test())


def test_damaged_files(front_end: Any, engine: Any, finish: Callable[[Awaitable[None]], None]) -> None:
    async def test() -> None:
        front = front_end()
        ids = [(await front.begin(stream=True))[-1]["response"]["id"], (await killed(front, engine))[0]]
        for path in front.folder.iterdir():
            path.write_bytes((4).to_bytes(4) + b"\xc0" * 99)
        for front in (front_end(index=1), front_end()):
            await front.app.state.continue_responses()
            assert [(await front.get(each, status=404))["error"]["code"] for each in ids] == ["not_found"] * 2

    finish(test())


def test_deleted_for_a_dead_front_end(front_end: Any, engine: Any, finish: Callable[[Awaitable[None]], None]) -> None:
    async def test() -> None:
        front = front_end()
        response_id, _ = await killed(front, engine)  # as it stored the response
        ResponseFiles(front.folder).write(response_id, StoredResponse(1, b"{}", (), 0, 0))
        other = front_end(index=1).client
        assert [(await other.delete(f"/v1/responses/{response_id}")).status_code for _ in range(2)] == [200, 404]
        assert not list(front.folder.iterdir())

    finish(test())
