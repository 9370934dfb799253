"""Heads that the parser accepts: which are refused all the same, which begin a web socket; one spelling of paths."""

from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

Fields = Sequence[tuple[bytes, bytes]]
"""Names, in lower case, and values."""


class InvalidHead(ValueError):
    """Raised in a callback of the parser: the request's head is refused with this message."""


def check_head(method: bytes, version: str, fields: Fields) -> None:
    """Raise InvalidHead for what the parser accepts and RFC 9112 does not allow, or this server does not know.

    Two programs that understand such a head differently can disagree on the end of the request.
    """
    num_hosts = sum(name == b"host" for name, _ in fields)
    codings = [value.strip().lower() for name, value in fields if name == b"transfer-encoding"]
    if version not in ("1.0", "1.1"):
        raise InvalidHead("HTTP version must be 1.0 or 1.1")
    if method == b"CONNECT":
        raise InvalidHead("method CONNECT is not allowed: use this server without a proxy setting")
    if num_hosts > 1 or (version == "1.1" and not num_hosts):
        raise InvalidHead(f"request must have one Host header (got {num_hosts})")
    if codings and (version == "1.0" or codings != [b"chunked"]):
        raise InvalidHead("transfer-encoding must be chunked, in HTTP/1.1")


def is_handshake(method: bytes, version: str, fields: Fields) -> bool:
    """Whether a head that asks for another protocol asks for a web socket, and has no body."""
    lengths = [value for name, value in fields if name in (b"content-length", b"transfer-encoding")]
    is_socket = any(name == b"upgrade" and value.lower() == b"websocket" for name, value in fields)
    return method == b"GET" and version == "1.1" and is_socket and lengths in ([], [b"0"])


class RootPath:
    """The outermost middleware: removes ``prefix`` and slashes at the end, so that all others see one path.

    A redirect would do for GET only: many clients repeat a POST without its body.
    """

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app = app
        self._prefix = prefix.rstrip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope.get("path", "")
        if path.startswith(f"{self._prefix}/"):
            path = path.removeprefix(self._prefix)
        await self._app({**scope, "path": path.rstrip("/") or "/"}, receive, send)
