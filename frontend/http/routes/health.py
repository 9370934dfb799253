"""GET /health, /ready, /version and /metrics: what programs that watch a server ask for."""

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from quire.frontend.http.serving.body import json_response
from quire.frontend.http.serving.row import Row
from quire.frontend.http.serving.server import Server


async def health(server: Server, request: Request) -> Response:
    """Return 200 while the engine makes progress, recovery included, and 503 while it starts, after it has failed, or
    when it has produced no token for too long."""
    is_healthy = server.engine.state in ("ready", "recovering", "draining") and not server.is_stuck
    return json_response({"status": server.status}, 200 if is_healthy else 503)


async def ready(server: Server, request: Request) -> Response:
    """Return 200 while a load balancer should send new requests here, and 503 otherwise.

    A recovering engine is ready: new requests only wait until the recovery is over. A paused one is not.
    """
    is_ready = server.engine.state in ("ready", "recovering") and not server.is_stuck and not server.engine.pause_kind
    return json_response({"status": server.status}, 200 if is_ready else 503)


async def version(server: Server, request: Request) -> Response:
    return json_response({"version": server.settings.version})


async def metrics(server: Server, request: Request) -> Response:
    server.note_sessions()
    body = await server.metrics.render(server.engine)
    return Response(body, headers={"content-type": CONTENT_TYPE_LATEST})


ROUTES = (
    Row("GET", "/health", health),
    Row("GET", "/ready", ready),
    Row("GET", "/version", version),
    Row("GET", "/metrics", metrics),
)
