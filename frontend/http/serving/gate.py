"""The ASGI middleware around all routes: API keys, limits on headers and bodies, and error responses."""

import asyncio
import hashlib
import hmac
import re
from collections.abc import Iterable, Sequence
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.frontend.http.schema.errors import ApiError, ClientDisconnected, as_api_error, shorten
from quire.frontend.http.serving.body_budget import BodyBudget, HeldBytes
from quire.frontend.http.serving.socket_protocol import CLIENT, TOO_MANY_CONNECTIONS

OPEN_PATHS = frozenset(("/health", "/ready", "/metrics"))
KEYLESS_PATHS = OPEN_PATHS | {"/", "/docs", "/openapi.json"}
"""Paths without a check of API keys. The pages are the same for all, and ask for a key themselves."""
ADMIN_PATH = "/admin/"
"""The paths that begin with it need a key of their own, and do not exist without one."""
REQUESTS_PATH = "/v1/requests/"
"""The paths that begin with it accept an administrator's key, too."""
MAX_HEADERS = 100
MAX_HEADER_BYTES = 64 * 1024
MAX_TARGET_BYTES = 8 * 1024
# Tenants of servers without API keys. More would let many addresses slow down the scheduler.
NUM_ADDRESS_TENANTS = 1024
# Pieces of bodies that are longer take turns: one for each pass of the event loop. A hundred images that arrive at once
# would else occupy it for the time of several steps, while all streams wait.
LONG_PIECE_BYTES = 16 * 1024
CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f]")
REFUSAL_HEADERS = {401: {"www-authenticate": "Bearer"}, 431: {"connection": "close"}}


ANY_TENANT = -1
"""Tenant of an administrator on REQUESTS_PATH, to which the requests of all tenants are open."""
# Keys of the request's state.
TENANT = "tenant"
"""1 + the index of its API key. Without keys, a number from the client's address, or 0 for a unix socket."""
REQUEST_ID = "request_id"
"""The client's ``X-Request-Id``, or "" if it sent none that can be used in a header and a log line."""
IGNORED_FIELDS = "ignored_fields"
"""Names of unknown fields in the body, once it is parsed."""
HELD_BYTES = "held_bytes"
"""The ``HeldBytes`` of the body; of a web socket, for its messages."""
VALID_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")


class Gate:
    """Middleware that passes a request to the application or refuses it.

    With API keys, every path requires one except KEYLESS_PATHS. A new route therefore requires a key until it is listed
    there, and so does a path without a route. With administrator's keys, paths below ADMIN_PATH and ``admin_paths``
    require one of these.

    Args:
        address_salt: makes the tenants of addresses unpredictable; the same in all front ends.
        admin_paths: paths besides those below ADMIN_PATH that only an administrator may use.
        bodies: limit on the bodies of all requests that have no response yet.
    """

    def __init__(
        self,
        app: ASGIApp,
        api_keys: Sequence[str] = (),
        address_salt: bytes = b"",
        admin_api_keys: Sequence[str] = (),
        admin_paths: Sequence[str] = (),
        bodies: BodyBudget | None = None,
    ) -> None:
        self._app = app
        self._keys = [key.encode() for key in api_keys]
        self._admin_keys = [key.encode() for key in admin_api_keys]
        self._admin_paths = admin_paths
        self._address_salt = address_salt
        self._bodies = bodies or BodyBudget()
        self._turn = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        state: dict[str, Any] = scope.setdefault("state", {})
        state[REQUEST_ID] = _client_request_id(scope)
        try:
            _check_size(scope)
            state[TENANT] = self._tenant(scope)
            if CONTROL_CHARACTER.search(scope["path"]):  # routes are regular expressions: $ also matches before "\n"
                raise ApiError(404, f"{shorten(scope['path'])} not found", None, "not_found")
            if state.get(TOO_MANY_CONNECTIONS) and scope["path"] not in OPEN_PATHS:
                raise ApiError(503, "too many open connections: retry later", None, "too_many_connections")
        except ApiError as refusal:
            response = refusal.response(scope["path"], REFUSAL_HEADERS.get(refusal.status))
            response.raw_headers = _extended(response.raw_headers, state)
            await response(scope, receive, send)
            return
        await self._guarded(scope, receive, send)

    def _tenant(self, scope: Scope) -> int:
        """Return the request's tenant.

        Raises:
            ApiError: 401, the path requires a key and the request has no valid one, or several.
        """
        # Routes are matched with this decoded path: checking another form of it could let a request pass.
        if scope["path"] in KEYLESS_PATHS:
            return 0
        is_admins = scope["path"].startswith(ADMIN_PATH) or scope["path"] in self._admin_paths
        if self._admin_keys and is_admins:
            if _index_of(_given_key(scope), self._admin_keys) is None:
                text = "missing or invalid administrator's key: send 'Authorization: Bearer KEY' with --admin-api-key"
                raise ApiError(401, text, None, "invalid_admin_api_key")
            return 0
        accepts_admin = self._admin_keys and scope["path"].startswith(REQUESTS_PATH)
        if accepts_admin and _index_of(_given_key(scope), self._admin_keys) is not None:
            return ANY_TENANT
        if not self._keys:
            return tenant_of_address(scope["state"].get(CLIENT, ""), self._address_salt)
        index = _index_of(_given_key(scope), self._keys)
        if index is None:
            raise ApiError(401, "missing or invalid API key: send 'Authorization: Bearer KEY'", None, "invalid_api_key")
        return 1 + index

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        # Without keys, tenants of several addresses may be the same number.
        client: int | str = scope["state"][TENANT] if self._keys else scope["state"].get(CLIENT, "")
        held = scope["state"][HELD_BYTES] = HeldBytes(self._bodies, client)

        async def counted_receive() -> Message:
            message = await receive()
            size = len(message.get("body", b""))
            if not started:
                held.grow(size)
            if size > LONG_PIECE_BYTES:  # the connection is not read on until the next ``receive``
                async with self._turn:
                    await asyncio.sleep(0)
            return message

        async def watched_send(message: Message) -> None:
            nonlocal started
            if not started:
                started = True
                held.resize(0)
                if message["type"] == "http.response.start":
                    message = {**message, "headers": _extended(message["headers"], scope["state"])}
            await send(message)

        try:
            await self._app(scope, counted_receive, watched_send)
        except ClientDisconnected:
            return
        except Exception as error:
            api_error = as_api_error(error)
            # If the response has started, only closing the connection shows that it is incomplete. uvicorn closes it
            # when this returns before the end of the response. Raising would log the error again, unescaped.
            if not started:
                await api_error.response(scope["path"])(scope, receive, watched_send)
        finally:
            held.resize(0)


def tenant_of_address(client: str, salt: bytes) -> int:
    """Return the tenant, from 1, of requests from an address; 0 for ""."""
    if not client:
        return 0
    digest = hashlib.blake2b(client.encode(), digest_size=8, key=salt).digest()
    return 1 + int.from_bytes(digest) % NUM_ADDRESS_TENANTS


def _index_of(key: bytes, known: Sequence[bytes]) -> int | None:
    """Return the index of the key. All are compared, each in constant time, so that the time tells nothing of a key."""
    matches = [hmac.compare_digest(key, each) for each in known]
    return matches.index(True) if any(matches) else None


def _given_key(scope: Scope) -> bytes:
    """Return the key in the one ``Authorization`` header, or without one in ``x-api-key``, as Anthropic's clients send
    it; or b""."""
    headers = [(name, value) for name, value in scope["headers"] if name in (b"authorization", b"x-api-key")]
    bearers = [value for name, value in headers if name == b"authorization"]
    if not bearers:
        return headers[0][1].strip() if len(headers) == 1 else b""
    scheme, _, key = bearers[0].partition(b" ")
    return key.strip() if len(bearers) == 1 and scheme.lower() == b"bearer" else b""


def _client_request_id(scope: Scope) -> str:
    given = [value for name, value in scope["headers"] if name == b"x-request-id"]
    return given[0].decode() if len(given) == 1 and VALID_REQUEST_ID.fullmatch(given[0]) else ""


def _extended(headers: Iterable[tuple[bytes, bytes]], state: dict[str, Any]) -> list[tuple[bytes, bytes]]:
    """Return the headers of a response with the client's request id, and with the fields that were ignored."""
    extended = list(headers)
    if state[REQUEST_ID]:
        extended = [each for each in extended if each[0] != b"x-request-id"]
        extended.append((b"x-request-id", state[REQUEST_ID].encode()))
    if state.get(IGNORED_FIELDS):
        extended.append((b"x-quire-ignored-fields", ",".join(state[IGNORED_FIELDS]).encode()))
    return extended


def _check_size(scope: Scope) -> None:
    """Raise ApiError 431 if the request's target or headers are too large."""
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    size = sum(len(name) + len(value) for name, value in headers)
    target = len(scope.get("raw_path", b"")) + len(scope["query_string"])
    if len(headers) > MAX_HEADERS or size > MAX_HEADER_BYTES or target > MAX_TARGET_BYTES:
        raise ApiError(431, "request headers too large", None, "headers_too_large")
