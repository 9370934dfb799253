"""POST /v1/requests/{id}/fork: further answers that begin with the tokens that a running one has so far."""

from starlette.requests import Request
from starlette.types import ASGIApp

from quire.frontend.http.routes.generate import new_request_id
from quire.frontend.http.schema.bodies import ForkBody
from quire.frontend.http.schema.errors import ApiError, shorten
from quire.frontend.http.serving.body import read_json
from quire.frontend.http.serving.gate import ANY_TENANT, TENANT
from quire.frontend.http.serving.row import Row
from quire.frontend.http.serving.server import Server


async def fork(server: Server, request: Request) -> ASGIApp:
    """Fork a running request of the tenant; an administrator may fork any."""
    server.require_serving()
    body, _ = await read_json(request, server.texts, server.parser.fork)
    name, state = request.path_params["id"], request.scope["state"]
    running = server.running.get(name)
    if running is None or state[TENANT] not in (running.terms.tenant, ANY_TENANT):
        text = f"no request {shorten(name)} of this key is running; if there was one, it has ended"
        raise ApiError(404, text, "id", "request_not_found")
    state[TENANT] = running.terms.tenant  # the fork of an administrator, too, belongs to it
    prefix = name.partition("-")[0]
    return running.fork(body, new_request_id(server, f"{prefix}-", request))


ROUTES = (Row("POST", "/v1/requests/{id:path}/fork", fork, ForkBody),)
