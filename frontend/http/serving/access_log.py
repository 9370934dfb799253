"""One log line per response: id, method, path, status, seconds, tokens. Nothing of a request's text is logged."""

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.protocol.process.log import event_logger

log = event_logger("http")

# Requests of load balancers and monitoring, which are frequent and alike: logged at level DEBUG.
QUIET_PATHS = frozenset(("/health", "/ready", "/metrics"))
MAX_LOGGED_PATH = 128
ID = b"x-request-id"
ANSWERED = "answered"
"""Key of the request's state that holds its ``Answered``."""
DISCONNECTED = 499
"""Logged as the status if the client disconnected before the response; nginx has the same number."""


@dataclass(slots=True)
class Answered:
    """What a route adds to the line.

    Attributes:
        request_id: id of the request in the engine.
        engines: with several engines, those that computed it and why, as of ``Stream.engines``; otherwise empty.
        finish: the finish reasons of its sequences; None if it generates nothing.
    """

    request_id: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    engines: str = ""
    finish: str | None = None


class AccessLog:
    """The outermost middleware: logs each request when its response has ended. ``clock``: seconds."""

    def __init__(self, app: ASGIApp, clock: Callable[[], float] = time.monotonic) -> None:
        self._app = app
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        level = logging.DEBUG if scope.get("path") in QUIET_PATHS else logging.INFO
        if scope["type"] != "http" or not log.isEnabledFor(level):
            await self._app(scope, receive, send)
            return
        status, request_id = DISCONNECTED, ""
        started = False

        def watched_send(message: Message) -> Awaitable[None]:
            # Not a coroutine of its own: this runs once per event of a stream.
            nonlocal started, status, request_id
            if not started and message["type"] == "http.response.start":
                started, status = True, message["status"]
                request_id = next((value.decode("latin-1") for name, value in message["headers"] if name == ID), "")
            return send(message)

        answered = scope.setdefault("state", {})[ANSWERED] = Answered()
        begin = self._clock()
        try:
            await self._app(scope, receive, watched_send)
        finally:
            data: dict[str, Any] = {"id": answered.request_id} if answered.request_id else {}
            if request_id and request_id != answered.request_id:
                data["client_id"] = request_id
            data |= {"method": scope["method"], "path": _shorten(scope["path"]), "status": status}
            data["seconds"] = self._clock() - begin
            if answered.finish is not None and (status < 400 or status == DISCONNECTED):
                data |= {"prompt_tokens": answered.prompt_tokens, "output_tokens": answered.output_tokens}
                data["finish"] = answered.finish
            if answered.engines:
                data["engines"] = answered.engines
            log.log(level, "response", **data)


def _shorten(path: str) -> str:
    return path if len(path) <= MAX_LOGGED_PATH else f"{path[:MAX_LOGGED_PATH]}..."
