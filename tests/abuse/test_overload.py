"""Overload: too many connections, file descriptors, waiting sequences; too little memory (A48, F18, F24, F25)."""

import asyncio
import contextlib
import json
import resource
import select
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import msgspec
import psutil
import pytest
from abuse import AbusedServer, check_error
from front_end import WAIT_S, EndlessEngine, FrontEnd, post, read_all, status_of
from tiers import thinned

from quire.frontend.http.schema.errors import ApiError, ClientDisconnected
from quire.frontend.http.serving.body_budget import BodyBudget
from quire.frontend.http.serving.gate import OPEN_PATHS, Gate
from quire.protocol.wire.front_end_messages import Statistics

COMPLETIONS = "/v1/completions"
GET_MODELS = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
KEYS = ("first", "second", "third")


def body_of(**fields: Any) -> bytes:
    return json.dumps({"prompt": [1, 2], "max_tokens": 10**5, **fields}).encode()


class PausedEngine(EndlessEngine):
    """An engine that generates no token while it is paused."""

    def __init__(self) -> None:
        self._running = threading.Event()
        super().__init__(pause=self._wait)

    async def _wait(self) -> None:
        while not self._running.is_set():
            await asyncio.sleep(0.002)
        await asyncio.sleep(0)

    def pause_tokens(self, paused: bool) -> None:
        (self._running.clear if paused else self._running.set)()


@pytest.fixture(scope="module")
def narrow() -> Iterator[FrontEnd]:
    front_end = FrontEnd(connections=20, spare_connections=4, client_share=1.0)
    yield front_end
    front_end.check()
    front_end.close()


class TestConnections:
    @pytest.fixture
    def full(self) -> Iterator[FrontEnd]:
        """An engine that is paused, so that requests stay unanswered."""
        engine = PausedEngine()
        engine.pause_tokens(False)
        front_end = FrontEnd(engine, connections=20, spare_connections=4, client_share=1.0)
        engine.pause_tokens(True)
        yield front_end
        engine.pause_tokens(False)
        front_end.check()
        front_end.close()

    def test_beyond_the_limit_only_open_routes_are_served(self, full: FrontEnd) -> None:
        with contextlib.ExitStack() as stack:
            for _ in range(20):
                stack.enter_context(full.connect(post(COMPLETIONS, body_of(stream=True))))
            full.until(lambda: len(full.engine.live) == 20)
            for path in OPEN_PATHS:
                assert full.client.get(path).status_code == 200
            for path in ("/v1/models", "/version", "/none"):
                refused = full.client.get(path)
                assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
                assert check_error(refused)["code"] == "too_many_connections"
            large = full.client.post(COMPLETIONS, content=body_of(user="x" * 10**6))
            assert large.status_code == 503
        full.until(lambda: full.num_connections == 0)

    def test_beyond_the_spare_connections_nothing_is_served(self, full: FrontEnd) -> None:
        with contextlib.ExitStack() as stack:
            for _ in range(20):
                stack.enter_context(full.connect(post(COMPLETIONS, body_of(stream=True))))
            full.until(lambda: len(full.engine.live) == 20)
            spare = [stack.enter_context(full.connect()) for _ in range(4)]
            full.until(lambda: full.num_connections == 24)
            assert [full.ask(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n") for _ in range(50)] == [b""] * 50
            spare[0].sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            assert status_of(read_all(spare[0])) == 200
        full.until(lambda: full.num_connections == 0)

    @pytest.mark.parametrize("data", [b"", b"GET /v1/models HTTP/1.1\r\nhost: x\r\n", GET_MODELS])
    def test_idle_connections_make_room(self, full: FrontEnd, data: bytes) -> None:
        """The oldest first: connections that are silent, slow, or wait for their next request."""
        with contextlib.ExitStack() as stack:
            streams = [stack.enter_context(full.connect(post(COMPLETIONS, body_of(stream=True)))) for _ in range(5)]
            full.until(lambda: len(full.engine.live) == 5)
            idle = [stack.enter_context(full.connect(data)) for _ in range(15)]
            full.until(lambda: full.num_connections == 20)
            assert [full.client.get("/v1/models").status_code for _ in range(10)] == [200] * 10
            assert read_all(idle[0]).count(b"HTTP/1.1") == (data is GET_MODELS)
            assert len(full.engine.live) == 5, "a stream was closed"
            for stream in streams:
                stream.close()
            full.until(lambda: not full.engine.live)
        full.until(lambda: full.num_connections == 0)

    def test_one_address_leaves_a_reserve_for_others(self) -> None:
        engine = PausedEngine()
        engine.pause_tokens(False)
        front_end = FrontEnd(engine, connections=20, spare_connections=4)
        engine.pause_tokens(True)
        with contextlib.ExitStack() as stack:
            for _ in range(15):
                stack.enter_context(front_end.connect(post(COMPLETIONS, body_of(stream=True))))
            front_end.until(lambda: len(front_end.engine.live) == 15)
            assert front_end.client.get("/v1/models").status_code == 503
            assert front_end.client.get("/health").status_code == 200
            for _ in range(5):
                other = stack.enter_context(front_end.connect(source="127.0.0.2"))
                other.sendall(GET_MODELS)
                assert status_of(other.recv(1000)) == 200
        front_end.until(lambda: front_end.num_connections == 0)
        engine.pause_tokens(False)
        front_end.check()
        front_end.close()

    def test_open_routes_do_not_wait_for_bodies(self, narrow: FrontEnd) -> None:
        with contextlib.ExitStack() as stack:
            for size in range(0, 2**18, 2**14):
                stack.enter_context(narrow.connect(post(COMPLETIONS, b"x" * size, length=2**25)))
            for path in OPEN_PATHS:
                assert narrow.client.get(path).status_code == 200

    def test_concurrent_scrapes_share_one_request(self) -> None:
        """Scrapes need no key: they must not keep the scheduler busy."""
        answer = threading.Event()

        class Slow(EndlessEngine):
            async def statistics(self) -> Statistics:
                self.num_queries += 1
                while not answer.is_set():
                    await asyncio.sleep(0.001)
                return Statistics(1)

        front_end = FrontEnd(Slow())
        try:
            with ThreadPoolExecutor(20) as pool:
                scrapes = [pool.submit(front_end.client.get, "/metrics") for _ in range(20)]
                front_end.until(lambda: front_end.num_connections == 20)
                answer.set()
                assert {scrape.result().status_code for scrape in scrapes} == {200}
            assert front_end.engine.num_queries == 1
            front_end.client.get("/metrics")
            assert front_end.engine.num_queries == 2
        finally:
            front_end.close()

    def test_cancelled_scrape_does_not_affect_others(self) -> None:
        answer = threading.Event()

        class Slow(EndlessEngine):
            async def statistics(self) -> Statistics:
                while not answer.is_set():
                    await asyncio.sleep(0.001)
                return Statistics(1, num_running=7)

        front_end = FrontEnd(Slow())
        try:
            with ThreadPoolExecutor(1) as pool:
                with front_end.connect(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n"):
                    front_end.until(lambda: front_end.num_connections == 1)
                    second = pool.submit(front_end.client.get, "/metrics")
                    front_end.until(lambda: front_end.num_connections == 2)
                front_end.until(lambda: front_end.num_connections == 1)
                answer.set()
                assert "num_requests_running" in second.result().text
        finally:
            front_end.close()


class TestKeyQueues:
    @pytest.fixture
    def paused(self) -> Iterator[FrontEnd]:
        engine = PausedEngine()
        engine.pause_tokens(False)
        front_end = FrontEnd(engine, keys=KEYS, settings={"max_num_queued_reqs_per_key": 4})
        engine.pause_tokens(True)
        yield front_end
        engine.pause_tokens(False)
        front_end.check()
        front_end.close()

    def ask(self, paused: FrontEnd, key: str, **fields: Any) -> httpx.Response:
        body = {"prompt": [1], "max_tokens": 3, **fields}
        return paused.client.post(COMPLETIONS, json=body, headers={"authorization": f"Bearer {key}"})

    def queue(self, paused: FrontEnd, key: str, **fields: Any) -> socket.socket:
        before = len(paused.engine.added)
        connection = paused.connect(
            post(COMPLETIONS, body_of(**{"max_tokens": 3, **fields}), f"authorization: Bearer {key}")
        )
        paused.until(lambda: len(paused.engine.added) > before)
        return connection

    @pytest.mark.parametrize("stream", thinned([False, True], keep=1))
    @pytest.mark.parametrize(
        ("waiting", "more"),
        thinned(
            [
                *(([{}] * 4, {}), ([{}] * 3, {"n": 2}), ([{"n": 4}], {}), ([{"n": 2}, {"prompt": [[1], [2]]}], {})),
                *(([{"prompt": [[1], [2]], "n": 2}], {}), ([{}], {"n": 4}), ([{}], {"prompt": [[1], [2]], "n": 2})),
            ],
            keep=3,
        ),
        ids=str,
    )
    def test_too_many_waiting_sequences_of_a_key_are_refused(
        self, paused: FrontEnd, waiting: list[dict[str, Any]], more: dict[str, Any], stream: bool
    ) -> None:
        with contextlib.ExitStack() as stack:
            for fields in waiting:
                stack.enter_context(self.queue(paused, "second", stream=stream, **fields))
            before = len(paused.engine.added)
            for _ in range(10):
                refused = self.ask(paused, "second", stream=stream, **more)
                assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
                error = check_error(refused)
                assert (error["code"], error["type"]) == ("rate_limit_exceeded", "rate_limit_error")
            assert len(paused.engine.added) == before, "a sequence was submitted"
            with self.queue(paused, "third"):  # another key is not limited
                paused.engine.pause_tokens(False)
            paused.until(lambda: not paused.engine.live)
        assert self.ask(paused, "second", **more).status_code == 200

    def test_running_sequences_do_not_count_as_waiting(self, paused: FrontEnd) -> None:
        with contextlib.ExitStack() as stack:
            for _ in range(4):
                stack.enter_context(self.queue(paused, "first", max_tokens=10**5))
            paused.engine.pause_tokens(False)
            paused.until(lambda: all(each.delivered for each in paused.engine.live))
            assert [self.ask(paused, "first").status_code for _ in range(8)] == [200] * 8

    @pytest.mark.parametrize("stream", [False, True])
    def test_disconnect_removes_waiting_sequences(self, paused: FrontEnd, stream: bool) -> None:
        for _ in range(5):
            connections = [self.queue(paused, "first", stream=stream) for _ in range(4)]
            assert self.ask(paused, "first").status_code == 429
            for connection in connections:
                connection.close()
            paused.until(lambda: not paused.engine.live)

    def test_single_request_over_the_limit_is_refused(self, paused: FrontEnd) -> None:
        for fields in ({"n": 5}, {"prompt": [[1]] * 5}, {"prompt": [[1], [2], [3]], "n": 2}, {"n": 128}):
            refused = self.ask(paused, "first", **fields)
            assert refused.status_code == 400 and check_error(refused)["param"] == "n"

    def test_refusals_and_failures_remove_waiting_sequences(self, paused: FrontEnd) -> None:
        paused.engine.pause_tokens(False)
        for _ in range(10):
            assert self.ask(paused, "first", prompt=[10**6]).status_code == 400
            assert self.ask(paused, "first", n=0).status_code == 400
            assert self.ask(paused, "first", n=4).status_code == 200

    def test_default_has_no_limit_on_waiting(self) -> None:
        engine = PausedEngine()
        engine.pause_tokens(False)
        front_end = FrontEnd(engine, keys=KEYS)
        engine.pause_tokens(True)
        try:
            with contextlib.ExitStack() as stack:
                for _ in range(30):
                    stack.enter_context(front_end.connect(post(COMPLETIONS, body_of(), "authorization: Bearer first")))
                front_end.until(lambda: len(engine.live) == 30)
        finally:
            engine.pause_tokens(False)
            front_end.check()
            front_end.close()


class TestBodies:
    """The limit on the bodies of all requests without a response, exact to the byte."""

    @pytest.mark.parametrize("ending", thinned(["response", "error", "disconnect"], keep=2))
    @pytest.mark.parametrize("pieces", [[100], [50, 50], [1] * 100, [99, 1, 0], [0, 100, 0]], ids=len)
    def test_total_body_bytes_are_limited_and_released(self, pieces: list[int], ending: str) -> None:
        statuses: list[int] = []
        release = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            for _ in pieces:
                await receive()
            await release.wait()
            if ending == "response":
                await send({"type": "http.response.start", "status": 200, "headers": []})
                await send({"type": "http.response.body", "body": b""})
            else:
                raise ClientDisconnected if ending == "disconnect" else ValueError("inside")

        async def request(gate: Gate) -> None:
            left = iter(pieces)

            async def receive() -> Any:
                return {"type": "http.request", "body": b"x" * next(left), "more_body": True}

            async def send(message: Any) -> None:
                if message["type"] == "http.response.start":
                    statuses.append(message["status"])

            scope = {"type": "http", "path": "/", "query_string": b"", "headers": []}
            await gate(scope, receive, send)

        async def scenario() -> None:
            gate = Gate(app, bodies=BodyBudget(400, free_bytes=0))  # two bodies leave as much as they need
            for _ in range(5):
                release.clear()
                statuses.clear()
                requests = [asyncio.create_task(request(gate)) for _ in range(2)]
                await asyncio.sleep(0)
                await request(gate)
                assert statuses == [503]
                release.set()
                await asyncio.gather(*requests)
                assert statuses[1:] == {"response": [200] * 2, "error": [500] * 2, "disconnect": []}[ending]

        asyncio.run(scenario())

    def test_long_pieces_of_bodies_take_turns(self) -> None:
        """So that streams wait for one of them at a time, and not for those of all connections."""
        sizes, received, most_at_once = (100, 200_000, 200_000, 100), 0, 0

        async def app(scope: Any, receive: Any, send: Any) -> None:
            for _ in sizes:
                await receive()

        async def request(gate: Gate) -> None:
            left = iter(sizes)

            async def receive() -> Any:
                nonlocal received
                size = next(left)
                received += size > 100
                return {"type": "http.request", "body": b"x" * size, "more_body": True}

            await gate({"type": "http", "path": "/", "query_string": b"", "headers": []}, receive, receive)

        async def scenario() -> None:
            nonlocal most_at_once
            gate = Gate(app)
            requests = [asyncio.create_task(request(gate)) for _ in range(20)]
            await asyncio.sleep(0)  # the first piece of each, which came with its head
            while received < 2 * len(requests):
                before = received
                await asyncio.sleep(0)
                most_at_once = max(most_at_once, received - before)
            await asyncio.gather(*requests)

        asyncio.run(scenario())
        assert most_at_once == 1

    def test_large_bodies_of_one_client_leave_room_for_others(self) -> None:
        budget = BodyBudget(100, free_bytes=10)

        def taken(client: str, size: int) -> bool:
            try:
                budget.take(client, 10, size)
            except ApiError as error:
                assert (error.status, error.code) == (503, "too_many_bodies")
                return False
            return True

        assert taken("a", 50) and not taken("a", 1)
        assert taken("b", 25) and not taken("b", 1) and not taken("a", 1)
        assert taken("c", 12)
        for client in "abcd":
            budget.take(client, 0, 10)  # small bodies are never refused
        budget.release("a", 60)
        budget.release("b", 35)
        budget.release("c", 22)
        assert taken("a", 50)

    def test_small_bodies_do_not_wait_for_large_ones(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A client holds as many unfinished large bodies as it can; others, and its own small ones, are served."""
        budget = BodyBudget(2**20)
        monkeypatch.setattr("quire.frontend.http.serving.gate.BodyBudget", lambda: budget)
        front_end = FrontEnd()
        with contextlib.ExitStack() as stack:
            for _ in range(20):
                part = b" " * 2**17
                stack.enter_context(front_end.connect(post(COMPLETIONS, part, length=2**25)))
            front_end.until(lambda: budget._left < 2**19 + 2**17)
            for source in ("127.0.0.1", "127.0.0.2"):
                small = stack.enter_context(front_end.connect(post(COMPLETIONS, body_of(max_tokens=1)), source=source))
                assert status_of(small.recv(1000)) == 200
            large = body_of(max_tokens=1, user="x" * 300_000)
            for source, status in (("127.0.0.1", 503), ("127.0.0.2", 200)):
                sent = stack.enter_context(front_end.connect(post(COMPLETIONS, large), source=source))
                assert status_of(sent.recv(1000)) == status, source
        front_end.check()
        front_end.close()

    @pytest.mark.full
    @pytest.mark.slow  # half a gigabyte
    def test_over_sockets(self) -> None:
        front_end = FrontEnd(rest_s=0.2)
        try:
            with contextlib.ExitStack() as stack:
                for _ in range(20):
                    connection = stack.enter_context(front_end.connect(post(COMPLETIONS, b"", length=30 * 2**20)))
                    connection.setblocking(False)
                    left = memoryview(bytes(29 * 2**20))
                    with contextlib.suppress(ConnectionError):
                        while left:
                            select.select([], [connection], [], WAIT_S)
                            left = left[connection.send(left[: 2**20]) :]
                assert front_end.client.get("/health").status_code == 200
                refused = front_end.client.post(COMPLETIONS, content=body_of(user="x" * 28 * 2**20))
                assert refused.status_code == 503 and check_error(refused)["code"] == "too_many_bodies"
            front_end.check()
            assert (
                front_end.client.post(COMPLETIONS, content=body_of(max_tokens=1, user="x" * 2**20)).status_code == 200
            )
        finally:
            front_end.close()


class TestCollectedOutput:
    """A response that is not streamed is kept in memory until it is complete: log probabilities are limited."""

    @pytest.mark.parametrize(
        ("fields", "most", "status"),
        [
            ({"max_tokens": 10, "logprobs": 3}, 40, 200),
            ({"max_tokens": 10, "logprobs": 3}, 39, 400),
            ({"max_tokens": 10, "logprobs": 3, "n": 4}, 160, 200),
            ({"max_tokens": 10, "logprobs": 3, "n": 4}, 159, 400),
            ({"max_tokens": 10, "logprobs": 3, "prompt": [[1], [2]]}, 79, 400),
            ({"max_tokens": 1000, "logprobs": 20}, 1000, 400),
            ({"max_tokens": 1000, "logprobs": 0}, 1000, 200),
            ({"max_tokens": 1000}, 0, 200),
            (
                {"max_tokens": 200, "logprobs": 20, "stream": True},
                0,
                200,
            ),  # limited by the unsent data of a stream instead
            ({"max_tokens": 1, "prompt_logprobs": 1, "prompt": [7] * 101}, 200, 200),
            ({"max_tokens": 1, "prompt_logprobs": 1, "prompt": [7] * 101}, 199, 400),
            ({"max_tokens": 1, "prompt_logprobs": 1, "prompt": [[7] * 101] * 2}, 399, 400),
        ],
        ids=str,
    )
    def test_too_many_logprobs(
        self, narrow: FrontEnd, fields: dict[str, Any], most: int, status: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("quire.frontend.http.routes.generate.MAX_COLLECTED_VALUES", most)
        response = narrow.client.post(COMPLETIONS, json={"prompt": [1], **fields})
        assert response.status_code == status, response.text[:500]
        if status == 400:
            assert check_error(response)["param"] in fields
        narrow.until(lambda: not narrow.engine.live)

    def test_too_many_prompt_logprobs_are_refused_before_they_are_computed(self, narrow: FrontEnd) -> None:
        before = len(narrow.engine.added)
        fields = {"prompt": [7] * 1000, "n": 128, "max_tokens": 1, "prompt_logprobs": 20, "echo": True}
        response = narrow.client.post(COMPLETIONS, json=fields)
        assert response.status_code == 400
        assert "log probabilities of a response" in check_error(response)["message"]
        assert len(narrow.engine.added) == before

    @pytest.mark.parametrize(
        "fields",
        thinned(
            [
                {"max_tokens": 500, "logprobs": 20},
                {"prompt": [7] * 500, "max_tokens": 1, "prompt_logprobs": 20},
                {"prompt": [7] * 500, "max_tokens": 1, "echo": True, "logprobs": 20, "stream": True},
            ],
            keep=1,
        ),
        ids=str,
    )
    def test_many_logprobs_are_formatted_beside_the_event_loop(
        self, narrow: FrontEnd, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        threads: list[str] = []
        encode = msgspec.json.encode

        def watched(value: Any) -> bytes:
            body = encode(value)
            if len(body) > 10_000:
                threads.append(threading.current_thread().name)
            return body

        monkeypatch.setattr("msgspec.json.encode", watched)
        assert narrow.client.post(COMPLETIONS, json={"prompt": [1], **fields}).status_code == 200
        assert threads and all(name.startswith(("long", "huge")) for name in threads), threads

    def test_a_long_response_is_written_in_parts(self, narrow: FrontEnd, monkeypatch: pytest.MonkeyPatch) -> None:
        fields = {"prompt": [1], "max_tokens": 500, "logprobs": 20}
        whole = narrow.client.post(COMPLETIONS, json=fields)
        monkeypatch.setattr("quire.frontend.http.routes.generate.WRITE_BYTES", 1000)
        parts = narrow.client.post(COMPLETIONS, json=fields)
        assert parts.json()["choices"] == whole.json()["choices"]
        assert int(parts.headers["content-length"]) == len(parts.content) > 1000


def front_end_of(server: AbusedServer) -> psutil.Process:
    children = psutil.Process(server.served.process.pid).children(recursive=True)
    return next(child for child in children if "quire.frontend.http" in child.cmdline())


@contextlib.contextmanager
def lowered(process: psutil.Process, kind: int, soft: int) -> Iterator[None]:
    """Lower a resource limit of a running process in the ``with`` block."""
    before = process.rlimit(kind)
    process.rlimit(kind, (soft, before[1]))
    try:
        yield
    finally:
        process.rlimit(kind, before)


@pytest.mark.full
class TestRealServer:
    STREAM: Any = {"prompt": [5, 6, 7], "max_tokens": 300, "ignore_eos": True, "stream": True}  # noqa: RUF012

    def test_without_descriptors_streams_continue_and_the_server_recovers(self, server: AbusedServer) -> None:
        process = front_end_of(server)
        url = httpx.URL(server.served.url)
        with server.client.stream("POST", COMPLETIONS, json=self.STREAM) as stream, contextlib.ExitStack() as stack:
            lines = stream.iter_lines()
            next(lines)
            with lowered(process, resource.RLIMIT_NOFILE, process.num_fds() + 3):
                crowd = [stack.enter_context(socket.create_connection((url.host, url.port), WAIT_S)) for _ in range(60)]
                for _ in range(20):
                    next(lines)
                for connection in crowd:
                    with contextlib.suppress(ConnectionError):  # accepted and closed
                        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
                # Idle connections make room for others, so that more than three may be answered one after the other.
                assert sum(map(is_answered, crowd)) < len(crowd)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        server.check()

    def test_without_memory_a_request_is_refused_and_others_continue(self, server: AbusedServer) -> None:
        process = front_end_of(server)
        body = b'{"prompt": [5], "max_tokens": 1, "user": "' + b"x" * (30 * 2**20) + b'"}'
        with server.client.stream("POST", COMPLETIONS, json=self.STREAM) as stream:
            lines = stream.iter_lines()
            next(lines)
            with lowered(process, resource.RLIMIT_AS, process.memory_info().vms + 40 * 2**20):
                with ThreadPoolExecutor(3) as pool:
                    answers = list(pool.map(lambda _: large(server, body), range(3)))
                next(lines)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert 503 in answers and set(answers) <= {200, 503, 0}, answers
        assert large(server, body) == 200
        server.check()


def is_answered(connection: socket.socket) -> bool:
    connection.settimeout(0.01)
    try:
        return status_of(connection.recv(1000)) == 200
    except (TimeoutError, ConnectionError):
        return False


def large(server: AbusedServer, body: bytes) -> int:
    try:
        response = httpx.post(server.served.url + COMPLETIONS, content=body, timeout=WAIT_S)
    except httpx.TransportError:
        return 0
    if response.status_code >= 400:
        assert check_error(response)["code"] == "out_of_memory"
    return response.status_code
