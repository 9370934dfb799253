"""POST /v1/requests/{id}/fork: further answers that begin with the tokens that a running one has so far."""

from starlette.requests import Request
from starlette.types import ASGIApp, Scope

from quire.frontend.http.routes.fork_peers import ForkQuestion, ask_peers
from quire.frontend.http.routes.generate import new_request_id
from quire.frontend.http.schema.bodies import ForkBody
from quire.frontend.http.schema.errors import ApiError, shorten
from quire.frontend.http.serving.body import read_json
from quire.frontend.http.serving.gate import ANY_TENANT, REQUEST_ID, TENANT
from quire.frontend.http.serving.server import Server


async def fork(server: Server, request: Request) -> ASGIApp:
    """Fork a request of this front end, or ask the others to do it."""
    server.require_serving()
    body, _ = await read_json(request, server.texts, server.parser.fork)
    name, state = request.path_params["id"], request.scope["state"]
    found: ASGIApp | None = fork_here(server, request.scope, name, body)
    if found is None:
        question = ForkQuestion(name, state[TENANT], state[REQUEST_ID], body)
        found = await ask_peers(server.settings.fork_peers, question)
    if found is None:
        text = f"no request {shorten(name)} of this key is running; if there was one, it has ended"
        raise ApiError(404, text, "id", "request_not_found")
    return found


def fork_here(server: Server, scope: Scope, name: str, body: ForkBody) -> ASGIApp | None:
    """Return the response to a fork; None if this front end has no such request of the tenant.

    Raises:
        InvalidRequest: as ``Forkable.fork``.
    """
    running, state = server.running.get(name), scope["state"]
    if running is None or state[TENANT] not in (running.tenant, ANY_TENANT):
        return None
    state[TENANT] = running.tenant  # the fork of an administrator, too, belongs to it
    prefix = name.partition("-")[0]
    return running.fork(body, new_request_id(prefix, Request(scope)))
