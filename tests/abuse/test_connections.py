"""Clients that send invalid requests, too much, too slowly, or disconnect (A16, A17, A18, A47, F13)."""

import asyncio
import contextlib
import json
import random
import re
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import httpx
import pytest
from abuse import INTERNALS, AbusedServer, short
from front_end import WAIT_S, EndlessEngine, FrontEnd, post, read_all, status_of
from tiers import thinned

COMPLETIONS = "/v1/completions"
GOOD = json.dumps({"prompt": [1, 2], "max_tokens": 3}).encode()
CHUNKED = "transfer-encoding: chunked"


def body_of(**fields: Any) -> bytes:
    return json.dumps({"prompt": [1, 2], "max_tokens": 10**5, **fields}).encode()


@pytest.fixture(scope="module")
def impatient() -> Iterator[FrontEnd]:
    """A front end with time limits short enough to wait for in a test."""
    front_end = FrontEnd(head_s=0.3, body_s=0.3, rest_s=0.3, linger_s=0.3, stall_s=0.3)
    yield front_end
    front_end.check()
    front_end.close()


@pytest.fixture(scope="module")
def patient() -> Iterator[FrontEnd]:
    front_end = FrontEnd(linger_s=0.5)
    yield front_end
    front_end.check()
    front_end.close()


def wait_closed(connection: socket.socket) -> bytes:
    connection.settimeout(WAIT_S)
    with connection:
        return read_all(connection)


def check_error_message(answer: bytes) -> None:
    """Check that an error is in OpenAI's format and reveals no internals."""
    if status_of(answer) >= 400:
        error = json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert INTERNALS.search(error["message"]) is None


HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
UNFINISHED_HEADS = [
    *(b"", b"G", b"GET", b"GET /health", b"GET /health HTTP/1.1", b"GET /health HTTP/1.1\r"),
    *(b"GET /health HTTP/1.1\r\n", b"GET /health HTTP/1.1\r\nhost", b"GET /health HTTP/1.1\r\nhost: x\r\n"),
    *(b"GET /health HTTP/1.1\r\nhost: x\r\n\r", b"\r\n", b"\r\n\r\n\r\n\r\n", HEAD + b"content-length: "),
]
SAYS_CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
ONE_CHUNK = SAYS_CHUNKED + b"%x\r\n%b\r\n" % (len(GOOD), GOOD)
UNFINISHED_BODIES = [
    HEAD + b"content-length: 10\r\n\r\n",
    HEAD + b"content-length: 10\r\n\r\n{",
    HEAD + b"content-length: %d\r\n\r\n" % (len(GOOD) + 1) + GOOD,
    HEAD + b"content-length: 33554432\r\n\r\n" + b" " * 1000,
    HEAD + b"content-length: 10\r\nexpect: 100-continue\r\n\r\n",
    SAYS_CHUNKED,
    SAYS_CHUNKED + b"5",
    SAYS_CHUNKED + b"8000000000000000\r\n",
    SAYS_CHUNKED + b"%x\r\n{" % (32 * 2**20 + 1),
    SAYS_CHUNKED + b"5\r\n{",
    ONE_CHUNK,
    ONE_CHUNK + b"0\r\n",
    ONE_CHUNK + b"0\r\nx: ",
]
GET_HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
# A complete request, followed by something endless: the response must not have stopped the timer.
AFTER_ANSWERS = [
    (200, post(COMPLETIONS, GOOD)),
    (200, post(COMPLETIONS, GOOD) + b"\r\n"),
    (200, post(COMPLETIONS, GOOD) + b"POST"),
    (200, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * 3 + b"GET"),
    (404, b"GET /none HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n" + b"x" * 10),
    (405, b"DELETE /health HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n"),
    (413, b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n" + b"x" * 10),
]
UNFINISHED = [
    *[(0, data) for data in UNFINISHED_HEADS],
    *[(408, data) for data in UNFINISHED_BODIES],
    *AFTER_ANSWERS,
]


class TestSlowSenders:
    def test_unfinished_requests_are_closed(self, impatient: FrontEnd) -> None:
        """All connections run at the same time, so that the test takes as long as one of them."""
        connections = [impatient.connect(data) for _, data in UNFINISHED]
        answers = [wait_closed(connection) for connection in connections]
        for (status, data), answer in zip(UNFINISHED, answers, strict=True):
            response = answer.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
            assert status_of(response) == status, (short(data), answer)
            check_error_message(response)
        impatient.until(lambda: impatient.num_connections == 0)

    @pytest.mark.parametrize("later", [b"POST", post(COMPLETIONS, b"", length=9)], ids=short)
    def test_a_later_request_that_is_unfinished_does_not_end_the_response_before_it(self, later: bytes) -> None:
        may_answer = threading.Event()

        async def pause() -> None:
            while not may_answer.is_set():
                await asyncio.sleep(0.001)

        may_answer.set()
        front_end = FrontEnd(EndlessEngine(pause), head_s=0.1, body_s=0.1)
        may_answer.clear()
        with front_end.connect(post(COMPLETIONS, GOOD) + later) as connection:
            front_end.until(lambda: front_end.engine.live)
            wait_closed(front_end.connect(later))  # after the same limit
            may_answer.set()
            assert status_of(read_all(connection)) == 200
        front_end.check()
        front_end.close()

    @pytest.mark.parametrize(
        ("data", "byte"),
        [
            (b"", b"\n"),
            (b"GET /", b"x"),
            (b"GET /health HTTP/1.1\r\nhost: x\r\nx: ", b"x"),
            (GET_HEALTH, b"\n"),  # between two requests
            (GET_HEALTH + b"GET /", b"x"),
            (HEAD + b"content-length: 999\r\n\r\n", b"x"),
            (SAYS_CHUNKED + b"5;", b"x"),
            (ONE_CHUNK + b"0\r\nx:", b"x"),
            (HEAD + b"content-length: 99999999999\r\n\r\n", b"x"),  # after its response
            (b"GET /none HTTP/1.1\r\nhost: x\r\ncontent-length: 99999\r\n\r\n", b"x"),
            (b"GET /none HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n5;", b"x"),
        ],
        ids=short,
    )
    def test_slow_bytes_do_not_extend_the_time_limit(self, impatient: FrontEnd, data: bytes, byte: bytes) -> None:
        begun = time.monotonic()
        with impatient.connect(data) as connection, contextlib.suppress(ConnectionError):
            while True:
                if select.select([connection], [], [], 0.01)[0] and not connection.recv(65536):
                    break
                connection.send(byte)
                assert time.monotonic() < begun + WAIT_S / 2

    def test_slow_but_steady_body_is_accepted(self) -> None:
        front_end = FrontEnd(body_s=0.1, body_bytes_per_s=10)
        body = GOOD + b" " * 20
        with front_end.connect(post(COMPLETIONS, b"", "connection: close", length=len(body))) as connection:
            for at in range(0, len(body), 10):
                connection.sendall(body[at : at + 10])
                time.sleep(0.03)  # in total twice body_s
            assert status_of(read_all(connection)) == 200
        front_end.check()
        front_end.close()

    def test_a_body_must_make_progress_however_much_has_arrived(self) -> None:
        front_end = FrontEnd(body_s=0.1, body_bytes_per_s=1000)
        with front_end.connect(post(COMPLETIONS, b" " * 10**6, length=2 * 10**6)) as connection:
            begun = time.monotonic()
            assert status_of(read_all(connection)) == 408
            assert time.monotonic() < begun + WAIT_S / 2  # and not after 1000 s
        front_end.check()
        front_end.close()

    def test_idle_connections_are_closed_while_others_are_served(self, impatient: FrontEnd) -> None:
        idle = [impatient.connect(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" if i % 2 else b"") for i in range(300)]
        assert impatient.client.get("/health").status_code == 200
        impatient.check()
        for connection in idle:
            wait_closed(connection)
        impatient.until(lambda: impatient.num_connections == 0)


def chunks(size: int, body: bytes, extension: bytes = b"") -> bytes:
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x%b\r\n%b\r\n" % (len(part), extension, part) for part in parts)


LONG = b'{"prompt": [1, 2], "max_tokens": 3, "user": "' + b"x" * 3_000_000 + b'"}'
END = b"0\r\n\r\n"
FULL = pytest.mark.full
# (data, status). Large data are functions, called in the test.
BODIES: list[Any] = [
    (post(COMPLETIONS, GOOD, CHUNKED) + END, 400),  # GOOD is not a chunk
    pytest.param(lambda: post(COMPLETIONS, b"", CHUNKED) + chunks(6, LONG) + END, 200, marks=FULL),
    (post(COMPLETIONS, b"", CHUNKED) + chunks(1, GOOD) + END, 200),
    pytest.param(lambda: post(COMPLETIONS, b"", CHUNKED) + chunks(1, LONG) + END, 400, marks=FULL),
    (lambda: post(COMPLETIONS, b"", CHUNKED) + chunks(60, LONG, b";x=" + b"y" * 200) + END, 400),
    (post(COMPLETIONS, b"", CHUNKED) + b"5;" + b"y" * 2_000_000 + b"\r\nhello\r\n" + END, 400),
    (post(COMPLETIONS, b"", CHUNKED) + chunks(99, GOOD) + b"0\r\n" + b"x: y\r\n" * 100_000 + b"\r\n", 400),
    (post(COMPLETIONS, b"", CHUNKED) + chunks(99, GOOD) + b"0\r\nx: " + b"y" * 2_000_000 + b"\r\n\r\n", 400),
    (post(COMPLETIONS, b"", CHUNKED) + chunks(99, GOOD) + b"0\r\nhost: y\r\nauthorization: x\r\n\r\n", 200),
    (post(COMPLETIONS, b"", CHUNKED) + chunks(99, GOOD) + b"0\r\ncontent-length: 7\r\n\r\n", 400),
    (post(COMPLETIONS, b"", CHUNKED) + b"zz\r\nhello\r\n" + END, 400),
    (post(COMPLETIONS, b"", CHUNKED) + b"-1\r\nhello\r\n" + END, 400),
    (post(COMPLETIONS, b"", CHUNKED) + b"ffffffffffffffffff\r\nhello\r\n" + END, 400),
    (post(COMPLETIONS, b"", CHUNKED) + b"5\r\nhello and more\r\n" + END, 400),
    (post(COMPLETIONS, b"", CHUNKED, "content-length: 5") + chunks(99, GOOD) + END, 400),
    (post(COMPLETIONS, b"", "transfer-encoding: chunked, identity") + chunks(99, GOOD) + END, 400),
    (post(COMPLETIONS, b"", "transfer-encoding: gzip") + GOOD, 400),
    (post(COMPLETIONS, GOOD, "content-length: 7"), 400),
    (post(COMPLETIONS, GOOD, "content-length: 7", length=7), 400),
    (post(COMPLETIONS, GOOD, length=-1), 400),
    (HEAD + b"content-length: 1e3\r\n\r\n" + GOOD, 400),
    (post(COMPLETIONS, GOOD, length=2**40), 413),
    (post(COMPLETIONS, GOOD, length=32 * 2**20 + 1), 413),
    (post(COMPLETIONS, GOOD, "expect: 100-continue", length=32 * 2**20 + 1), 413),
    (lambda: post(COMPLETIONS, b" " * (32 * 2**20 + 1)), 413),
    (lambda: post(COMPLETIONS, b"", CHUNKED) + chunks(2**20, b" " * (34 * 2**20)) + END, 413),
    (post(COMPLETIONS, GOOD, length=3), 400),  # the rest is parsed as the next request
    (post(COMPLETIONS, b""), 400),
    (post("/health", GOOD), 405),
    (post("/none", LONG), 404),
]


class TestBodies:
    @pytest.mark.parametrize(("data", "status"), thinned(BODIES, keep=8), ids=range(len(BODIES)))
    def test_malformed_body(self, patient: FrontEnd, data: bytes | Callable[[], bytes], status: int) -> None:
        with patient.connect() as connection:
            connection.settimeout(WAIT_S)
            answer = exchange(connection, data() if callable(data) else data)
        assert status_of(answer) == status, answer[:500]
        check_error_message(answer)

    def test_server_still_works(self, patient: FrontEnd) -> None:
        patient.check()


def exchange(connection: socket.socket, data: bytes) -> bytes:
    """Send ``data`` until the server responds or closes; return the first part of the response."""
    unsent = memoryview(data)
    connection.setblocking(False)
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        readable, writable, _ = select.select([connection], [connection] if unsent else [], [], 0.1)
        if readable:
            try:
                return connection.recv(65536)
            except ConnectionError:
                return b""
        if writable:
            try:
                unsent = unsent[connection.send(unsent[: 2**18]) :]
            except ConnectionError:
                unsent = unsent[:0]
    raise AssertionError("no response")


def endless(prefix: bytes, unit: bytes) -> Iterator[bytes]:
    yield prefix
    while True:
        yield unit * (2**17 // len(unit))


GET = b"GET /health HTTP/1.1\r\nhost: x\r\n"
HEADS = [
    (GET + b"x: ", b"y"),
    (GET + b"x", b"y"),
    (GET, b"x: y\r\n"),
    (GET, b"x:\r\n"),
    (GET, b"authorization: Bearer x\r\n"),
    (GET, b"content-length: 5\r\n"),
    (GET + b"x: y\r\n", b"\tfolded\r\n"),
    (GET + b"x: ", b" "),
    (GET + b"x: ", b"\x00"),
    (GET + b"x: ", b"\xff"),
    (GET + b"cookie: ", b"a=b; "),
    (GET, b"\x80: y\r\n"),
    (b"GET /", b"x"),
    (b"GET /?", b"x=y&"),
    (b"GET ", b"/"),
    (b"GET /", b"%2e"),
    (b"", b"G"),
    (b"", b"\x16\x03\x01\x02\x00"),  # TLS
    (b"", b"\x00"),
    (b"GET /health HTTP/1.", b"1"),
    (b"GET /health ", b" "),
]


class TestHeads:
    @pytest.mark.parametrize(("prefix", "unit"), thinned(HEADS, keep=4), ids=short)
    def test_endless_head_is_refused(self, patient: FrontEnd, prefix: bytes, unit: bytes) -> None:
        """Refused for its content or its size, long before the offered gigabyte is sent."""
        sent, answer = 0, b""
        with patient.connect() as connection:
            try:
                for part in endless(prefix, unit):
                    if select.select([connection], [], [], 0)[0]:
                        answer = connection.recv(65536)
                        break
                    connection.sendall(part)
                    sent += len(part)
                    assert sent < 2**26
            except ConnectionError:
                pass
        assert status_of(answer) in (0, 400, 431), answer
        check_error_message(answer)

    def test_line_breaks_without_a_request_time_out(self, impatient: FrontEnd) -> None:
        with impatient.connect() as connection, pytest.raises(ConnectionError):
            deadline = time.monotonic() + WAIT_S
            while time.monotonic() < deadline:
                connection.sendall(b"\r\n" * 1000)

    @pytest.mark.parametrize(
        ("head", "status"),
        [
            (GET + b"".join(b"x%d: y\r\n" % i for i in range(101)) + b"\r\n", 431),
            (GET + b"".join(b"x%d: y\r\n" % i for i in range(3000)) + b"\r\n", 431),
            (GET + b"x: " + b"y" * 65_600 + b"\r\n\r\n", 431),
            (b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", 431),
            (b"GET /health?" + b"x" * 9000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", 431),
            (GET + b"".join(b"x%d: y\r\n" % i for i in range(98)) + b"connection: close\r\n\r\n", 200),
            (b"GET /health?a=b HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n", 200),
        ],
        ids=short,
    )
    def test_odd_but_complete_head(self, patient: FrontEnd, head: bytes, status: int) -> None:
        assert status_of(patient.ask(head)) == status

    def test_pipelined_requests_are_answered_in_order(self, patient: FrontEnd) -> None:
        one = post(COMPLETIONS, GOOD)
        last = post(COMPLETIONS, GOOD, "connection: close")
        answer = patient.ask(one * 4 + b"GET /none HTTP/1.1\r\nhost: x\r\n\r\n" + last)
        statuses = [part[:3] for part in answer.split(b"HTTP/1.1 ")[1:]]
        assert statuses == [b"200"] * 4 + [b"404", b"200"]

    @pytest.mark.parametrize("num_more", [1, 500])
    def test_one_pipelined_request_too_many_is_refused(self, patient: FrontEnd, num_more: int) -> None:
        """The earlier ones are answered first, and nothing after it is read."""
        before = len(patient.engine.added)
        answer = patient.ask(post(COMPLETIONS, GOOD) * (9 + num_more))
        statuses = [part[:3] for part in answer.split(b"HTTP/1.1 ")[1:]]
        assert statuses == [b"200"] * 9 + [b"400"]
        assert b"at most 8 pipelined requests" in answer and b"connection: close" in answer
        assert len(patient.engine.added) == before + 9
        patient.check()

    def test_a_refused_client_cannot_send_forever(self, patient: FrontEnd) -> None:
        request = post(COMPLETIONS, body_of(stream=False))  # unanswered while the test runs
        with patient.connect(request * 10) as connection, pytest.raises(ConnectionError):
            for _ in range(10_000):
                connection.sendall(bytes(65536))
        patient.until(lambda: not patient.engine.live)

    @pytest.mark.parametrize(
        ("head", "says"),
        [
            ("GET /health HTTP/1.1", "one Host header (got 0)"),
            ("GET /health HTTP/1.1|host: x|host: x", "one Host header (got 2)"),
            ("GET /health HTTP/1.0|host: x|Host: y", "one Host header (got 2)"),
            ("GET /health", "HTTP version must be 1.0 or 1.1"),
            ("POST /v1/completions HTTP/1.0|host: x|transfer-encoding: chunked", "transfer-encoding must be chunked"),
            ("POST /v1/completions HTTP/1.1|host: x|transfer-encoding: gzip, chunked", "transfer-encoding must be"),
            ("POST /v1/completions HTTP/1.1|host: x|transfer-encoding: chunked, chunked", ""),
            ("POST /v1/completions HTTP/1.1|host: x|transfer-encoding: gzip|transfer-encoding: chunked", ""),
            ("POST /v1/completions HTTP/1.1|host: x|transfer-encoding: chunked|transfer-encoding: chunked", ""),
        ],
    )
    def test_ambiguous_head_is_refused(self, patient: FrontEnd, head: str, says: str) -> None:
        before = len(patient.engine.added)
        body = chunks(9, GOOD) + END if "chunked" in head else b""
        answer = patient.ask(head.replace("|", "\r\n").encode() + b"\r\n\r\n" + body)
        assert status_of(answer) == 400 and says.encode() in answer, answer
        check_error_message(answer)
        assert len(patient.engine.added) == before


def mutated(seed: int) -> bytes:
    """Return a few pipelined requests with bytes changed, deleted, duplicated or moved."""
    rng = random.Random(seed)
    requests = [post(COMPLETIONS, GOOD), post(COMPLETIONS, b"", CHUNKED) + chunks(9, GOOD) + END, GET + b"\r\n"]
    data = bytearray(b"".join(rng.choices(requests, k=rng.randint(1, 3))))
    for _ in range(rng.randint(1, 8)):
        at, end = sorted(rng.choices(range(len(data) + 1), k=2))
        end = min(end, at + rng.choice((0, 1, 2, 8, 40)))
        match rng.randrange(6):
            case 0:
                del data[at:end]
            case 1:
                data[at:end] = rng.randbytes(end - at)
            case 2:
                data[at:at] = data[at:end]
            case 3:
                data[at:end] = rng.choice((b"\r\n", b"\n", b"\r", b"\x00", b" ", b":", b"0", b"chunked", b"\xff\xfe"))
            case 4:
                data[at:end] = data[at:end].swapcase()
            case _:
                data[at : at + 1] = bytes([rng.randrange(256)])
    return bytes(data)


@pytest.mark.parametrize("seeds", thinned([range(at, at + 50) for at in range(0, 400, 50)], keep=1), ids=str)
def test_corrupted_request_bytes(impatient: FrontEnd, seeds: range) -> None:
    """Each connection is closed, after a valid HTTP response or none; errors reveal no internals."""
    connections = [impatient.connect(mutated(seed)) for seed in seeds]
    for seed, connection in zip(seeds, connections, strict=True):
        answer = wait_closed(connection).removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
        assert status_of(answer) in (0, 200, 400, 403, 404, 405, 408, 413, 422, 431), (seed, answer[:300])
        errors = re.findall(rb'"message":"(.*?)","type"', answer)
        assert not any(INTERNALS.search(message.decode()) for message in errors), (seed, errors)
    impatient.check()


def close(connection: socket.socket) -> None:
    connection.close()


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def half_close(connection: socket.socket) -> None:
    connection.shutdown(socket.SHUT_WR)


def garble(connection: socket.socket) -> None:
    connection.sendall(b"\x00garbage\r\n\r\n")


def send_another_and_close(connection: socket.socket) -> None:
    connection.sendall(post(COMPLETIONS, body_of()))
    connection.close()


def announce_another_and_reset(connection: socket.socket) -> None:
    connection.sendall(post(COMPLETIONS, body_of(), length=10**6))
    reset(connection)


LEAVE = (close, reset, half_close, garble, send_another_and_close, announce_another_and_reset)


class TestDisconnect:
    """A disconnect aborts all requests of the connection, also pipelined ones."""

    @pytest.mark.parametrize("leave", thinned(LEAVE, keep=2))
    @pytest.mark.parametrize("num_seen", thinned([0, 1, 40], keep=2))
    @pytest.mark.parametrize(
        "fields", [{}, {"stream": True}, {"stream": True, "n": 3}, {"prompt": [[1], [2]]}], ids=str
    )
    def test_disconnect_aborts_sequences(
        self, patient: FrontEnd, fields: dict[str, Any], num_seen: int, leave: Callable[[socket.socket], None]
    ) -> None:
        patient.until(lambda: not patient.engine.live)
        before = len(patient.engine.added)
        connection = patient.connect(post(COMPLETIONS, body_of(**fields)))
        patient.until(lambda: len(patient.engine.added) > before)
        patient.until(lambda: max(each.delivered for each in patient.engine.added[before:]) >= num_seen)
        leave(connection)
        patient.until(lambda: not patient.engine.live)
        delivered = [each.delivered for each in patient.engine.added[before:]]
        assert all(each.aborted for each in patient.engine.added[before:]) and max(delivered) < 10**5
        connection.close()

    @pytest.mark.parametrize("leave", [close, reset, half_close])
    def test_disconnect_within_the_body(self, patient: FrontEnd, leave: Callable[[socket.socket], None]) -> None:
        before = len(patient.engine.added)
        for cut in range(0, 200, 10):
            connection = patient.connect(post(COMPLETIONS, body_of(user="x" * 200))[: 50 + cut])
            leave(connection)
            connection.close()
        patient.check()
        assert len(patient.engine.added) == before + 1  # the canary request

    def test_server_still_works(self, patient: FrontEnd) -> None:
        patient.check()


@pytest.mark.full
class TestRealServer:
    """With the engine's processes: blocks of a disconnected client are freed."""

    LONG: ClassVar[dict[str, Any]] = {"prompt": [5, 6, 7], "max_tokens": 2000, "ignore_eos": True, "stream": True}

    def connect(self, server: AbusedServer, data: bytes, receive_buffer: int = 65536) -> socket.socket:
        url = httpx.URL(server.served.url)
        made = socket.socket()
        made.settimeout(WAIT_S)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        made.connect((url.host, url.port))
        made.sendall(data)
        return made

    def test_slow_reader_frees_blocks(self, server: AbusedServer) -> None:
        before = server.served.metrics()
        body = json.dumps({**self.LONG, "logprobs": 20}).encode()
        with self.connect(server, post(COMPLETIONS, body), receive_buffer=4096):
            while server.served.metrics()["quire:slow_readers_total"] == before["quire:slow_readers_total"]:
                pass
            after = server.served.wait_until_idle()
        tokens = after["quire:generation_tokens_total"] - before["quire:generation_tokens_total"]
        assert 256 < tokens < 1500
