"""A local server that stands for hosts of the world, and a resolver that leads to it."""

import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import quote, unquote

from image_files import image_file

from quire.frontend.images.addresses import is_public
from quire.frontend.images.refused import Refused

WORLD = {
    "cdn.example.com": "93.184.216.34",
    "a.cdn.example.com": "93.184.216.35",
    "inside.cdn.example.com": "10.0.0.7",
    "loop.cdn.example.com": "127.0.0.1",
    "link.cdn.example.com": "169.254.169.254",
    "mapped.cdn.example.com": "::ffff:127.0.0.1",
    "six.cdn.example.com": "fd00::1",
}
"""Names and the addresses that they resolve to."""


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.server.paths.append(self.path)  # type: ignore[attr-defined]
        word, _, rest = self.path.partition("?")[0].strip("/").partition("/")
        match word:
            case "image":
                self._answer(200, image_file())
            case "to":  # /to/URL redirects there
                self._answer(302, b"", location=unquote(rest))
            case "hops":
                self._answer(301, b"", location=f"/hops/{int(rest) - 1}" if int(rest) else "/image")
            case "bytes":
                self._answer(200, bytes(int(rest)))
            case "chunked":
                self._answer(200, b"", **{"transfer-encoding": "chunked"})
                self.wfile.write(b"10000\r\n" + bytes(2**16) + b"\r\n0\r\n\r\n")
            case "drip":
                self._answer(200, b"x", **{"content-length": "1000"})
                while True:
                    time.sleep(0.02)
                    self.wfile.write(b"x")
            case "drip-head":
                while True:
                    time.sleep(0.02)
                    self.wfile.write(b"H")
            case "echo":
                self._answer(200, " ".join(sorted(map(str.lower, self.headers))).encode())
            case "raw":
                self.wfile.write(b"\xff\0" * 100)
            case _:
                self._answer(404, b"secret")

    def _answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in ({"content-length": str(len(body))} | headers).items():
            if headers.get("transfer-encoding") is None or name != "content-length":
                self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.paths: list[str] = []

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # its client has gone


@contextmanager
def world(tls: ssl.SSLContext | None = None) -> Iterator[Server]:
    """Yield the server, which keeps the paths that were asked for."""
    server = Server()
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Resolver:
    """Looks names up in ``WORLD``, checks the addresses as the product does, and leads to the local server."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.resolved: list[str] = []

    def __call__(self, host: str, port: int) -> list[tuple[str, int]]:
        self.resolved.append(host)
        if not is_public(WORLD.get(host, "0.0.0.0")):
            raise Refused("names a host without a public address")
        return [("127.0.0.1", self._port)]


ALLOWED = ("cdn.example.com", "*.cdn.example.com")
INSIDE = (
    *("127.0.0.1", "127.1", "2130706433", "0x7f000001", "0177.0.0.1", "0", "[::1]", "[::ffff:127.0.0.1]", "[::]"),
    *("[::ffff:7f00:1]", "[fe80::1%25lo]", "localhost", "LOCALHOST", "169.254.169.254", "[fd00::1]", "10.0.0.7"),
    *(f"{name}.cdn.example.com" for name in ("inside", "loop", "link", "mapped", "six")),
    *("cdn.example.com@127.0.0.1", "127.0.0.1#@cdn.example.com", "127.0.0.1\\\\@cdn.example.com", "xcdn.example.com"),
    *("cdn.example.com.evil.example", "cdn.example.com%00.evil.example", "\t127.0.0.1", "cdn.example.com:22"),
    *("①②⑦.0.0.1", "cdn.example.com."),
)  # fmt: skip
"""Hosts that no image may be fetched from, in the forms by which they are reached elsewhere."""


def hostile_urls() -> list[str]:
    """Return URLs to ``/secret``: as they are, and behind one and two redirects of an allowed host."""

    def behind(url: str) -> str:
        return f"http://cdn.example.com/to/{quote(url, safe='')}"

    direct = [f"{scheme}{host}/secret" for host in INSIDE for scheme in ("http://", "https://")]
    others = [
        f"{scheme}127.0.0.1/secret" for scheme in ("//", "ftp://", "file://", "gopher://", "http:", "data:,http://")
    ]
    once = [behind(url) for url in (*direct, *others)]
    return [*direct, *others, *once, *(behind(url) for url in once)]
