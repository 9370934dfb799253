"""The page at ``/docs``: the description of the server's routes, shown by RapiDoc, from which requests can be sent."""

from starlette.requests import Request
from starlette.responses import Response

from quire.frontend.http.page.content_policy import source_of
from quire.frontend.http.page.page import asset
from quire.frontend.http.serving.server import Server

LICENCES = "/*\n" + asset("vendor/LICENSE.rapidoc") + "*/\n" + asset("vendor/LICENSE.rapidoc.bundled")
LIBRARY = asset("vendor/rapidoc-min.js").partition("//# sourceMappingURL")[0]
SCRIPT = LICENCES + LIBRARY + "\n" + asset("docs.js")
PAGE = asset("docs.html").replace("{{script}}", SCRIPT).encode()
HEADERS = {
    # RapiDoc writes its styles itself. It gets the description from this server, and sends requests to it only.
    "content-security-policy": f"default-src 'none'; style-src 'unsafe-inline'; script-src {source_of(SCRIPT)}; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
}


async def show_docs(server: Server, request: Request) -> Response:
    """Return a page that shows the routes and their fields. It needs no API key, and asks for one to send requests."""
    return Response(PAGE, headers=HEADERS, media_type="text/html")
