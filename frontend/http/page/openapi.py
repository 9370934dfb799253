"""/openapi.json: a description of the server's routes, made of the route table and the structs of request bodies."""

import inspect
import re
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.frontend.http.schema.errors import FORMS, ErrorDetail
from quire.frontend.http.serving.gate import KEYLESS_PATHS
from quire.frontend.http.serving.row import Row
from quire.frontend.http.serving.server import Server
from quire.protocol.request.sampling_params import SamplingParams
from quire.version import __version__

Schema = dict[str, Any]
REFERENCE = "#/components/schemas/{name}"
JSON = "application/json"
ANSWERS = {"/": "text/html", "/docs": "text/html", "/metrics": "text/plain"}
"""Content types of what is not JSON."""
WIDER = {"stop": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}}
"""Sampling parameters that clients may write in more forms than SamplingParams has."""


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


def with_description(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Return the rows with one for their description, which is made when it is first asked for."""

    @cache
    def made(root_path: str) -> bytes:
        return msgspec.json.encode(_document(whole, root_path)).replace(b"``", b"`")  # descriptions are Markdown

    async def openapi(server: Server, request: Request) -> Response:
        """Return this description."""
        return Response(made(server.settings.root_path), media_type=JSON)

    whole = (*rows, Row("GET", "/openapi.json", openapi))
    return whole


def _document(rows: Sequence[Row], root_path: str) -> Schema:
    """Return the description, in the form of OpenAPI 3.1."""
    bodies = {row.body: row.besides for row in rows if row.body is not None}
    kinds: list[type[Any]] = [*bodies, ErrorBody, SamplingParams]
    found, schemas = msgspec.json.schema_components(kinds, ref_template=REFERENCE)
    references = dict(zip(kinds, found, strict=True))
    sampling = schemas.pop(SamplingParams.__name__)["properties"] | WIDER
    for body, besides in bodies.items():
        schema = schemas[references[body]["$ref"].rpartition("/")[2]]
        schema["properties"] |= {name: sampling.get(name, {}) for name in besides}
    paths: dict[str, Schema] = {}
    for row in rows:
        for method in row.methods.lower().split():
            operation = _operation(row, method, references)
            paths.setdefault(re.sub(r":\w+}", "}", row.path), {})[method] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "Quire", "version": __version__},
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


def _operation(row: Row, method: str, references: dict[type[Any], Schema]) -> Schema:
    handler = row.handler.func if isinstance(row.handler, partial) else row.handler
    summary, _, more = (inspect.getdoc(handler) or handler.__name__.replace("_", " ").strip()).partition("\n\n")
    in_path = [{"name": name, "in": "path", "required": True} for name in re.findall(r"{(\w+)", row.path)]
    in_query = [{"name": name, "in": "query"} for name in row.query if method == "get" or row.body is None]
    content: Schema = {ANSWERS.get(row.path, JSON): {}}
    operation: Schema = {
        "operationId": f"{method} {row.path}",
        "tags": [re.sub(r"^/(v\d/)?", "", row.path).partition("/")[0] or "pages"],
        "summary": summary.replace("\n", " "),
        "parameters": [{**each, "schema": {"type": "string"}} for each in in_path + in_query],
        "responses": {"200": {"description": "the answer", "content": content}},
    }
    if more:
        operation["description"] = more
    if row.path in KEYLESS_PATHS:
        operation["security"] = []
    error = {} if row.path.startswith(tuple(FORMS)) or row.body is None else {"schema": references[ErrorBody]}
    operation["responses"]["default"] = {"description": "an error", "content": {JSON: error}}
    if row.body is not None and method == "post":
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": references[row.body]}}}
        if "stream" in row.body.__struct_fields__:
            content[row.stream] = {}
    return operation
