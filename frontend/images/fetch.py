"""Fetches images over HTTP from hosts that the administrator allows, and only from public addresses.

A name is resolved once and the connection goes to the address that was checked, so that a second answer of the name
server cannot lead elsewhere. Proxies of the environment are not used: they would resolve again.
"""

import http.client
import re
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from typing import NamedTuple
from urllib.parse import quote, urljoin

from quire.frontend.images.addresses import Address, Resolve, resolve_public
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


class Target(NamedTuple):
    scheme: str
    host: str
    port: int
    path: str


class Fetcher:
    """Fetches URLs. Thread-safe; blocks its caller."""

    def __init__(
        self,
        domains: Sequence[str],
        max_bytes: int,
        seconds: float = FETCH_SECONDS,
        resolve: Resolve = resolve_public,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._domains = domains
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._resolve = resolve
        self._tls = tls or ssl.create_default_context()

    def fetch(self, url: str) -> bytes:
        """Return the content of an http(s) URL.

        Raises:
            Refused: the URL or one that it redirects to is not allowed, or there is no answer with status 200 within
                the limits. What a server sends is never repeated.
        """
        deadline = time.monotonic() + self._seconds
        target = self._checked(url)
        for _ in range(MAX_REDIRECTS + 1):
            body, location = self._get(target, deadline)
            if location is None:
                return body
            url, before = _joined(url, location), target
            target = self._checked(url, "redirects to a URL that ")
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
        if not any(_matches(domain, scheme, host, port) for domain in self._domains):
            shown = "" if prefix else f" (got {printable(host)}{f':{port}' if found[3] else ''})"
            raise Refused(f"{prefix}must name a host that --allowed-media-domains allows{shown}")
        path = found[4] if found[4].startswith("/") else f"/{found[4]}"
        return Target(scheme, host, port, quote(path, safe=_ASCII))

    def _get(self, target: Target, deadline: float) -> tuple[bytes, str | None]:
        """Return the body of an answer, or where it redirects to."""
        try:
            with closing(self._connect(target, deadline)) as connected:
                # Not by a timeout of the socket, which begins anew with each byte.
                end = threading.Timer(deadline - time.monotonic(), _cut, (connected,))
                end.daemon = True
                end.start()
                try:
                    answer = self._exchange(target, connected)
                finally:
                    end.cancel()
            if time.monotonic() >= deadline:  # an answer without a length just ends when it is cut
                raise TimeoutError
            return answer
        except (OSError, http.client.HTTPException, ValueError) as error:
            if time.monotonic() >= deadline:
                raise Refused(f"{_FAILED} within {self._seconds:g} s") from None
            why = ": the certificate is not valid" if isinstance(error, ssl.SSLCertVerificationError) else ""
            raise Refused(f"{_FAILED}{why}") from None

    def _connect(self, target: Target, deadline: float) -> socket.socket:
        failure: OSError = TimeoutError()
        for address in self._resolve(target.host, target.port):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            try:
                return self._connect_to(address, target, left)
            except OSError as error:
                failure = error
        raise failure

    def _connect_to(self, address: Address, target: Target, seconds: float) -> socket.socket:
        plain = socket.socket(address.family, socket.SOCK_STREAM)
        try:
            plain.settimeout(seconds)
            plain.connect(address.place)
            if target.scheme == "http":
                return plain
            return self._tls.wrap_socket(plain, server_hostname=target.host, do_handshake_on_connect=False)
        except BaseException:
            plain.close()
            raise

    def _exchange(self, target: Target, connected: socket.socket) -> tuple[bytes, str | None]:
        if isinstance(connected, ssl.SSLSocket):
            connected.do_handshake()
        connection = http.client.HTTPConnection(target.host, target.port)
        connection.sock = connected
        host = target.host if target.port == _PORTS[target.scheme] else f"{target.host}:{target.port}"
        headers = {"Host": host, "Accept": "image/*", "User-Agent": "quire", "Connection": "close"}
        connection.request("GET", target.path, headers=headers)
        with closing(connection.getresponse()) as response:
            location = response.getheader("location")
            if response.status in _REDIRECTS and location is not None:
                return b"", location
            if response.status != 200:
                raise Refused(f"{_FAILED}: its host answered with status {response.status}")
            body = response.read(self._max_bytes + 1)
            if len(body) > self._max_bytes:
                raise Refused(f"must be a file of at most {self._max_bytes} bytes")
            if response.length:
                raise http.client.IncompleteRead(b"", response.length)
            return body, None


def _matches(domain: str, scheme: str, host: str, port: int) -> bool:
    name, _, own_port = domain.partition(":")
    if port != int(own_port or _PORTS[scheme]):
        return False
    return host.endswith(name[1:]) if name.startswith("*.") else host == name


def _cut(connected: socket.socket) -> None:
    """End a connection that another thread is using: not by the method of a TLS socket, which also drops its state."""
    with suppress(OSError):
        socket.socket.shutdown(connected, socket.SHUT_RDWR)


def _joined(url: str, location: str) -> str:
    try:
        return urljoin(url, location)
    except ValueError:
        return ""
