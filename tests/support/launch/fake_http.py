"""A server that a test answers for: it lists one model, and keeps what is posted."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, bytes] | tuple[int, bytes, int] | None
"""Status, data, and the length in the head: more than the data has leaves the client waiting. None: the connection is
cut off."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "FakeHttp"

    def do_GET(self) -> None:
        self._send(200, json.dumps({"data": [{"id": "one"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.bodies.append((self.path, body, self.headers.get("authorization")))
        answer = self.server.answer(body)
        if answer is None:
            self.connection.close()
            self.close_connection = True
        else:
            self._send(*answer)

    def _send(self, status: int, data: bytes, length: int = 0) -> None:
        self.send_response(status)
        self.send_header("content-length", str(length or len(data)))
        self.send_header("retry-after", "0")
        self.end_headers()
        self.wfile.write(data)
        if length:
            self.rfile.read(1)  # until the client disconnects
            self.close_connection = True

    def log_message(self, *args: Any) -> None: ...


class FakeHttp(ThreadingHTTPServer):
    """``bodies``: path, body and authorization of each POST."""

    def __init__(self, answer: Callable[[Any], Answer]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer = answer
        self.bodies: list[tuple[str, Any, str | None]] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


@contextlib.contextmanager
def fake_http(answer: Callable[[Any], Answer]) -> Iterator[FakeHttp]:
    with FakeHttp(answer) as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield made
        made.shutdown()
        thread.join()
