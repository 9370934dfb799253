"""The page at ``/``, assembled from its assets when a front end starts."""

from importlib import resources

from starlette.requests import Request
from starlette.responses import Response

from quire.frontend.http.page.content_policy import source_of
from quire.frontend.http.schema.errors import ApiError
from quire.frontend.http.serving.server import Server

SCRIPTS = ("metrics.js", "figures.js", "admin.js", "markdown.js", "images.js", "chat.js")
"""In order: each script uses the previous ones."""


def asset(name: str) -> str:
    return resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


STYLE = asset("page.css")
LICENCES = "/*\n" + asset("vendor/LICENSE") + asset("vendor/LICENSE.bundled") + "*/\n"
LIBRARY = asset("vendor/markdown-it.umd.min.js").partition("//# sourceMappingURL")[0]  # there is no map here
# One scope for all files, so that the page defines no global names of its own.
SCRIPT = LICENCES + LIBRARY + '"use strict";\n(() => {\n' + "\n".join(asset(name) for name in SCRIPTS) + "\n})();\n"
PAGE = asset("page.html").replace("{{style}}", STYLE).replace("{{script}}", SCRIPT).encode()
HEADERS = {
    # Only this script and this style may run, never text of a model. The script may send requests to this server only,
    # and set no HTML.
    "content-security-policy": f"default-src 'none'; style-src {source_of(STYLE)}; script-src {source_of(SCRIPT)}; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
}


async def show_page(server: Server, request: Request) -> Response:
    """Return the page, which needs no API key: it asks for one. A client that accepts only JSON gets 404."""
    accepted = request.headers.get("accept", "*/*")
    if "json" in accepted and "html" not in accepted:
        raise ApiError(404, "'/' not found: it is a page for browsers; the API is below /v1", None, "not_found")
    return Response(PAGE, headers=HEADERS, media_type="text/html")
