"""A local server that stands for hosts of the world, and a resolver that leads to it."""

import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from image_files import image_file

from quire.frontend.images.addresses import Address, is_public
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
        word, _, rest = self.path.partition("?")[0].strip("/").partition("/")
        match word:
            case "image":
                self._answer(200, image_file())
            case "to":  # /to/URL redirects there
                self._answer(302, b"", location=rest)
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

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # its client has gone


@contextmanager
def world(tls: ssl.SSLContext | None = None) -> Iterator[int]:
    """Yield the port of the server."""
    server = Server(("127.0.0.1", 0), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Resolver:
    """Looks names up in ``WORLD``, checks the addresses as the product does, and leads to the local server."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.resolved: list[str] = []

    def __call__(self, host: str, port: int) -> list[Address]:
        self.resolved.append(host)
        if not is_public(WORLD.get(host, "0.0.0.0")):
            raise Refused("names a host without a public address")
        return [Address(socket.AF_INET, ("127.0.0.1", self._port))]
