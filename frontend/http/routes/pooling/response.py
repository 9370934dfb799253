"""The response to a request for vectors or scores, as an ASGI application."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

import msgspec
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from quire.frontend.http.routes.formatter import PromptTokens
from quire.frontend.http.routes.generate import WRITE_BYTES, new_request_id
from quire.frontend.http.routes.pooling.run import InputRun
from quire.frontend.http.schema.errors import ApiError
from quire.frontend.http.serving.gate import IGNORED_FIELDS
from quire.frontend.http.serving.server import Server
from quire.frontend.http.serving.sse import run_until_disconnect
from quire.frontend.http.serving.tracing import RequestSpan
from quire.protocol.errors import InvalidRequest
from quire.protocol.process.log import event_logger
from quire.protocol.request.sampling_params import SamplingParams

log = event_logger("http")

ENCODE = msgspec.json.encode
T = TypeVar("T")


class PooledUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens


class PooledHead(msgspec.Struct, frozen=True):
    """What every response begins with."""

    id: str
    created: int
    model: str

    @classmethod
    def to(cls, server: Server, prefix: str, request: Request, model: str) -> "PooledHead":
        return cls(new_request_id(server, f"{prefix}-", request), int(time.time()), model)


class Entries(ABC, Generic[T]):
    """Writes the JSON of one response: the list of its entries, and what is around it."""

    def __init__(self, answer: PooledHead) -> None:
        self.answer = answer
        self._num_written = 0

    def head(self) -> bytes:
        """Return everything before the first entry."""
        answer = self.answer
        around = {"id": answer.id, "object": "list", "created": answer.created, "model": answer.model, "data": []}
        return ENCODE(around).removesuffix(b"]}")

    @abstractmethod
    def push(self, index: int, outcome: T | ApiError) -> Iterable[bytes]:
        """Return the parts of the entries that this outcome completes. Each entry but the first begins with a comma."""

    def tail(self, usage: PooledUsage) -> Iterable[bytes]:
        """Return the rest, in parts."""
        return [b'],"usage":%b}' % ENCODE(usage)]

    def _entry(self, entry: object) -> bytes:
        """Return a whole entry, with the comma before it."""
        self._num_written += 1
        return (b"," if self._num_written > 1 else b"") + ENCODE(entry)


class PooledResponse(Generic[T]):
    """Computes the inputs of a request and writes the response.

    Unless the inputs fail together, the response is written as results arrive, and the entry of an input that fails has
    an error. Memory is bounded by the window of ``InputRun``: while the client does not read, nothing is submitted.
    """

    def __init__(self, server: Server, run: InputRun[T], entries: Entries[T]) -> None:
        self._server = server
        self._run = run
        self._entries = entries
        self._finish = "abort"
        self._arrival = server.metrics.now()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, request_id = self._run.asked, self._entries.answer.id
        scope["state"][IGNORED_FIELDS] = request.ignored
        self._terms = self._server.of_client(request.terms, scope)
        log.info("request", id=request_id, inputs=self._run.num_inputs, task=self._run.task)
        try:
            await run_until_disconnect(receive, self._respond(send))
            self._finish = "stop"
        except InvalidRequest as refused:
            self._server.metrics.rejected(refused.code)
            raise
        finally:
            span = RequestSpan(
                request_id=request_id,
                model=request.model,
                params=SamplingParams(),
                prompt_tokens=self._run.num_prompt_tokens,
                output_tokens=0,
                finish_reasons=[self._finish],
                arrival=self._arrival,
                end=self._server.metrics.now(),
                clocks=self._run.clocks,
            )
            self._server.note_end(scope, span)

    async def _respond(self, send: Send) -> None:
        writer = _PooledWriter(send, self._entries.answer.id)
        kept: list[tuple[int, T | ApiError]] = []
        writer.parts.append(self._entries.head())
        async for batch in self._run.results(self._terms):
            if self._run.fails_together:
                kept += batch
            elif await self._write(writer, batch):
                await writer.flush()
        await self._write(writer, kept)
        run = self._run
        num_tokens = run.num_prompt_tokens
        for part in self._entries.tail(PooledUsage(num_tokens, num_tokens, PromptTokens(run.num_cached_tokens))):
            await writer.write(part)
        await writer.finish()

    async def _write(self, writer: "_PooledWriter", batch: Sequence[tuple[int, T | ApiError]]) -> bool:
        """Write the entries of a batch; return whether there were any."""
        has_any = False
        for index, outcome in batch:
            for part in self._entries.push(index, outcome):
                has_any = True
                await writer.write(part)
        return has_any


class _PooledWriter:
    """A body in parts. It has a Content-Length if it is complete before the first flush.

    ``parts``: what is not sent yet.
    """

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._request_id = request_id
        self._num_bytes = 0
        self._has_begun = False
        self.parts: list[bytes] = []

    async def write(self, part: bytes) -> None:
        """Add a part. Other requests are served after each, because making one may take a millisecond."""
        self.parts.append(part)
        self._num_bytes += len(part)
        if self._num_bytes >= WRITE_BYTES:
            await self.flush()
        else:
            await asyncio.sleep(0)

    async def flush(self) -> None:
        """Send what is there; wait while a slow reader has not read the parts before."""
        await self._begin(None)
        await self._send({"type": "http.response.body", "body": self._taken(), "more_body": True})

    async def finish(self) -> None:
        body = self._taken()
        await self._begin(len(body))
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    def _taken(self) -> bytes:
        body = b"".join(self.parts)
        self.parts.clear()
        self._num_bytes = 0
        return body

    async def _begin(self, length: int | None) -> None:
        if self._has_begun:
            return
        self._has_begun = True
        headers = [(b"content-type", b"application/json"), (b"x-request-id", self._request_id.encode())]
        if length is not None:
            headers.append((b"content-length", str(length).encode()))
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
