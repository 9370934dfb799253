"""The outermost layer: API keys, bounds on headers, and the answer when a handler breaks."""

import hmac
import re
from collections.abc import Sequence
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.launch.http.schema.errors import ApiError, ClientGone, as_api_error, shorten
from quire.launch.http.serving.socket_protocol import CROWDED

OPEN_PATHS = frozenset(("/health", "/ready", "/metrics"))
MAX_HEADERS = 100
MAX_HEADER_BYTES = 64 * 1024
MAX_TARGET_BYTES = 8 * 1024
MAX_BODY_BYTES_AT_ONCE = 512 * 1024 * 1024
CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f]")
REFUSAL_HEADERS = {401: {"www-authenticate": "Bearer"}, 431: {"connection": "close"}}


# Key of a request's state for its tenant: 1 + the index of its API key, 0 without keys.
TENANT = "tenant"


class Gate:
    """Lets a request through to the application, or answers it.

    With API keys, every path needs one but those in OPEN_PATHS: a route that someone adds is closed until listed,
    and so is every path that is no route.

    ``max_body_bytes``: of all requests that have come in and are not answered yet, however many clients send them.
    """

    def __init__(
        self, app: ASGIApp, api_keys: Sequence[str] = (), max_body_bytes: int = MAX_BODY_BYTES_AT_ONCE
    ) -> None:
        self._app = app
        self._keys = [key.encode() for key in api_keys]
        self._max_body_bytes = max_body_bytes
        self._num_body_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        state: dict[str, Any] = scope.setdefault("state", {})
        try:
            _check_size(scope)
            state[TENANT] = self._tenant(scope)
            if CONTROL_CHARACTER.search(scope["path"]):  # routes are regular expressions, in which $ allows a last one
                raise ApiError(404, f"there is nothing at {shorten(scope['path'])}", None, "not_found")
            if state.get(CROWDED) and scope["path"] not in OPEN_PATHS:
                raise ApiError(503, "too many connections are open", None, "too_many_connections")
        except ApiError as refusal:
            await refusal.response(REFUSAL_HEADERS.get(refusal.status))(scope, receive, send)
            return
        await self._guarded(scope, receive, send)

    def _tenant(self, scope: Scope) -> int:
        """Return the request's tenant.

        Raises:
            ApiError: 401, it brought none of the keys and needs one, or more than one.
        """
        # The server's own path, decoded once, is what routes are matched with: no other spelling may pass.
        if not self._keys or scope["path"] in OPEN_PATHS:
            return 0
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, key = (given[0] if len(given) == 1 else b"").partition(b" ")
        # All keys are compared, each in constant time, so that the time taken reveals nothing.
        matches = [hmac.compare_digest(key.strip(), known) for known in self._keys]
        if scheme.lower() == b"bearer" and any(matches):
            return 1 + matches.index(True)
        raise ApiError(401, "a valid API key is required, as 'Authorization: Bearer KEY'", None, "invalid_api_key")

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        num_bytes = 0

        async def counted_receive() -> Message:
            nonlocal num_bytes
            message = await receive()
            size = len(message.get("body", b""))
            if size and self._num_body_bytes + size > self._max_body_bytes:
                raise ApiError(503, "too many large requests are being read", None, "too_many_bodies")
            num_bytes += size
            self._num_body_bytes += size
            return message

        async def watched_send(message: Message) -> None:
            nonlocal started
            if not started:
                started = True
                self._num_body_bytes -= num_bytes
            await send(message)

        try:
            await self._app(scope, counted_receive, watched_send)
        except ClientGone:
            return
        except Exception as error:
            answer = as_api_error(error)
            # Of an answer that is half out, only a cut connection can say that it is not whole. The server cuts it
            # when we return without its end; raised, the error would be logged again, in words that may be a client's.
            if not started:
                await answer.response()(scope, receive, send)
        finally:
            if not started:
                self._num_body_bytes -= num_bytes


def _check_size(scope: Scope) -> None:
    """Raises ApiError 431 when a request's head is larger than any that we serve."""
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    size = sum(len(name) + len(value) for name, value in headers)
    target = len(scope.get("raw_path", b"")) + len(scope["query_string"])
    if len(headers) > MAX_HEADERS or size > MAX_HEADER_BYTES or target > MAX_TARGET_BYTES:
        raise ApiError(431, "the request's headers are too large", None, "headers_too_large")
