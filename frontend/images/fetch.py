"""Fetches images over HTTP from hosts that the administrator allows, and only from public addresses.

A name is resolved once and the connection goes to the address that was checked, so that a second answer of the name
server cannot lead elsewhere. Proxies of the environment are not used: they would resolve again.
"""

import re
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPSConnection, IncompleteRead
from typing import NamedTuple
from urllib.parse import quote, urljoin

from quire.frontend.images.addresses import Resolve, resolve_public
from quire.frontend.images.refused import Refused
from quire.protocol.errors import printable

FETCH_SECONDS = 10.0
"""Time for one image, with all redirects. Resolving a name takes as long as the system's resolver waits."""
MAX_REDIRECTS = 3
MAX_URL_CHARS = 8192

_URL = re.compile(r"(https?)://([a-z0-9.-]+)(?::([0-9]{1,5}))?((?:[/?][^#]*)?)(?:#.*)?", re.IGNORECASE | re.ASCII)
_UNPRINTABLE = re.compile(r"[\x00-\x20\x7f\\]")
_ASCII = "".join(map(chr, range(0x21, 0x7F)))
_PORTS = {"http": 80, "https": 443}
_REDIRECTS = {301, 302, 303, 307, 308}
_FAILED = "could not be fetched"
_HEADERS = {"Accept": "image/*", "User-Agent": "quire", "Connection": "close"}


class Target(NamedTuple):
    url: str
    scheme: str
    host: str
    port: int
    path: str


@dataclass(frozen=True, slots=True)
class Fetcher:
    """Fetches URLs. Thread-safe; blocks its caller."""

    domains: Sequence[str]
    max_bytes: int
    seconds: float = FETCH_SECONDS
    resolve: Resolve = resolve_public
    tls: ssl.SSLContext = field(default_factory=ssl.create_default_context)

    def fetch(self, url: str) -> bytes:
        """Return the content of an http(s) URL.

        Raises:
            Refused: the URL or one that it redirects to is not allowed, or there is no answer with status 200 within
                the limits. What a server sends is never repeated.
        """
        deadline = time.monotonic() + self.seconds
        target = self._checked(url)
        for _ in range(MAX_REDIRECTS + 1):
            found, before = self._get(target, deadline), target
            if isinstance(found, bytes):
                return found
            target = self._checked(found, "redirects to a URL that ")
            if before.scheme == "https" != target.scheme:
                raise Refused("redirects from https to http")
        raise Refused(f"has more than {MAX_REDIRECTS} redirects")

    def _checked(self, url: str, prefix: str = "") -> Target:
        """Return the parts of a URL that is allowed. User names, IPv6 addresses and spaces are in none."""
        found = None if len(url) > MAX_URL_CHARS or _UNPRINTABLE.search(url) else _URL.fullmatch(url)
        if found is None:
            raise Refused(f"{prefix}must be http(s)://HOST/PATH of at most {MAX_URL_CHARS} characters")
        scheme, host = found[1].lower(), found[2].lower()
        port = int(found[3] or _PORTS[scheme])
        if not any(_matches(domain, scheme, host, port) for domain in self.domains):
            shown = "" if prefix else f" (got {printable(host)}{f':{port}' if found[3] else ''})"
            raise Refused(f"{prefix}must name a host that --allowed-media-domains allows{shown}")
        path = found[4] if found[4].startswith("/") else f"/{found[4]}"
        return Target(url, scheme, host, port, quote(path, safe=_ASCII))

    def _get(self, target: Target, deadline: float) -> bytes | str:
        """Return the body of an answer, or the URL that it redirects to."""
        is_tls, place = target.scheme == "https", (target.host, target.port)
        connection = HTTPSConnection(*place, context=self.tls) if is_tls else HTTPConnection(*place)
        try:
            with closing(self._connect(target, deadline)) as connected:
                # Not by a timeout of the socket, which begins anew with each byte.
                end = threading.Timer(deadline - time.monotonic(), _cut, (connected,))
                end.daemon = True
                end.start()
                connection.sock = connected
                try:
                    answer = self._exchange(target, connection)
                finally:
                    end.cancel()
            if time.monotonic() >= deadline:  # an answer without a length just ends when it is cut
                raise TimeoutError
            return answer
        except (OSError, HTTPException, ValueError) as error:
            if time.monotonic() >= deadline:
                raise Refused(f"{_FAILED} within {self.seconds:g} s") from None
            why = ": the certificate is not valid" if isinstance(error, ssl.SSLCertVerificationError) else ""
            raise Refused(f"{_FAILED}{why}") from None

    def _connect(self, target: Target, deadline: float) -> socket.socket:
        for place in self.resolve(target.host, target.port):
            with suppress(OSError):
                plain = socket.create_connection(place, max(0.0, deadline - time.monotonic()))
                if target.scheme == "http":
                    return plain
                return self.tls.wrap_socket(plain, server_hostname=target.host, do_handshake_on_connect=False)
        raise OSError

    def _exchange(self, target: Target, connection: HTTPConnection) -> bytes | str:
        if isinstance(connection.sock, ssl.SSLSocket):
            connection.sock.do_handshake()
        connection.request("GET", target.path, headers=_HEADERS)
        with closing(connection.getresponse()) as response:
            location = response.getheader("location")
            if response.status in _REDIRECTS and location is not None:
                return urljoin(target.url, location)
            if response.status != 200:
                raise Refused(f"{_FAILED}: its host answered with status {response.status}")
            body = response.read(self.max_bytes + 1)
            if len(body) > self.max_bytes:
                raise Refused(f"must be a file of at most {self.max_bytes} bytes")
            if response.length:
                raise IncompleteRead(b"", response.length)
            return body


def _matches(domain: str, scheme: str, host: str, port: int) -> bool:
    name, _, own_port = domain.partition(":")
    if port != int(own_port or _PORTS[scheme]):
        return False
    return host.endswith(name[1:]) if name.startswith("*.") else host == name


def _cut(connected: socket.socket) -> None:
    """End a connection that another thread is using: not by the method of a TLS socket, which also drops its state."""
    with suppress(OSError):
        socket.socket.shutdown(connected, socket.SHUT_RDWR)
