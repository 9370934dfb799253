"""uvicorn's server on the listening socket that the supervisor has bound: TCP or unix, with or without TLS."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from quire.frontend.http.serving.connections import Connections
from quire.frontend.http.serving.outbox import Outbox
from quire.frontend.http.serving.socket_protocol import BoundedHttpProtocol
from quire.protocol.process.log import event_logger

log = event_logger("http")

# A browser must not guess that a response is a page or a script.
RESPONSE_HEADERS = [("x-content-type-options", "nosniff")]
BACKLOG = 2048


class HttpServer(uvicorn.Server):
    """uvicorn.Server without signal handlers and lifespan events: the supervisor decides when it stops."""

    def __init__(
        self,
        app: ASGIApp,
        tls: ssl.SSLContext | None = None,
        protocol: type[BoundedHttpProtocol] = BoundedHttpProtocol,
    ) -> None:
        """``protocol``: a subclass with other limits, for tests."""
        config = uvicorn.Config(
            app,
            http=protocol,
            ws="none",  # BoundedHttpProtocol does not limit web socket connections
            log_level="error",  # a warning per malformed request would let any client fill the disk
            access_log=False,
            lifespan="off",
            server_header=False,
            headers=RESPONSE_HEADERS,
            proxy_headers=False,  # X-Forwarded-For would let a client choose its address
        )
        super().__init__(config)
        self._tls = tls
        self._protocol = protocol
        self._connections = Connections(protocol.limits)
        self._outbox = Outbox()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections on ``sockets``. uvicorn's own has no limit on the time of a TLS handshake."""
        asyncio.get_running_loop().set_exception_handler(_log_error)
        self.servers = [await self._listen(each) for each in sockets or ()]
        self.started = True

    async def _listen(self, listener: socket.socket) -> asyncio.Server:
        loop, limits, tls = asyncio.get_running_loop(), self._protocol.limits, self._tls
        create = loop.create_unix_server if listener.family == socket.AF_UNIX else loop.create_server
        make = partial(
            self._protocol,
            self.config,
            self.server_state,
            self.lifespan.state,
            counted=self._connections,
            outbox=self._outbox,
        )
        return await create(
            make,
            sock=listener,
            ssl=tls,
            backlog=BACKLOG,
            ssl_handshake_timeout=None if tls is None else limits.handshake_s,
            ssl_shutdown_timeout=None if tls is None else limits.linger_s,
        )


def _log_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an error of the loop. When it lacks memory to read from a connection, it has closed that one only."""
    if isinstance(context.get("exception"), MemoryError) and "transport" in context:
        log.error("closed a connection: there is no memory to read from it")
    else:
        loop.default_exception_handler(context)
