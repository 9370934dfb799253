"""POST /v1/embeddings, /pooling, /classify, /score and /rerank."""

from collections.abc import Callable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import ASGIApp

from quire.frontend.http.routes.pooling.entries import LabelEntries, RankEntries, ScoreEntries, VectorEntries
from quire.frontend.http.routes.pooling.response import Entries, PooledHead, PooledResponse
from quire.frontend.http.routes.pooling.run import PooledRun, Rows
from quire.frontend.http.schema.pooling_bodies import ClassificationBody, EmbeddingBody, RerankBody, ScoreBody
from quire.frontend.http.schema.pooling_requests import PooledRequest, PoolingParser
from quire.frontend.http.serving.body import read_json
from quire.frontend.http.serving.row import Row
from quire.frontend.http.serving.server import Server
from quire.frontend.text.pooling.comparisons import Scores

T = TypeVar("T")
COHERE_PATH = "/v2/rerank"
"""Responses of Cohere's version 2 have no documents, those of Jina's interface do."""


async def embeddings(server: Server, request: Request) -> ASGIApp:
    server.capabilities.require_task(request.scope["path"], "embed")
    parsed, body = await _read(server, request, lambda parser, raw: parser.embedding(raw, "embed"))
    answer = PooledHead.to(server, "embd", request, parsed.model)
    entries = VectorEntries(answer, "embedding", "embedding", body.encoding_format, is_list_of_rows=False)
    return _response(server, parsed, entries)


async def pooling(server: Server, request: Request) -> ASGIApp:
    server.capabilities.require_pooling(request.scope["path"])
    parsed, body = await _read(server, request, lambda parser, raw: parser.embedding(raw, None))
    answer = PooledHead.to(server, "pool", request, parsed.model)
    has_rows = parsed.params.task == "token_embed"
    entries = VectorEntries(answer, "pooling", "data", body.encoding_format, is_list_of_rows=has_rows)
    return _response(server, parsed, entries)


async def classify(server: Server, request: Request) -> ASGIApp:
    server.capabilities.require_task(request.scope["path"], "classify")
    parsed = await _read(server, request, lambda parser, raw: parser.classification(raw))
    answer = PooledHead.to(server, "classify", request, parsed.model)
    entries = LabelEntries(answer, server.input_encoder.pooling.labels)
    return _response(server, parsed, entries)


async def score(server: Server, request: Request) -> ASGIApp:
    task = server.capabilities.require_scoring(request.scope["path"])
    parsed, comparison = await _read(server, request, lambda parser, raw: parser.score(raw, task))
    answer = PooledHead.to(server, "score", request, parsed.model)
    return _response(server, parsed, ScoreEntries(answer, Scores(comparison)))


async def rerank(server: Server, request: Request) -> ASGIApp:
    path = request.scope["path"]
    task = server.capabilities.require_scoring(path)
    parsed, comparison, body, documents = await _read(server, request, lambda parser, raw: parser.rerank(raw, task))
    shown = path != COHERE_PATH if body.return_documents is None else body.return_documents
    answer = PooledHead.to(server, "rerank", request, parsed.model)
    entries = RankEntries(answer, Scores(comparison), documents, body.top_n, shown=shown)
    return _response(server, parsed, entries)


ROUTES = (
    Row("POST", "/v1/embeddings", embeddings, EmbeddingBody),
    *(Row("POST", path, rerank, RerankBody) for path in ("/rerank", "/v1/rerank", COHERE_PATH)),
    *(Row("POST", path, score, ScoreBody) for path in ("/score", "/v1/score")),
    *(Row("POST", path, classify, ClassificationBody) for path in ("/classify", "/v1/classify")),
    Row("POST", "/pooling", pooling, EmbeddingBody),
)


async def _read(server: Server, request: Request, parse: Callable[[PoolingParser, dict[str, Any]], T]) -> T:
    server.require_serving()
    parser = PoolingParser(parser=server.parser, encoder=server.input_encoder)
    parsed, _ = await read_json(request, server.texts, lambda raw: parse(parser, raw))
    return parsed


def _response(server: Server, parsed: PooledRequest, entries: Entries[Rows]) -> ASGIApp:
    return PooledResponse(server, PooledRun(server, parsed, entries.answer.id), entries)
