"""Requests of commands to a running server: blocking, with the standard library only.

httpx would save a few lines here, but then each installation that serves would have it for ``quire top`` and ``quire
engines`` alone; only benchmarks need its pools and streams.
"""

import argparse
import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from quire.launch.config.api_keys import read_keys
from quire.protocol.errors import ConfigError

DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT_S = 10.0
MAX_BYTES = 2**24


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect is an error: it would carry the API key to another server."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


class PlainServer:
    """A server at ``url``. Proxies of the environment are not used: it is usually on this machine."""

    def __init__(self, url: str, timeout: float = TIMEOUT_S) -> None:
        """
        Args:
            url: as http://127.0.0.1:8000, with or without /v1 at its end. ConfigError for one that is not of HTTP.
            timeout: seconds without any data, after which a request fails.
        """
        self.url = base_url(url)
        self._timeout = timeout
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects())

    def open(
        self, path: str, headers: Mapping[str, str], method: str = "GET", body: bytes | None = None
    ) -> http.client.HTTPResponse:
        """Send a request, and return its response for reading.

        Raises:
            urllib.error.HTTPError: the response is an error or a redirect.
            ConfigError: there is no response.
        """
        try:
            request = urllib.request.Request(self.url + path, body, dict(headers), method=method)
            response: http.client.HTTPResponse = self._opener.open(request, timeout=self._timeout)
        except urllib.error.HTTPError:
            raise
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._unreachable(error) from None
        return response

    def request(self, path: str, headers: Mapping[str, str], method: str = "GET") -> str:
        """Return the body of the response; raise as ``open``."""
        with self.open(path, headers, method) as response:
            try:
                return response.read(MAX_BYTES).decode(errors="replace")
            except (OSError, http.client.HTTPException) as error:
                raise self._unreachable(error) from None

    def _unreachable(self, error: Exception) -> ConfigError:
        return ConfigError(f"--url {self.url}: cannot reach the server: {getattr(error, 'reason', error)}")


def base_url(url: str) -> str:
    """Return the server's address without /v1. Raise ConfigError for one that is not of HTTP."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url must start with http:// or https:// (got {url[:64]!r})")
    return url.rstrip("/").removesuffix("/v1")


def server_key(given: str | None) -> str:
    """Return the API key to send: as given, or of the variable QUIRE_API_KEY, or ""."""
    return given or os.environ.get("QUIRE_API_KEY", "")


def add_server_options(parser: argparse.ArgumentParser, admin_key: str) -> None:
    """Add the address of a running server, and the administrator's key; ``admin_key``: the help of it."""
    parser.add_argument("--url", default=DEFAULT_URL, metavar="URL", help=f"address of the server ({DEFAULT_URL})")
    parser.add_argument("--admin-api-key", metavar="KEY", help=f"{admin_key} (the variable QUIRE_ADMIN_API_KEY)")
    parser.add_argument("--admin-api-key-file", metavar="FILE", help="file with that key in its first line")


def admin_key(args: argparse.Namespace) -> str:
    """Return the administrator's key of flag, file or variable, or "". Raise ConfigError as ``read_keys``."""
    given = [args.admin_api_key] if args.admin_api_key else None
    return next(iter(read_keys("admin-api-key", given, args.admin_api_key_file)), "")


def bearer(key: str) -> dict[str, str]:
    """Return the headers with this key; none without a key."""
    return {"Authorization": f"Bearer {key}"} if key else {}
