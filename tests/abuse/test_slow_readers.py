"""Clients that do not read their responses (A47, F14): how much is buffered, and whether others are affected."""

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from front_end import EndlessEngine, FrontEnd, post
from tiers import thinned

from quire.frontend.http.serving.sse import (
    MAX_UNSENT_BYTES,
    MAX_UNSENT_WRITES,
    MIN_UNSENT_WRITES,
    EventStream,
    SlowReader,
)

COMPLETIONS = "/v1/completions"
MAX_TOKENS = 10**5
# Most bytes in the kernel's two buffers and the transport's, besides the stream's own.
MAX_IN_BUFFERS = 1024 * 1024


@pytest.fixture(scope="module")
def front_end() -> Iterator[FrontEnd]:
    made = FrontEnd(head_s=0.3, stall_s=0.2, linger_s=0.1, send_buffer=16 * 1024)
    yield made
    made.check()
    made.close()


def request(**fields: Any) -> bytes:
    body = {"prompt": [1, 2], "max_tokens": MAX_TOKENS, "stream": True, **fields}
    return post(COMPLETIONS, json.dumps(body).encode())


def never(connection: socket.socket) -> bool:
    return True


def once(connection: socket.socket) -> bool:
    connection.recv(1000)
    return True


def a_byte(connection: socket.socket) -> bool:
    connection.recv(1)
    return False


def ten_bytes(connection: socket.socket) -> bool:
    connection.recv(10)
    return False


def up_to_the_first_event(connection: socket.socket) -> bool:
    return b"data: " in connection.recv(400)


READERS = (never, once, a_byte, ten_bytes, up_to_the_first_event)
REQUESTS = (
    ({}, 1),
    ({"n": 4}, 4),
    ({"prompt": [[1], [2], [3]]}, 3),
    ({"stream_options": {"include_usage": True, "continuous_usage_stats": True}}, 1),
)


class TestOverSockets:
    @pytest.mark.parametrize(("fields", "num_answers"), REQUESTS, ids=str)
    @pytest.mark.parametrize("read", thinned(READERS, keep=1))
    def test_slow_reader_is_aborted_and_others_continue(
        self, front_end: FrontEnd, read: Callable[[socket.socket], bool], fields: dict[str, Any], num_answers: int
    ) -> None:
        before, had = len(front_end.engine.added), slow_readers(front_end)
        with front_end.connect(request(**fields), receive_buffer=4096) as slow:
            front_end.until(lambda: len(front_end.engine.added) == before + num_answers)
            sequences = front_end.engine.added[before:]
            with contextlib.suppress(ConnectionError):
                while not all(each.aborted for each in sequences) and not read(slow):
                    pass
            front_end.until(lambda: all(each.aborted for each in sequences))
            front_end.check()  # while the connection is open
            # An event has at least 150 bytes, and a step makes one event per sequence.
            most_steps = MAX_UNSENT_WRITES + (MAX_UNSENT_BYTES + MAX_IN_BUFFERS) // 150
            assert max(each.delivered for each in sequences) < most_steps < MAX_TOKENS
        assert slow_readers(front_end) == had + 1
        front_end.until(lambda: front_end.num_connections == 0)

    def test_connection_of_a_slow_reader_is_closed(self, front_end: FrontEnd) -> None:
        with front_end.connect(request(), receive_buffer=4096):
            front_end.until(lambda: front_end.num_connections == 0)

    def test_cut_stream_has_no_end_marker(self, front_end: FrontEnd) -> None:
        before = len(front_end.engine.added)
        with front_end.connect(request(), receive_buffer=4096) as slow:
            front_end.until(lambda: len(front_end.engine.added) > before and not front_end.engine.live)
            received = b""
            try:
                while part := slow.recv(65536):
                    received += part
            except ConnectionError:
                pass
        assert received.startswith(b"HTTP/1.1 200")
        assert b"[DONE]" not in received and not received.endswith(b"0\r\n\r\n")

    @pytest.mark.full
    def test_unread_complete_response_is_dropped(self, front_end: FrontEnd) -> None:
        """A stream short enough to be buffered, and a response that is not streamed."""
        short = request(max_tokens=200)
        whole = request(max_tokens=20_000, stream=False)
        before = len(front_end.engine.added)
        with front_end.connect(short, 4096), front_end.connect(whole, 4096):
            front_end.until(lambda: len(front_end.engine.added) == before + 2 and not front_end.engine.live)
            front_end.until(lambda: front_end.num_connections == 0)

    def test_slow_but_steady_reader_is_served(self, front_end: FrontEnd) -> None:
        """The stream takes longer than ``stall_s``, but the reader is never behind by more than the buffers."""
        with front_end.connect(request(max_tokens=250), receive_buffer=4096) as steady:
            received, start = b"", time.monotonic()
            while not received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
                received += steady.recv(2000)
                time.sleep(0.01)
        assert time.monotonic() - start > 0.2
        assert received.count(b"data: ") == 251

    @pytest.mark.full
    def test_many_slow_readers_do_not_affect_a_fast_one(self, front_end: FrontEnd) -> None:
        with contextlib.ExitStack() as slow:
            for _ in range(20):
                slow.enter_context(front_end.connect(request(), receive_buffer=4096))
            body = {"prompt": [3], "max_tokens": 250, "stream": True}  # fewer than a reader may leave unread
            with front_end.client.stream("POST", COMPLETIONS, json=body) as response:
                lines = [line for line in response.iter_lines() if line]
            assert lines[-1] == "data: [DONE]" and len(lines) == 251
            front_end.until(lambda: not front_end.engine.live)


def slow_readers(front_end: FrontEnd) -> int:
    text = front_end.client.get("/metrics").text
    return int(float(text.split('quire:slow_readers_total{model_name="endless"} ')[1].split("\n")[0]))


class Connection:
    """A server's two ways to write a body, with a client that reads the first ``num_read`` parts."""

    def __init__(self, num_read: int) -> None:
        self.parts: list[bytes] = []
        self.more: list[bool] = []
        self._num_read = num_read

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            self.parts.append(message["body"])
            self.more.append(message["more_body"])

    def write(self, part: bytes) -> int:
        num_unsent = sum(map(len, self.parts[self._num_read :]))
        self.parts.append(part)
        return num_unsent

    def flush(self) -> None:
        pass


async def write(stream: EventStream, event: bytes, *, last: bool = False) -> None:
    work = stream.write([event], last=last)
    if work is not None:
        await work()


class TestUnsentLimit:
    """The limit on unsent data, exact to the write and the byte, without sockets."""

    @staticmethod
    def num_buffered(num_read: int, size: int, *, writes: int = 10_000) -> int:
        """Return how many writes of ``size`` bytes are buffered, beyond those read, before one raises SlowReader."""
        connection = Connection(num_read)

        async def scenario() -> None:
            stream = EventStream(connection.send, "r", connection)
            with pytest.raises(SlowReader):
                for _ in range(writes):
                    await write(stream, b"x" * (size - len(b"data: \n\n")))

        asyncio.run(scenario())
        return len(connection.parts) - num_read - 1

    @pytest.mark.parametrize("num_read", thinned([1, 2, 3, 10], keep=2))
    @pytest.mark.parametrize(
        ("size", "buffered"),
        [
            *((9, MAX_UNSENT_WRITES), (200, MAX_UNSENT_WRITES), (4096, MAX_UNSENT_WRITES), (4097, 255), (8192, 128)),
            *((100_000, 10), (MAX_UNSENT_BYTES // 4, 4), (MAX_UNSENT_BYTES // 2, MIN_UNSENT_WRITES)),
            (2 * MAX_UNSENT_BYTES, MIN_UNSENT_WRITES),
        ],
    )
    def test_limit_is_exact(self, num_read: int, size: int, buffered: int) -> None:
        assert self.num_buffered(num_read, size) == buffered

    @pytest.mark.parametrize(("size", "num_writes"), [(9, 2000), (5000, 400), (3 * MAX_UNSENT_BYTES, 10)])
    @pytest.mark.parametrize("direct", [True, False])
    def test_fast_reader_is_never_behind(self, size: int, num_writes: int, direct: bool) -> None:
        connection = Connection(10**6)

        async def scenario() -> None:
            stream = EventStream(connection.send, "r", connection if direct else None)
            for _ in range(num_writes):
                await write(stream, b"x" * size)
            await write(stream, b"[DONE]", last=True)

        asyncio.run(scenario())
        assert len(connection.parts) == num_writes + 1
        assert connection.more == [True] * (1 if direct else num_writes) + [False]

    def test_engine_faster_than_any_reader(self) -> None:
        """The event loop runs the reader between tokens, although the engine never pauses."""
        front_end = FrontEnd(EndlessEngine(pause=lambda: asyncio.sleep(0)))
        try:
            response = front_end.client.post(COMPLETIONS, json={"prompt": [1], "max_tokens": 2000, "stream": True})
            assert response.text.count("data: ") == 2001
            front_end.check()
        finally:
            front_end.close()
