"""Sends the requests of a batch to a server: one connection per thread, and retries where they help."""

import contextlib
import http.client
import socket
import ssl
import threading
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec

from quire.launch.run_batch.lines import BatchResponse, Failure, RequestLine, ResultLine, result
from quire.protocol.errors import EngineError

TIMEOUT_S = 24 * 3600.0
"""Most time for one response, which has no data before it is complete."""
ATTEMPTS = 5
RETRIED = (429, 503)
PAUSE_S = 1.0
MAX_PAUSE_S = 30.0
FAILED = (OSError, http.client.HTTPException)


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """A server: its base URL, or the path of its unix socket, and the API key to send, or ""."""

    base: str = ""
    uds: str = ""
    key: str = ""

    def connect(self) -> http.client.HTTPConnection:
        if self.uds:
            return _UnixConnection(self.uds)
        url = urlsplit(self.base)
        host = url.hostname or ""
        if url.scheme == "https":
            return http.client.HTTPSConnection(host, url.port, timeout=TIMEOUT_S, context=ssl.create_default_context())
        return http.client.HTTPConnection(host, url.port, timeout=TIMEOUT_S)

    @property
    def prefix(self) -> str:
        return urlsplit(self.base).path.rstrip("/")


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self._path)


class Sender:
    """Returns the result of each request. Thread-safe; ``close`` ends requests in progress."""

    def __init__(self, target: ServerAddress) -> None:
        self._target = target
        self._own = threading.local()
        self._open: set[http.client.HTTPConnection] = set()
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def send(self, request: RequestLine) -> ResultLine:
        """Send the request. If the server is busy, repeat it.

        Raises:
            EngineError: the server cannot be reached, after several attempts.
        """
        for attempt in range(1, ATTEMPTS + 1):
            try:
                status, headers, body = self._exchange(request)
            except FAILED as error:
                self._forget()
                if attempt == ATTEMPTS or self._closed.is_set():
                    raise EngineError(f"the server cannot be reached: {error}") from None
                self._closed.wait(PAUSE_S)
                continue
            if status not in RETRIED or attempt == ATTEMPTS:
                break
            self._closed.wait(_pause(headers.get("retry-after")))
        return _result(request, status, headers.get("x-request-id", ""), body)

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            for connection in self._open:
                if connection.sock is not None:
                    with contextlib.suppress(OSError):
                        connection.sock.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for a response
                connection.close()

    def _exchange(self, request: RequestLine) -> tuple[int, Any, bytes]:
        if self._closed.is_set():
            raise OSError("the run has ended")
        connection: http.client.HTTPConnection | None = getattr(self._own, "connection", None)
        if connection is None:
            connection = self._own.connection = self._target.connect()
            with self._lock:
                self._open.add(connection)
        headers = {"Content-Type": "application/json"}
        if self._target.key:
            headers["Authorization"] = f"Bearer {self._target.key}"
        connection.request("POST", self._target.prefix + request.url, bytes(request.body), headers)
        response = connection.getresponse()
        return response.status, response.headers, response.read()

    def _forget(self) -> None:
        """Close this thread's connection: the next attempt opens another one."""
        connection = getattr(self._own, "connection", None)
        if connection is not None:
            self._own.connection = None
            with self._lock:
                self._open.discard(connection)
            connection.close()


def _pause(retry_after: str | None) -> float:
    seconds = float(retry_after) if retry_after is not None and retry_after.isdigit() else PAUSE_S
    return min(seconds, MAX_PAUSE_S)


def _result(request: RequestLine, status: int, request_id: str, body: bytes) -> ResultLine:
    try:
        decoded = msgspec.json.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        text = f"status {status}, and a body that is not JSON"
        return result(request.custom_id, None, Failure("invalid_response", text))
    error = None if status == 200 else _failure(decoded)
    return result(request.custom_id, BatchResponse(status, request_id, decoded), error)


def _failure(body: Any) -> Failure:
    fields = body.get("error") if isinstance(body, dict) else None
    fields = fields if isinstance(fields, dict) else {}
    return Failure(str(fields.get("code") or "request_failed"), str(fields.get("message") or "the request failed"))
