"""The outermost layer: who may come in, how much header they may bring, and what leaves when something breaks."""

import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.launch.http.errors import ApiError, ClientGone, as_api_error

OPEN_PATHS = frozenset(("/health", "/ready", "/metrics"))
MAX_HEADERS = 100
MAX_HEADER_BYTES = 64 * 1024
MAX_TARGET_BYTES = 8 * 1024


class Gate:
    """Lets a request through to the application, or answers it.

    With API keys, every path needs one but those in OPEN_PATHS: a route that someone adds is closed until listed,
    and so is every path that is no route.
    """

    def __init__(self, app: ASGIApp, api_keys: Sequence[str] = ()) -> None:
        self._app = app
        self._keys = [key.encode() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        refusal = self._refusal(scope)
        if refusal is not None:
            headers = {"connection": "close"} if refusal.status == 431 else {"www-authenticate": "Bearer"}
            await refusal.response(headers)(scope, receive, send)
            return
        await self._guarded(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        size = sum(len(name) + len(value) for name, value in headers)
        target = len(scope.get("raw_path", b"")) + len(scope["query_string"])
        if len(headers) > MAX_HEADERS or size > MAX_HEADER_BYTES or target > MAX_TARGET_BYTES:
            return ApiError(431, "the request's headers are too large", None, "headers_too_large")
        # The server's own path, decoded once, is what routes are matched with: no other spelling may pass.
        if not self._keys or scope["path"] in OPEN_PATHS:
            return None
        given = next((value for name, value in headers if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        # All keys are compared, each in constant time, so that the time taken tells nothing.
        matches = [hmac.compare_digest(key.strip(), known) for known in self._keys]
        if scheme.lower() == b"bearer" and any(matches):
            return None
        return ApiError(401, "a valid API key is required, as 'Authorization: Bearer KEY'", None, "invalid_api_key")

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except ClientGone:
            return
        except Exception as error:
            answer = as_api_error(error)
            if not started:
                await answer.response()(scope, receive, send)
            else:
                # Half an answer is out: only a cut connection can still say that it is not whole.
                raise
