"""The route table and the ASGI application."""

from functools import partial

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message

from quire.frontend.engine.client import EngineClient
from quire.frontend.http.dialects.chat_fields import PASSED_FIELDS
from quire.frontend.http.dialects.decisions import DecisionBody, decisions
from quire.frontend.http.dialects.messages import count_message_tokens, create_message
from quire.frontend.http.dialects.messages_body import MessagesBody
from quire.frontend.http.dialects.ollama.routes import ROUTES as OLLAMA_ROUTES
from quire.frontend.http.dialects.responses import (
    STORED_PATH,
    count_input_tokens,
    list_input_items,
    show_stored,
)
from quire.frontend.http.dialects.responses_background import cancel_response, continue_responses, stored_response
from quire.frontend.http.dialects.responses_body import BESIDES_BODY, ResponsesBody
from quire.frontend.http.dialects.responses_compact import compact
from quire.frontend.http.dialects.responses_socket import responses
from quire.frontend.http.page.docs_page import show_docs
from quire.frontend.http.page.openapi import with_description
from quire.frontend.http.page.page import show_page
from quire.frontend.http.routes.admin import engine_state, pause, reset_encoder_cache, reset_prefix_cache, resume
from quire.frontend.http.routes.chat import chat_completions
from quire.frontend.http.routes.completions import completions
from quire.frontend.http.routes.fleet_admin import give_order, list_engines
from quire.frontend.http.routes.fork import fork
from quire.frontend.http.routes.load_adapters import PATHS, LoadBody, UnloadBody, load_adapter, unload_adapter
from quire.frontend.http.routes.models import list_models, show_model
from quire.frontend.http.routes.pooling.routes import classify, embeddings, pooling, rerank, score
from quire.frontend.http.routes.sessions import open_session, session
from quire.frontend.http.routes.tokens import detokenize, tokenize, tokenizer_info
from quire.frontend.http.schema.bodies import ChatBody, CompletionBody, DetokenizeBody, ForkBody, TokenizeBody
from quire.frontend.http.schema.errors import ApiError, shorten
from quire.frontend.http.schema.pooling_bodies import ClassificationBody, EmbeddingBody, RerankBody, ScoreBody
from quire.frontend.http.schema.schema import READ_ELSEWHERE
from quire.frontend.http.serving.access_log import AccessLog
from quire.frontend.http.serving.body import json_response, read_body
from quire.frontend.http.serving.gate import Gate
from quire.frontend.http.serving.origins import CORS_EXPOSED_HEADERS, CORS_METHODS, OriginGuard
from quire.frontend.http.serving.request_heads import RootPath
from quire.frontend.http.serving.row import Handler, Row
from quire.frontend.http.serving.server import Server, ServerSettings
from quire.protocol.process.fleet_orders import ORDERS


class _ResponseId(StringConvertor):
    """Ids of responses in paths, apart from the other routes below /v1/responses."""

    regex = "resp_[^/]+"


register_url_convertor("response", _ResponseId())


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
    Row("GET", "/", show_page),
    Row("GET", "/docs", show_docs),
    Row("GET", "/v1/models", list_models),
    Row("GET", "/v1/models/{name:path}", show_model),
    Row("POST", "/v1/completions", completions, CompletionBody, READ_ELSEWHERE),
    Row("POST", "/v1/chat/completions", chat_completions, ChatBody, READ_ELSEWHERE),
    Row("POST", "/v1/messages", create_message, MessagesBody, PASSED_FIELDS),
    Row("POST", "/v1/messages/count_tokens", count_message_tokens, MessagesBody, PASSED_FIELDS),
    Row("GET POST", "/v1/responses", responses, ResponsesBody, BESIDES_BODY),
    Row("POST", "/v1/responses/input_tokens", count_input_tokens, ResponsesBody, BESIDES_BODY),
    Row("POST", "/v1/responses/compact", compact, ResponsesBody, BESIDES_BODY),
    Row("GET DELETE", "/v1/responses/{id:response}", stored_response, query=("stream", "starting_after")),
    Row("GET", "/v1/responses/{id:response}/input_items", list_input_items, query=("order",)),
    Row("POST", "/v1/responses/{id:response}/cancel", cancel_response),
    *OLLAMA_ROUTES,
    Row("POST", "/v1/decisions", decisions, DecisionBody),
    Row("POST", "/v1/requests/{id:path}/fork", fork, ForkBody),
    Row("POST", "/v1/sessions", open_session),
    Row("GET DELETE", "/v1/sessions/{id}", session),
    Row("POST", "/v1/embeddings", embeddings, EmbeddingBody),
    *(Row("POST", path, rerank, RerankBody) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
    *(Row("POST", path, score, ScoreBody) for path in ("/score", "/v1/score")),
    *(Row("POST", path, classify, ClassificationBody) for path in ("/classify", "/v1/classify")),
    Row("POST", "/pooling", pooling, EmbeddingBody),
    Row("POST", "/tokenize", tokenize, TokenizeBody),
    Row("POST", "/detokenize", detokenize, DetokenizeBody),
    Row("GET", "/tokenizer_info", tokenizer_info),
    Row("GET", "/health", health),
    Row("GET", "/ready", ready),
    Row("GET", "/version", version),
    Row("GET", "/metrics", metrics),
)
# Routes that exist only with administrator's keys, all below gate.ADMIN_PATH.
ADMIN_ROUTES = (
    Row("POST", "/admin/pause", pause, query=("mode",)),
    Row("POST", "/admin/resume", resume),
    Row("POST", "/admin/reset_prefix_cache", reset_prefix_cache),
    Row("POST", "/admin/reset_encoder_cache", reset_encoder_cache),
    Row("GET", "/admin/state", engine_state),
    Row("GET", "/admin/engines", list_engines),
    *(Row("POST", f"/admin/engines/{order}", give_order(order), query=("engine",)) for order in ORDERS),
)
# Routes that need adapters, too.
ADAPTER_ROUTES = (
    Row("POST", PATHS[0], load_adapter, LoadBody),
    Row("POST", PATHS[1], unload_adapter, UnloadBody),
)


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
    app.state.for_peers = Router([*app.routes, Route(STORED_PATH + "{id:path}", partial(show_stored, server))])
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
    guard = Middleware(
        OriginGuard,
        settings.allowed_origins,
        settings.allowed_hosts,
        settings.own_names,
        has_keys=bool(settings.api_keys),
    )
    cors = Middleware(
        CORSMiddleware,
        allow_origins=[origin.lower() for origin in settings.allowed_origins],
        allow_methods=CORS_METHODS,
        allow_headers=["*"],
        expose_headers=CORS_EXPOSED_HEADERS,
    )
    admin_keys = settings.admin_api_keys
    gate = Middleware(Gate, settings.api_keys, settings.address_salt, admin_api_keys=admin_keys, admin_paths=PATHS)
    path = Middleware(RootPath, settings.root_path)
    return [path, Middleware(AccessLog), guard, *([cors] if settings.allowed_origins else []), gate]


async def _routing_error(request: Request, error: Exception) -> Response:
    """Return Starlette's routing errors (404, 405) as OpenAI error objects."""
    path: str = request.scope["path"]
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    match status:
        case 404:
            hint = ": the server needs --enable-lora and --admin-api-key" if path in PATHS else ""
            return ApiError(404, f"{shorten(path)} not found{hint}", None, "not_found").response(path)
        case 405:
            text = f"method {shorten(request.method)} not allowed for this path"
            return ApiError(405, text, None, "method_not_allowed").response(path, headers)
        case _:
            return ApiError(status, "request refused", None, None).response(path, headers)
