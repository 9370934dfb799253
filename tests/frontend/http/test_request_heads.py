"""Which heads of requests are read, and where their requests end, beside h11 and nginx; and clients of HTTP/1.0."""

import asyncio
import re
import socket
from collections.abc import Iterable, Iterator
from typing import Any

import h11
import pytest
import uvicorn
from front_end import FrontEnd, post, status_of
from uvicorn.server import ServerState

from quire.frontend.http.serving.socket_protocol import BoundedHttpProtocol

NEXT = b"GET /next HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
LENGTH, CHUNKED = "content-length: 9", "transfer-encoding: chunked"
POST = f"POST / HTTP/1.1|host: x|{LENGTH}"
H2C = "connection: Upgrade, HTTP2-Settings|upgrade: h2c|http2-settings: AAMAAABkAAQAoAAAAAIAAAAA"
SOCKET = "connection: upgrade|upgrade: websocket|sec-websocket-version: 13|sec-websocket-key: MDEyMzQ1Njc4OWFiY2RlZg=="
BODY = b"GET / HTT"
"""Looks like a request."""
# Head, and whether this server, h11 and nginx 1.22.1 (by hand) read it. What others read and this server does not is
# rare, or means something else to other programs.
HEADS = [
    ("GET / HTTP/1.1|host: x", "yyy"),
    ("GET / HTTP/1.0|host: x", "yyy"),
    ("GET / HTTP/1.0", "yyy"),
    ("GET /", "nnn"),
    ("GET / HTTP/0.9|host: x", "nnn"),
    ("GET / HTTP/1.2|host: x", "nyy"),
    ("GET / HTTP/2.0|host: x", "nyn"),
    ("PRI * HTTP/2.0||SM", "nnn"),
    ("GET / http/1.1|host: x", "nnn"),
    ("get / HTTP/1.1|host: x", "nyn"),
    ("FETCH / HTTP/1.1|host: x", "nyy"),
    ("HEAD / HTTP/1.1|host: x", "yyy"),
    ("OPTIONS * HTTP/1.1|host: x", "yyn"),
    ("CONNECT x:80 HTTP/1.1|host: x", "nyn"),
    ("GET http://y/ HTTP/1.1|host: x", "yyy"),
    ("GET  / HTTP/1.1|host: x", "yny"),
    ("GET /a b HTTP/1.1|host: x", "nnn"),
    ("GET /\xe9 HTTP/1.1|host: x", "nny"),
    ("GET / HTTP/1.1", "nnn"),
    ("GET / HTTP/1.1|host: x|host: x", "nnn"),
    ("GET / HTTP/1.1|host:", "yyn"),
    ("GET / HTTP/1.1|host: x|a: \xe9\xff", "yyy"),
    ("GET / HTTP/1.1|host: x|a: b  \t", "yyy"),
    ("GET / HTTP/1.1|host: x|a:", "yyy"),
    ("GET / HTTP/1.1|host: x|: b", "nnn"),
    ("GET / HTTP/1.1|host: x|a : b", "nnn"),
    ("GET / HTTP/1.1|host: x|a: b| c", "nyn"),
    ("GET / HTTP/1.1|host: x|a", "nny"),
    ("GET / HTTP/1.1|host: x|a: \x01", "nyy"),
    (f"GET / HTTP/1.1|host: x|{LENGTH}", "yyy"),
    (POST, "yyy"),
    (f"{POST}|{LENGTH}", "nyn"),
    (f"{POST}|content-length: 8", "nnn"),
    (f"{POST}|{CHUNKED}", "nyn"),
    ("POST / HTTP/1.1|host: x|content-length: 9, 9", "nyn"),
    ("POST / HTTP/1.1|host: x|content-length: +9", "nnn"),
    ("POST / HTTP/1.1|host: x|content-length:", "nnn"),
    ("POST / HTTP/1.1|host: x|content-length: 99999999999999999999", "nnn"),
    (f"POST / HTTP/1.1|host: x|{CHUNKED}", "yyy"),
    ("POST / HTTP/1.1|host: x|transfer-encoding: gzip, chunked", "nnn"),
    ("POST / HTTP/1.1|host: x|transfer-encoding: identity", "nnn"),
    (f"POST / HTTP/1.0|host: x|{CHUNKED}", "nyn"),
    (f"{POST}|expect: 100-continue", "yyy"),
    (f"{POST}|expect: a-pony", "yyy"),
    (f"{POST}|te: trailers|connection: te", "yyy"),
    (f"{POST}|connection: keep-alive, a", "yyy"),
    (f"{POST}|connection: close, upgrade|upgrade: h2c", "yyy"),
    (f"{POST}|{H2C}", "yyy"),
    (f"POST / HTTP/1.1|host: x|{CHUNKED}|{H2C}", "yyy"),
    (f"{POST}|connection: upgrade|upgrade: TLS/1.0", "yyy"),
    (f"{POST}|{SOCKET}", "yyy"),
    (f"GET / HTTP/1.1|host: x|{LENGTH}|{SOCKET}", "yyy"),
    (f"POST / HTTP/1.0|host: x|{LENGTH}|{H2C}", "yyy"),
    (f"GET / HTTP/1.1|host: x|{H2C}", "yyy"),
    (f"{POST}|upgrade: h2c", "yyy"),
    (f"{POST}|connection: upgrade", "yyy"),
]


def bytes_of(head: str) -> bytes:
    body = b"9\r\n%b\r\n0\r\n\r\n" % BODY if "chunked" in head else BODY if "content-length" in head else b""
    return head.replace("|", "\r\n").encode("latin-1") + b"\r\n\r\n" + body


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answer with the method and the body in a header, and with a body in two parts and without a length."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message["body"], message["more_body"]
    read = b"%b %b" % (scope["method"].encode(), body)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"read", read)]})
    await send({"type": "http.response.body", "body": b"one,", "more_body": True})
    await send({"type": "http.response.body", "body": b"two"})


async def _answer(app: Any, pieces: Iterable[bytes]) -> bytes:
    loop = asyncio.get_running_loop()
    config = uvicorn.Config(app, http=BoundedHttpProtocol, ws="none", log_level="error", lifespan="off")
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    protocol = BoundedHttpProtocol(config, ServerState(), {})
    await loop.connect_accepted_socket(lambda: protocol, ours)
    for piece in pieces:
        protocol.data_received(piece)
        for _ in range(8):  # until the application waits for more
            await asyncio.sleep(0)
    answer = b""
    async with asyncio.timeout(10):
        while part := await loop.sock_recv(theirs, 65536):
            answer += part
    theirs.close()
    await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})
    return answer


def answer_of(*pieces: bytes, app: Any = echo) -> bytes:
    """Return what the server sends on a connection that gets these pieces."""
    return asyncio.run(_answer(app, pieces))


def requests_in(answer: bytes) -> list[str]:
    """Return the method and the body of each request that was read, or of a refusal."""
    return [read.decode() or "refused" for read in re.findall(rb"read: (.*?)\r\n|HTTP/1.1 400", answer)]


def requests_by_h11(data: bytes) -> list[str]:
    """Return what h11 reads, in the same form."""
    connection, found, method, body = h11.Connection(h11.SERVER), [], "", b""
    connection.receive_data(data)
    try:
        while True:
            match connection.next_event():
                case h11.Request() as request:
                    method, body = request.method.decode(), b""
                case h11.Data() as part:
                    body += part.data
                case h11.EndOfMessage():
                    found.append(f"{method} {body.decode()}")
                    connection.send(h11.Response(status_code=404, headers=[("content-length", "0")]))
                    connection.send(h11.EndOfMessage())
                    if connection.our_state is not h11.DONE:
                        return found
                    connection.start_next_cycle()
                case _:
                    return found
    except h11.RemoteProtocolError:
        return [*found, "refused"]


def meant_by(head: str) -> list[str]:
    """Return the requests that a head and NEXT are. After HTTP/1.0 or ``close`` the connection ends."""
    body = BODY.decode() if "chunked" in head or "content-length" in head else ""
    is_last = "HTTP/1.0" in head or "close" in head
    return [f"{head.split()[0]} {body}", *([] if is_last else ["GET "])]


@pytest.mark.parametrize(("head", "read_by"), HEADS)
def test_head(head: str, read_by: str) -> None:
    data = bytes_of(head) + NEXT
    assert requests_in(answer_of(data)) == (meant_by(head) if read_by[0] == "y" else ["refused"])
    assert (requests_by_h11(data) == meant_by(head)) == (read_by[1] == "y")


@pytest.mark.parametrize("head", [head for head, _ in HEADS if "upgrade: " in head.lower()])
def test_a_body_belongs_to_the_request_that_announces_it(head: str) -> None:
    """Also where it arrives after the head, or in any pieces, and behind other requests."""
    data = bytes_of(head) + NEXT
    after = data.index(b"\r\n\r\n") + 4
    for pieces in ((data[:after], data[after:]), (data[: after + 3], data[after + 3 :]), (bytes([b]) for b in data)):
        assert requests_in(answer_of(*pieces)) == meant_by(head)
    before = bytes_of(POST) * 2
    assert requests_in(answer_of(before + data)) == [*meant_by(POST)[:1] * 2, *meant_by(head)]


async def unanswered(scope: Any, receive: Any, send: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@pytest.mark.parametrize("early", [b"\x81\x80abcd", NEXT])
def test_nothing_is_read_before_a_web_socket_is_accepted(early: bytes) -> None:
    handshake = bytes_of(f"GET / HTTP/1.1|host: x|{SOCKET}")
    for pieces in ((handshake, early), (handshake + early,)):
        answer = answer_of(*pieces, app=unanswered)
        assert requests_in(answer) == ["refused"] and b"before it is accepted" in answer


@pytest.mark.parametrize("more", ["", "|expect: 100-continue", f"|{H2C}"])
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST"])
def test_http_1_0_gets_no_chunks(method: str, more: str) -> None:
    head, _, body = answer_of(bytes_of(f"{method} / HTTP/1.0|{LENGTH}{more}")).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ") and b"connection: close" in head and b"transfer-encoding" not in head
    assert body == (b"" if method == "HEAD" else b"one,two")


@pytest.fixture(scope="module")
def front_end() -> Iterator[FrontEnd]:
    front_end = FrontEnd()
    yield front_end
    front_end.check()
    front_end.close()


def test_a_stream_for_http_1_0(front_end: FrontEnd) -> None:
    request = post("/v1/completions", b'{"prompt": [1], "max_tokens": 3, "stream": true}')
    answer = front_end.ask(request.replace(b"HTTP/1.1", b"HTTP/1.0"))
    assert answer.partition(b"\r\n\r\n")[2].startswith(b"data: {") and answer.endswith(b"}\n\ndata: [DONE]\n\n")


@pytest.mark.parametrize(
    ("codings", "status"),
    [(["gzip"], 415), (["identity, BR"], 415), (["identity", "x\ty"], 415), (["identity"], 200), ([""], 200)],
)
def test_content_encoding(front_end: FrontEnd, codings: list[str], status: int) -> None:
    headers = [f"content-encoding: {coding}" for coding in codings]
    answer = front_end.ask(post("/v1/completions", b'{"prompt": [1], "max_tokens": 1}', *headers, "connection: close"))
    assert status_of(answer) == status
    assert (
        (b"accept-encoding: identity" in answer) == (b"send the body without compression" in answer) == (status == 415)
    )


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/v1/models/endless", "/v1/completions", "/"])
@pytest.mark.parametrize("slashes", ["/", "//"])
def test_slashes_at_the_end_of_a_path_change_nothing(front_end: FrontEnd, path: str, slashes: str) -> None:
    sent = {"json": {"prompt": [1], "max_tokens": 1}} if path == "/v1/completions" else {}
    response = front_end.client.request("POST" if sent else "GET", path + slashes, **sent)
    assert response.status_code == 200, response.text
