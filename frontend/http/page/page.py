"""The pages at ``/`` and ``/docs``, assembled from their assets when a front end starts.

They need no API key: they ask for one.
"""

from importlib import resources

from starlette.requests import Request
from starlette.responses import Response

from quire.frontend.http.page.content_policy import source_of
from quire.frontend.http.schema.errors import ApiError
from quire.frontend.http.serving.row import Row
from quire.frontend.http.serving.server import Server

SCRIPTS = ("metrics.js", "figures.js", "admin.js", "markdown.js", "images.js", "chat.js")
"""In order: each script uses the previous ones."""


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def _library(name: str) -> str:
    return _asset(f"vendor/{name}").partition("//# sourceMappingURL")[0]  # there is no map here


def _headers(style: str, script: str, more: str = "") -> dict[str, str]:
    """Return the headers of a page whose script sends requests to this server only. ``style``: a source."""
    policy = f"default-src 'none'; style-src {style}; script-src {source_of(script)}; connect-src 'self'; "
    policy += f"img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'{more}"
    return {"content-security-policy": policy, "cache-control": "no-cache", "referrer-policy": "no-referrer"}


STYLE = _asset("page.css")
LICENCES = "/*\n" + _asset("vendor/LICENSE") + _asset("vendor/LICENSE.bundled") + "*/\n"
LIBRARY = _library("markdown-it.umd.min.js")
# One scope for all files, so that the page defines no global names of its own.
SCRIPT = LICENCES + LIBRARY + '"use strict";\n(() => {\n' + "\n".join(_asset(name) for name in SCRIPTS) + "\n})();\n"
PAGE = _asset("page.html").replace("{{style}}", STYLE).replace("{{script}}", SCRIPT).encode()
# Only this script and this style may run, never text of a model, and the script may set no HTML.
HEADERS = _headers(source_of(STYLE), SCRIPT, "; require-trusted-types-for 'script'; trusted-types 'none'")

DOCS_LICENCES = "/*\n" + _asset("vendor/LICENSE.rapidoc") + "*/\n" + _asset("vendor/LICENSE.rapidoc.bundled")
DOCS_SCRIPT = DOCS_LICENCES + _library("rapidoc-min.js") + "\n" + _asset("docs.js")
DOCS_PAGE = _asset("docs.html").replace("{{script}}", DOCS_SCRIPT).encode()
DOCS_HEADERS = _headers("'unsafe-inline'", DOCS_SCRIPT)  # RapiDoc writes its styles itself


async def show_page(server: Server, request: Request) -> Response:
    """Return a page with a chat and the server's figures. A client that accepts only JSON gets 404."""
    accepted = request.headers.get("accept", "*/*")
    if "json" in accepted and "html" not in accepted:
        raise ApiError(404, "'/' not found: it is a page for browsers; the API is below /v1", None, "not_found")
    return Response(PAGE, headers=HEADERS, media_type="text/html")


async def show_docs(server: Server, request: Request) -> Response:
    """Return a page that shows the routes and their fields, and sends requests."""
    return Response(DOCS_PAGE, headers=DOCS_HEADERS, media_type="text/html")


ROUTES = (Row("GET", "/", show_page), Row("GET", "/docs", show_docs))
