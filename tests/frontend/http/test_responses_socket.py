"""The Responses API over web sockets, on real connections over a fake engine."""

import base64
import hashlib
import json
import select
import socket
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine
from front_end import FrontEnd, read_all, status_of
from tokenizers import Tokenizer
from web_sockets import BINARY, CLOSE, KEY, PATH, PING, PONG, TEXT, SocketClient, client_frame, handshake
from wsproto.frame_protocol import FrameProtocol

from quire.frontend.engine.job import Job
from quire.frontend.http.web_socket import connection
from quire.frontend.http.web_socket.connection import MAX_PENDING, text_frame
from quire.frontend.text.text_in import TextIn
from quire.protocol.errors import InvalidRequest
from quire.protocol.wire.front_end_messages import EndReason

REPLY = "one two three"
KEYS = ("secret", "other")
Connect = Callable[..., SocketClient]
MANY = connection.FREE_FRAMES + 1
BROKEN = {
    "without a mask": (b"\x81\x01x", 1002, "unmasked"),
    "compressed": (b"\xc1\x80" + bytes(4), 1002, "Reserved bit"),
    "binary": (client_frame(BINARY, b"x")[:6], 1003, "messages must be text"),
    "invalid text": (client_frame(TEXT, b"\xff"), 1007, "text must be valid UTF-8"),
    "text cut inside a character": (client_frame(TEXT, "ü".encode()[:1]), 1007, "text must be valid UTF-8"),
    "too large": (client_frame(TEXT, bytes(101))[:6], 1009, "a message must be at most"),
    "too large in all": (
        client_frame(TEXT, bytes(60), final=False) + client_frame(PING, b"") + client_frame(0, bytes(41))[:6],
        1009,
        "a message must be at most",
    ),
    "frames without data": (
        client_frame(TEXT, b"", final=False) + client_frame(0, b"", final=False) * MANY,
        1008,
        "many",
    ),
    "pings without messages": (client_frame(PING, b"") * MANY, 1008, "too many frames"),
    "close with a reserved code": (client_frame(CLOSE, (1006).to_bytes(2)), 1002, "reason"),
}
"""What a client sends, and the code and reason of the server. A frame cut to its head is refused before its data."""


def _engine(tokenizer: Tokenizer) -> Any:
    return FakeEngine(tokenizer, reply=REPLY, max_model_len=4000)


@pytest.fixture(scope="module")
def front_end(tokenizer: Tokenizer, text_in: TextIn) -> Iterator[FrontEnd]:
    settings = {"text_in": text_in, "allowed_origins": ("https://page.example",)}
    made = FrontEnd(_engine(tokenizer), keys=KEYS, linger_s=2.0, settings=settings)
    yield made
    made.close()


@pytest.fixture
def impatient(tokenizer: Tokenizer, text_in: TextIn) -> Iterator[FrontEnd]:
    limits = {"socket_s": 0.0, "socket_idle_s": 0.2, "socket_message_s": 0.1, "linger_s": 0.2}
    made = FrontEnd(_engine(tokenizer), settings={"text_in": text_in}, **limits)
    yield made
    made.close()


@pytest.fixture
def connect(front_end: FrontEnd) -> Iterator[Connect]:
    made: list[SocketClient] = []

    def connect(*headers: str, key: str = "secret", to: FrontEnd = front_end) -> SocketClient:
        made.append(SocketClient(to.connect(), f"authorization: Bearer {key}", *headers))
        return made[-1]

    yield connect
    for each in made:
        each.close()


def kinds(events: list[Any]) -> list[str]:
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return [event["type"] for event in events]


def text_of(events: list[Any]) -> str:
    text: str = events[-1]["response"]["output"][0]["content"][0]["text"]
    return text


def code_of(events: list[Any]) -> Any:
    assert kinds(events) == ["error"]
    return events[0]["error"]["code"]


def prompt(front_end: FrontEnd, tokenizer: Tokenizer) -> str:
    text: str = tokenizer.decode(front_end.engine.added[-1].prompt, skip_special_tokens=False)
    return text


class TestTurns:
    def test_events_are_those_of_a_stream(self, front_end: FrontEnd, connect: Connect) -> None:
        events = connect().turn(input="hello")
        headers = {"authorization": "Bearer secret"}
        answer = front_end.client.post(PATH, json={"input": "hello", "stream": True}, headers=headers)
        lines = [line.removeprefix("data: ") for line in answer.text.split("\n") if line.startswith("data: {")]
        assert kinds(events) == [json.loads(line)["type"] for line in lines]
        assert text_of(events) == REPLY

    def test_stored_response_is_found_over_http(self, front_end: FrontEnd, connect: Connect) -> None:
        response = connect().turn(input="hello")[-1]["response"]
        found = front_end.client.get(f"{PATH}/{response['id']}").json()
        assert found == response

    def test_continuation_sends_only_what_is_new(
        self, front_end: FrontEnd, connect: Connect, tokenizer: Tokenizer
    ) -> None:
        client = connect()
        first = client.turn(input="hello", store=False)[-1]["response"]
        second = client.turn(input="more", previous_response_id=first["id"], store=False)
        assert second[-1]["response"]["previous_response_id"] == first["id"]
        assert REPLY in (text := prompt(front_end, tokenizer)) and "hello" in text and "more" in text
        assert front_end.engine.jobs[-2:] == [Job(), Job(first["id"], hint="response")]
        # Only the newest one is kept.
        assert code_of(client.turn(input="again", previous_response_id=first["id"])) == "previous_response_not_found"

    def test_response_of_one_connection_is_not_found_elsewhere(self, front_end: FrontEnd, connect: Connect) -> None:
        client = connect()
        own = client.turn(input="hello", store=False)[-1]["response"]
        assert own["store"] is False
        assert code_of(connect().turn(input="x", previous_response_id=own["id"])) == "previous_response_not_found"
        assert front_end.client.get(f"{PATH}/{own['id']}").status_code == 404
        body = {"input": "x", "previous_response_id": own["id"]}
        assert front_end.client.post(PATH, json=body).status_code == 404
        assert front_end.client.delete(f"{PATH}/{own['id']}").status_code == 404
        assert text_of(client.turn(input="x", previous_response_id=own["id"])) == REPLY

    def test_stored_response_of_another_key_is_not_found(self, connect: Connect) -> None:
        response = connect().turn(input="hello")[-1]["response"]
        foreign = connect(key="other").turn(input="x", previous_response_id=response["id"])
        assert code_of(foreign) == "previous_response_not_found"

    def test_failed_continuation_is_forgotten(self, connect: Connect) -> None:
        client = connect()
        own = client.turn(input="hello", store=False)[-1]["response"]
        orphan = {"type": "function_call_output", "call_id": "call_unknown", "output": "x"}
        (error,) = client.turn(input=[orphan], previous_response_id=own["id"], store=False)
        assert (error["status"], error["error"]["param"]) == (400, "input[0].call_id")
        assert code_of(client.turn(input="x", previous_response_id=own["id"])) == "previous_response_not_found"

    def test_warm_up_has_no_output_and_can_be_continued(
        self, front_end: FrontEnd, connect: Connect, tokenizer: Tokenizer
    ) -> None:
        client = connect()
        tools = [{"type": "function", "name": "look", "parameters": None}]
        warm = client.turn(input=[], instructions="Be brief.", tools=tools, generate=False, store=False)
        assert kinds(warm) == ["response.created", "response.in_progress", "response.completed"]
        response = warm[-1]["response"]
        assert (response["output"], response["usage"]["output_tokens"]) == ([], 0)
        assert front_end.engine.added[-1].params.max_tokens == 1
        again = client.turn(input="hello", previous_response_id=response["id"], store=False)
        assert text_of(again) == REPLY
        assert prompt(front_end, tokenizer).count("hello") == 1

    def test_continuation_keeps_the_tokens_of_the_answer_as_they_were_sampled(
        self, tokenizer: Tokenizer, text_in: TextIn, connect: Connect, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The tokenizer would write the answer with fewer tokens than the model did."""
        engine = _engine(tokenizer)
        spelled = [tokenizer.token_to_id(tokenizer.encode(char).tokens[0]) for char in "seven"]
        assert len(tokenizer.encode("seven").ids) < len(spelled)
        monkeypatch.setattr(engine, "_tokens", lambda seed: [*spelled, 2])
        front_end = FrontEnd(engine, settings={"text_in": text_in}, linger_s=0.1)
        client = connect(to=front_end)
        for store in (False, True):
            first = client.turn(input="hello", store=store)[-1]["response"]
            so_far = [*engine.added[-1].prompt, *spelled, 2]
            second = client.turn(input="more", previous_response_id=first["id"], store=store)[-1]["response"]
            asked = engine.added[-1].prompt
            rest = "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
            assert asked == so_far + tokenizer.encode(rest).ids
            client.turn(input="x", previous_response_id=second["id"], instructions="Be brief.", store=store)
            assert engine.added[-1].prompt[: len(so_far)] != so_far  # another conversation
            assert "seven" in prompt(front_end, tokenizer)
        front_end.close()

    def test_messages_wait_for_the_answer_before(self, connect: Connect) -> None:
        client = connect()
        for number in range(MAX_PENDING):
            client.create(input=f"number {number}", metadata={"n": str(number)})
        seen: list[str] = []
        while len(seen) < MAX_PENDING:
            event = client.event()
            if event["type"] == "response.created":
                open_number = event["response"]["metadata"]["n"]
            elif event["type"] == "response.completed":
                assert event["response"]["metadata"]["n"] == open_number
                seen.append(open_number)
        assert seen == [str(number) for number in range(MAX_PENDING)]

    def test_ping_is_answered_during_a_response(self, front_end: FrontEnd, connect: Connect) -> None:
        client = connect()
        client.send(client_frame(PING, b"are you there"))
        assert client.frame() == (PONG, b"are you there")
        assert text_of(client.turn(input="hello")) == REPLY

    def test_message_in_fragments(self, front_end: FrontEnd, connect: Connect, tokenizer: Tokenizer) -> None:
        """The pieces end inside a character, and control frames lie between them."""
        client = connect()
        whole = json.dumps({"type": "response.create", "input": "größer"}, ensure_ascii=False).encode()
        cut = whole.index("ö".encode()) + 1
        client.send(client_frame(TEXT, whole[:cut], final=False) + client_frame(PING, b"1") + client_frame(PONG, b""))
        assert client.frame() == (PONG, b"1")
        last = client_frame(0, whole[cut:])
        client.send(last[:8])
        client.send(last[8:])
        assert [client.event()["type"] for _ in range(2)] == ["response.created", "response.in_progress"]
        assert "größer" in prompt(front_end, tokenizer)


@pytest.mark.parametrize("size", [0, 125, 126, 2**16 - 1, 2**16])
def test_sent_frame(size: int) -> None:
    client = FrameProtocol(client=True, extensions=[])
    client.receive_bytes(text_frame(b"x" * size))
    (frame,) = client.received_frames()
    assert (frame.payload, frame.message_finished) == ("x" * size, True)


class TestFaults:
    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"input": 5}, "input"),
            ({"temperature": 9, "input": "x"}, "temperature"),
            ({"input": "x", "background": True}, "background"),
            ({"input": "x", "stream_id": "a"}, "stream_id"),
            ({"type": "response.cancel"}, "type"),
            ({"input": "x", "tools": 5}, "tools"),
        ],
    )
    def test_bad_message_is_an_error_and_the_connection_lives(
        self, connect: Connect, fields: dict[str, Any], param: str
    ) -> None:
        client = connect()
        (error,) = client.turn(**fields)
        assert (error["status"], error["error"]["param"]) == (400, param)
        assert error["error"]["type"] == "invalid_request_error"
        assert text_of(client.turn(input="hello", stream=True, background=False)) == REPLY

    @pytest.mark.parametrize("data", [b"", b"x", b"[]", b'{"type"', b"\x00", b'"response.create"'])
    def test_message_that_is_no_object(self, connect: Connect, data: bytes) -> None:
        client = connect()
        client.send(client_frame(TEXT, data))
        assert client.event()["error"]["code"] == "invalid_json"
        assert text_of(client.turn(input="hello")) == REPLY

    def test_failure_of_the_engine(self, tokenizer: Tokenizer, text_in: TextIn, connect: Connect) -> None:
        engine = _engine(tokenizer)
        front_end = FrontEnd(engine, settings={"text_in": text_in}, linger_s=0.1)
        client = connect(to=front_end)
        engine.ending = EndReason.ERROR
        events = client.turn(input="hello")
        assert (events[-1]["type"], events[-1]["status"]) == ("error", 500)
        engine.ending = InvalidRequest("the queue is full", None, "queue_full")
        assert client.turn(input="hello")[0]["status"] == 503
        engine.ending = EndReason.STOPPED
        engine.state = "draining"
        assert code_of(client.turn(input="hello")) == "engine_unavailable"
        front_end.close()

    def test_too_many_messages_at_once(self, front_end: FrontEnd, connect: Connect) -> None:
        client = connect()
        message = client_frame(TEXT, json.dumps({"type": "response.create", "input": "x"}).encode())
        client.send(message * (MAX_PENDING + 1))
        assert client.close_code() == 1008

    @pytest.mark.parametrize("case", BROKEN)
    def test_broken_frame_closes_the_connection(
        self, connect: Connect, monkeypatch: pytest.MonkeyPatch, case: str
    ) -> None:
        monkeypatch.setattr(connection, "MAX_MESSAGE_BYTES", 100)
        client = connect()
        data, code, reason = BROKEN[case]
        client.send(data)
        while (received := client.frame())[0] == PONG:
            pass
        assert received[0] == CLOSE and int.from_bytes(received[1][:2]) == code
        assert reason in received[1][2:].decode()

    def test_too_large_message_gets_its_reason_while_it_is_sent(self, connect: Connect) -> None:
        client = connect()
        client.send(b"\x81\xff" + (2**30).to_bytes(8) + bytes(4) + bytes(2**16))
        assert client.close_code() == 1009

    @pytest.mark.parametrize(("sent", "code"), [((1001).to_bytes(2) + b"bye", 1001), (b"", 1000)])
    def test_close_is_answered(self, connect: Connect, sent: bytes, code: int) -> None:
        client = connect()
        client.send(client_frame(CLOSE, sent) + client_frame(TEXT, b"late"))
        assert client.close_code() == code

    def test_client_that_leaves_aborts_its_response(self, tokenizer: Tokenizer, text_in: TextIn) -> None:
        engine = _engine(tokenizer)
        front_end = FrontEnd(engine, settings={"text_in": text_in})
        engine.hang_after = 1
        client = SocketClient(front_end.connect())
        client.create(input="hello")
        client.event()
        client.close()
        front_end.until(lambda: engine.added[-1].aborted)
        assert front_end.num_connections <= 1
        front_end.close()

    def test_end_of_the_server(self, tokenizer: Tokenizer, text_in: TextIn, connect: Connect) -> None:
        front_end = FrontEnd(_engine(tokenizer), settings={"text_in": text_in}, linger_s=0.1)
        client = connect(to=front_end)
        assert text_of(client.turn(input="hello")) == REPLY
        front_end.uvicorn.should_exit = True
        assert client.close_code() == 1001
        front_end.close()


class TestLimits:
    def test_idle_connection(self, impatient: FrontEnd, connect: Connect) -> None:
        assert connect(to=impatient).close_code() == 1001

    def test_slow_message(self, impatient: FrontEnd, connect: Connect) -> None:
        client = connect(to=impatient)
        client.send(client_frame(TEXT, b"{", final=False))
        assert client.close_code() == 1008

    def test_old_connection(self, impatient: FrontEnd, connect: Connect) -> None:
        client = connect(to=impatient)
        assert code_of(client.turn(input="hello")) == "websocket_connection_limit_reached"
        assert client.close_code() == 1000

    @pytest.mark.full
    def test_bytes_of_messages_count_as_those_of_bodies(self, front_end: FrontEnd, connect: Connect) -> None:
        """One client can hold half of the 512 MiB."""
        clients = [connect() for _ in range(40)]
        whole = client_frame(TEXT, bytes(8 * 2**20))
        for client in clients:
            client.send(whole[:-1])
        refused, _, _ = select.select([client.connection for client in clients], [], [], 30)  # any of them
        assert {client.close_code() for client in clients if client.connection in refused} == {1013}
        for client in clients:
            client.close()
        assert text_of(connect().turn(input="hello")) == REPLY


class TestHandshake:
    @pytest.mark.parametrize(
        ("data", "status"),
        [
            (handshake(), 401),
            (handshake("authorization: Bearer wrong"), 401),
            (handshake("authorization: Bearer secret", "origin: https://evil.example"), 403),
            (handshake("authorization: Bearer secret", version="12"), 426),
            (handshake("authorization: Bearer secret", key="short"), 400),
            (handshake("authorization: Bearer secret", path="/v1/models"), 200),
            (b"GET /v1/responses HTTP/1.1\r\nhost: x\r\nauthorization: Bearer secret\r\n\r\n", 426),
        ],
    )
    def test_refusals(self, front_end: FrontEnd, data: bytes, status: int) -> None:
        with front_end.connect(data) as connection:
            connection.shutdown(socket.SHUT_WR)
            answer = read_all(connection)
        assert status_of(answer) == status
        assert (b"upgrade: websocket" in answer) == (status == 426)

    def test_host_of_a_foreign_name(self, tokenizer: Tokenizer, text_in: TextIn) -> None:
        front_end = FrontEnd(_engine(tokenizer), settings={"text_in": text_in})
        foreign = handshake().replace(b"host: 127.0.0.1", b"host: rebound.example.com")
        with front_end.connect(foreign) as connection:
            connection.shutdown(socket.SHUT_WR)
            assert status_of(read_all(connection)) == 403
        front_end.close()

    def test_allowed_page(self, connect: Connect) -> None:
        assert text_of(connect("origin: https://page.example").turn(input="hello")) == REPLY

    def test_frames_before_the_answer_are_refused(self, front_end: FrontEnd) -> None:
        early = handshake("authorization: Bearer secret") + client_frame(TEXT, b"{}")
        answer = front_end.ask(early)
        assert status_of(answer) == 400 and b"before it is accepted" in answer

    def test_key_is_answered(self, connect: Connect) -> None:
        digest = hashlib.sha1(f"{KEY}258EAFA5-E914-47DA-95CA-C5AB0DC85B11".encode()).digest()
        assert b"sec-websocket-accept: " + base64.b64encode(digest) in connect().head

    def test_client_ids_are_returned(self, connect: Connect) -> None:
        assert b"x-request-id: mine" in connect("x-request-id: mine").head

    def test_other_requests_of_the_server_are_not_affected(self, front_end: FrontEnd, connect: Connect) -> None:
        client = connect()
        client.send(client_frame(TEXT, b"{", final=False))
        assert front_end.client.get("/v1/models").status_code == 200
        assert isinstance(front_end.client, httpx.Client)
