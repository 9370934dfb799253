"""Which host names and which web pages may use the server.

A browser sends requests for any web page that it shows. The `Origin` header names that page, and `Host` the name under
which it found the server. A page that is not allowed can send a cross-site POST, or have its own name resolve to this
machine (DNS rebinding) and then read responses too.
"""

import ipaddress
import socket
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from quire.frontend.http.schema.errors import ApiError, shorten
from quire.frontend.http.serving.gate import OPEN_PATHS
from quire.frontend.network_options import ANY, HOST

CORS_METHODS = ("GET", "POST", "DELETE")
CORS_EXPOSED_HEADERS = ("x-request-id", "x-quire-ignored-fields", "retry-after")
# Names below these are not in the public DNS, so no web page can be found under one.
PRIVATE_SUFFIXES = (".localhost", ".local", ".internal")
# Methods that change nothing. A page of another origin cannot read their responses.
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")

CHECKED = frozenset((b"host", b"origin", b"content-type"))


class OriginGuard:
    """Middleware that refuses requests under a foreign host name, and requests of web pages that are not allowed.

    It must be outside of the check of API keys: a preflight request has no key. Open paths are not checked: probes and
    Prometheus read them under any name.

    Args:
        allowed_origins: origins of web pages; ``*``: all.
        allowed_hosts: host names besides ``own_names``, addresses and names that are not in the public DNS; ``*``: all.
        has_keys: requests need an API key, which a foreign page does not know. Any host name is then allowed by
            default.
    """

    def __init__(
        self,
        app: ASGIApp,
        allowed_origins: Sequence[str] = (),
        allowed_hosts: Sequence[str] = (),
        own_names: Sequence[str] = (),
        *,
        has_keys: bool = False,
    ) -> None:
        self._app = app
        self._origins = frozenset(origin.lower() for origin in allowed_origins)
        names = [name.lower() for name in (*allowed_hosts, *own_names, socket.gethostname())]
        self._hosts = frozenset(names)
        self._suffixes = tuple(name[1:] for name in names if name.startswith("*."))
        self._any_host = ANY in allowed_hosts or (has_keys and not allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            try:
                self._check(scope)
            except ApiError as refusal:
                await refusal.response(scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        """Raise ApiError 403 for a foreign host or origin, and 415 for a body of a page that is not JSON."""
        found: dict[bytes, str] = {}
        for name, value in scope["headers"]:
            if name in CHECKED:
                text = value.decode("latin-1").lower()
                # Several headers of one name become a value that is never allowed.
                found[name] = f"{found[name]}, {text}" if name in found else text
        host, origin = found.get(b"host"), found.get(b"origin")
        if host is not None and not self._is_own_host(host):
            text = f"host {shorten(host)} is not allowed: use an address, or start the server with --allowed-hosts"
            raise ApiError(403, text, None, "host_not_allowed")
        if origin is None:
            return
        if ANY not in self._origins and origin not in self._origins and origin.partition("://")[2] != host:
            text = f"web pages of origin {shorten(origin)} are not allowed: start the server with --allowed-origins"
            raise ApiError(403, text, None, "origin_not_allowed")
        # A page may send other types across origins without asking first.
        if (
            scope["method"] not in SAFE_METHODS
            and found.get(b"content-type", "").partition(";")[0].strip() != "application/json"
        ):
            text = "content-type must be application/json in a request of a web page"
            raise ApiError(415, text, None, "unsupported_media_type")

    def _is_own_host(self, host: str) -> bool:
        if self._any_host:
            return True
        found = HOST.fullmatch(host)
        if not found:
            return False
        name = found[1]
        return name in self._hosts or name.endswith(self._suffixes) or _is_private(name)


def _is_private(name: str) -> bool:
    """Whether no name in the public DNS can be ``name``: an address, one label, or a name for private use."""
    if "." not in name or name.removesuffix(".").endswith(PRIVATE_SUFFIXES):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
