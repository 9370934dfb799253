"""The application: the tables of routes of all rooms, and the layers around them."""

from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message

from quire.frontend.engine.client import EngineClient
from quire.frontend.http.dialects import decisions, messages, responses
from quire.frontend.http.dialects.ollama import routes as ollama
from quire.frontend.http.dialects.responses_background import continue_responses
from quire.frontend.http.page import page
from quire.frontend.http.page.openapi import with_description
from quire.frontend.http.routes import admin, chat, completions, fleet_admin, fork, health, models, sessions, tokens
from quire.frontend.http.routes import load_adapters as adapters
from quire.frontend.http.routes.pooling import routes as pooling
from quire.frontend.http.schema.errors import ApiError, shorten
from quire.frontend.http.serving.access_log import AccessLog
from quire.frontend.http.serving.body import read_body
from quire.frontend.http.serving.gate import Gate
from quire.frontend.http.serving.origins import CORS_EXPOSED_HEADERS, CORS_METHODS, OriginGuard
from quire.frontend.http.serving.request_heads import RootPath
from quire.frontend.http.serving.row import Handler
from quire.frontend.http.serving.server import Server, ServerSettings

ROUTES = (
    *(*page.ROUTES, *models.ROUTES, *completions.ROUTES, *chat.ROUTES, *messages.ROUTES, *responses.ROUTES),
    *(*ollama.ROUTES, *decisions.ROUTES, *fork.ROUTES, *sessions.ROUTES, *pooling.ROUTES, *tokens.ROUTES),
    *health.ROUTES,
)
ADMIN_ROUTES = (*admin.ROUTES, *fleet_admin.ROUTES)
"""Routes that exist only with administrator's keys, all below gate.ADMIN_PATH."""
ADAPTER_ROUTES = adapters.ROUTES
"""Routes that need adapters, too."""


def make_app(engine: EngineClient, settings: ServerSettings) -> Starlette:
    """Make the application that serves ``engine``. Its only state is metrics; it starts and stops no process."""
    server = Server(engine, settings)
    routes = ROUTES
    if settings.admin_api_keys:
        routes += ADMIN_ROUTES + (ADAPTER_ROUTES if settings.adapters is not None else ())
    rows = with_description(routes)
    app = Starlette(
        routes=[Route(row.path, partial(_answer, server, row.handler), methods=row.methods.split()) for row in rows],
        middleware=_middleware(settings),
        exception_handlers={HTTPException: _routing_error},
    )
    app.state.for_peers = Router(app.routes)
    app.state.note_sessions = server.note_sessions
    app.state.continue_responses = partial(continue_responses, server)
    # A redirect would contain the client's Host header, and RootPath has removed the slash.
    app.router.redirect_slashes = False
    return app


async def _answer(server: Server, handler: Handler, request: Request) -> ASGIApp:
    """Return the response of ``handler``; for a path with an ``id``, in the front end that has what it names."""
    held_id = request.path_params.get("id", "")
    if not server.peers.is_elsewhere(held_id):
        return await handler(server, request)
    body = await read_body(request)
    if (elsewhere := await server.peers.relay(request, held_id, body)) is not None:
        return elsewhere

    async def receive() -> Message:
        return {"type": "http.request", "body": body}

    # That front end has died, and what it had is lost: like anything else that is not here, it is not found.
    return await handler(server, Request(request.scope, receive))


def _middleware(settings: ServerSettings) -> list[Middleware]:
    """Return the layers around the routes, outermost first."""
    names = settings.allowed_origins, settings.allowed_hosts, settings.own_names
    cors = Middleware(
        CORSMiddleware,
        allow_origins=[origin.lower() for origin in settings.allowed_origins],
        allow_methods=CORS_METHODS,
        allow_headers=["*"],
        expose_headers=CORS_EXPOSED_HEADERS,
    )
    return [
        Middleware(RootPath, settings.root_path),
        Middleware(AccessLog),
        Middleware(OriginGuard, *names, has_keys=bool(settings.api_keys)),
        *([cors] if settings.allowed_origins else []),
        Middleware(Gate, settings.api_keys, settings.address_salt, settings.admin_api_keys, adapters.PATHS),
    ]


async def _routing_error(request: Request, error: Exception) -> Response:
    """Return Starlette's routing errors (404, 405) as OpenAI error objects."""
    assert isinstance(error, HTTPException)
    path: str = request.scope["path"]
    match error.status_code:
        case 404:
            hint = ": the server needs --enable-lora and --admin-api-key" if path in adapters.PATHS else ""
            for meant in {row.path for row in ROUTES} & {f"/v1{path}", path.removeprefix("/v1")}:
                hint = f": the route is {meant} (check the base URL of the client)"
            return ApiError(404, f"{shorten(path)} not found{hint}", None, "not_found").response(path)
        case 405:
            text = f"method {shorten(request.method)} not allowed for this path"
            return ApiError(405, text, None, "method_not_allowed").response(path, dict(error.headers or {}))
        case status:
            return ApiError(status, "request refused", None, None).response(path, dict(error.headers or {}))
