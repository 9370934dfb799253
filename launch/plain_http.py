"""Requests of commands to a running server: blocking, with the standard library only.

httpx would save a few lines here, but then each installation that serves would have it for ``quire top`` and ``quire
engines`` alone; only benchmarks need its pools and streams.
"""

import urllib.request
from collections.abc import Mapping
from typing import Any

from quire.protocol.errors import ConfigError

TIMEOUT_S = 10.0
MAX_BYTES = 2**24


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect is an error: it would carry the API key to another server."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


class PlainServer:
    """A server at ``url``. Proxies of the environment are not used."""

    def __init__(self, url: str) -> None:
        """Raise ConfigError if the URL is neither http nor https."""
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"--url must start with http:// or https:// (got {url[:64]!r})")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects())

    def request(self, path: str, headers: Mapping[str, str], method: str = "GET") -> str:
        """Return the body of the response.

        Raises:
            urllib.error.HTTPError: the response is an error or a redirect.
            OSError, http.client.HTTPException, ValueError: there is no response.
        """
        request = urllib.request.Request(self.url + path, headers=dict(headers), method=method)
        with self._opener.open(request, timeout=TIMEOUT_S) as response:
            body: bytes = response.read(MAX_BYTES)
        return body.decode(errors="replace")


def bearer(key: str) -> dict[str, str]:
    """Return the headers with this key; none without a key."""
    return {"Authorization": f"Bearer {key}"} if key else {}
