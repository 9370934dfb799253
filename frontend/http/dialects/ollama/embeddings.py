"""POST /api/embed and /api/embeddings: vectors, in the form of Ollama's API."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from quire.frontend.http.dialects.ollama.body import served_name
from quire.frontend.http.routes.pooling.response import ENCODE, Entries, PooledHead, PooledResponse, PooledUsage
from quire.frontend.http.routes.pooling.run import PooledRun, Rows
from quire.frontend.http.schema.errors import ApiError
from quire.frontend.http.schema.pooling_requests import PooledRequest, PoolingParser
from quire.frontend.http.schema.reading import read
from quire.frontend.http.schema.unknown_fields import Ignored
from quire.frontend.http.serving.body import json_response, read_json
from quire.frontend.http.serving.server import Server


class EmbedBody(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of both routes: ``input`` of /api/embed, and ``prompt`` of the older /api/embeddings."""

    model: str | None = None
    input: Any = None
    prompt: str = ""
    truncate: bool = True
    dimensions: int = 0
    # Ignored: they say how the model is loaded.
    options: dict[str, Any] | None = None
    keep_alive: Any = None


class _Vectors(Entries[Rows]):
    """``began``: as of ``OllamaRequest``; None: the response is the one vector of /api/embeddings."""

    def __init__(self, answer: PooledHead, began: int | None) -> None:
        super().__init__(answer)
        self._began = began

    def head(self) -> bytes:
        if self._began is None:
            return b'{"embedding":'
        return ENCODE({"model": self.answer.model, "embeddings": []}).removesuffix(b"]}")

    def push(self, index: int, outcome: Rows | ApiError) -> Iterable[bytes]:
        if isinstance(outcome, ApiError):
            raise outcome  # the API has no place for the error of one input
        return [self._entry(outcome[0].tolist())]

    def tail(self, usage: PooledUsage) -> Iterable[bytes]:
        if self._began is None:
            return [b"}"]
        figures = {"total_duration": time.monotonic_ns() - self._began, "load_duration": 0}
        return [b"]," + ENCODE(figures | {"prompt_eval_count": usage.prompt_tokens})[1:]]


async def embed(field: str, server: Server, request: Request) -> ASGIApp:
    """Return the vectors of texts.

    ``field``: the one with the texts, which depends on the route.
    """
    began = time.monotonic_ns()
    server.capabilities.require_task(request.scope["path"], "embed")
    server.require_serving()
    (model, parsed), _ = await read_json(request, server.texts, partial(_parse, server, field))
    if parsed is None:
        return json_response({"model": model, "embeddings": []} if field == "input" else {"embedding": []})
    answer = PooledHead.to(server, "embed", request, model)
    run = PooledRun(server, parsed, answer.id)
    return PooledResponse(server, run, _Vectors(answer, began if field == "input" else None))


def _parse(server: Server, field: str, raw: Mapping[str, Any]) -> tuple[str, PooledRequest | None]:
    """Return the model's name as the client wrote it, and the request; None if there are no texts."""
    ignored = Ignored(server.parser.unknown_fields)
    body = read(EmbedBody, raw, ignored=ignored)
    model, texts = served_name(server.parser, body.model), getattr(body, field)
    if texts in ("", [], None):
        return body.model or model, None
    fields = {"model": model, "input": texts, "dimensions": body.dimensions or None}
    parser = PoolingParser(parser=server.parser, encoder=server.input_encoder)
    parsed, _ = parser.embedding(fields | {"truncate_prompt_tokens": -1 if body.truncate else None}, "embed")
    of = parsed.field_of
    named = replace(parsed, field_of=lambda i: of(i).replace("input", field), ignored=ignored.names)
    return body.model or model, named
