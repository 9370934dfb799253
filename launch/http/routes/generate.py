"""From a parsed request to its response: submit, follow every answer, write them out, leave nothing running.

The same for both endpoints; how their answers are spelt is a Speller's matter.
"""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.launch.frontend.answers import OutputDelta, PlacedLogprobs, StreamedAnswer, start_answers
from quire.launch.http.schema.errors import ClientGone, as_api_error, failed_request
from quire.launch.http.schema.schema import CommonRequest
from quire.launch.http.serving.gate import TENANT
from quire.launch.http.serving.metrics import AnswerClock
from quire.launch.http.serving.server import Server
from quire.launch.http.serving.sse import DONE, EventStream, SlowReader, until_gone
from quire.launch.text.prompts import Prompt
from quire.protocol.errors import InvalidRequest
from quire.protocol.wire.logprobs import LogprobArrays

# Log probabilities, each some 150 bytes, that are kept until an answer is whole.
MAX_COLLECTED_VALUES = 2**22


class CachedTokens(msgspec.Struct, frozen=True):
    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


@dataclass(slots=True)
class Collected:
    """One answer's pieces, kept until all of it is there."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[PlacedLogprobs] | None = None
    prompt_logprobs: LogprobArrays | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, piece: OutputDelta) -> None:
        self.texts.append(piece.text)
        if piece.logprobs is not None:
            self.logprobs = [] if self.logprobs is None else self.logprobs
            self.logprobs += piece.logprobs
        if piece.prompt_logprobs is not None:
            self.prompt_logprobs = piece.prompt_logprobs
        self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_reason


class Speller(Protocol):
    """How one endpoint writes its answers as JSON."""

    @property
    def request_id(self) -> str: ...

    def event(self, index: int, piece: OutputDelta, usage: Usage | None) -> bytes:
        """One step of one answer."""
        ...

    def usage_event(self, usage: Usage) -> bytes:
        """The event after the last, where the client asked for the usage."""
        ...

    def whole(self, answers: Sequence[Collected], usage: Usage) -> bytes:
        """The response that is not streamed."""
        ...


def new_request_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


class Generation:
    """The response to one request, as an ASGI application: plain or streamed."""

    def __init__(self, server: Server, request: CommonRequest, prompts: Sequence[Prompt], speller: Speller) -> None:
        self._server = server
        self._request = request
        self._prompts = prompts
        self._speller = speller
        num_answers = len(prompts) * request.params.n
        self._unfinished = set(range(num_answers))
        self._tenant = 0
        self._num_output_tokens = [0] * num_answers
        self._num_cached_tokens = [0] * num_answers
        self._arrival = server.metrics.now()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._tenant = scope["state"][TENANT]
        streamed = self._request.stream
        await until_gone(receive, self._stream(send) if streamed else self._whole(scope, receive, send))

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        collected = [Collected() for _ in self._unfinished]
        num_kept = 0
        async with aclosing(self._batches()) as batches:
            async for batch in batches:
                for index, piece in batch:
                    num_kept += _num_values(piece)
                    collected[index].add(piece)
                if num_kept > MAX_COLLECTED_VALUES:
                    text = f"the answer has more than {MAX_COLLECTED_VALUES} log probabilities; ask for less at once"
                    raise InvalidRequest(text, "logprobs" if self._request.params.logprobs else "prompt_logprobs")
        tables = [answer.prompt_logprobs for answer in collected if answer.prompt_logprobs is not None]
        # Spelling one value takes about as long as tokenizing one character.
        num_values = sum(table.values.size for table in tables)
        body = await self._server.texts.run(num_values, lambda: self._speller.whole(collected, self._usage()))
        headers = {"x-request-id": self._speller.request_id}
        await Response(body, 200, headers, "application/json")(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        try:
            async with EventStream(send, self._speller.request_id) as stream:
                try:
                    await self._write_events(stream)
                except SlowReader:
                    raise
                except Exception as error:
                    await stream.fail(as_api_error(error))
        except SlowReader:
            self._server.metrics.cut_slow_reader()
            raise ClientGone from None

    async def _write_events(self, stream: EventStream) -> None:
        options = self._request.stream_options
        async with aclosing(self._batches()) as batches:
            async for batch in batches:
                usage = self._usage() if options.continuous_usage_stats else None
                events = [self._speller.event(index, piece, usage) for index, piece in batch]
                if self._unfinished:
                    await stream.write(events)
                    continue
                if options.include_usage:
                    events.append(self._speller.usage_event(self._usage()))
                await stream.write([*events, DONE], last=True)

    async def _batches(self) -> AsyncGenerator[list[tuple[int, OutputDelta]], None]:
        """The pieces of all answers as they come. However this ends, no sequence is left running."""
        try:
            with self._server.key_queues.enter(self._tenant, len(self._unfinished)) as place:
                answers = await self._start()
                async with aclosing(self._follow(answers)) as batches:
                    async for batch in batches:
                        for index, _ in batch:
                            place.begun(index)
                        yield batch
        except InvalidRequest as refused:
            self._server.metrics.rejected(refused.code)
            raise

    async def _start(self) -> list[StreamedAnswer]:
        request = self._request
        return await start_answers(
            self._server.engine,
            self._server.text_in,
            self._speller.request_id,
            self._prompts,
            request.params,
            clamp_max_tokens=request.clamp_max_tokens,
            priority=request.priority,
            cache_salt=request.cache_salt,
            prompt_only=request.prompt_only,
            tenant=self._tenant,
        )

    async def _follow(self, answers: Sequence[StreamedAnswer]) -> AsyncGenerator[list[tuple[int, OutputDelta]], None]:
        metrics = self._server.metrics
        lengths = [len(prompt.token_ids) for prompt in self._prompts for _ in range(self._request.params.n)]
        clocks = [AnswerClock(metrics, self._arrival, length) for length in lengths]
        try:
            async with aclosing(merge(answers)) as batches:
                async for batch in batches:
                    for index, piece in batch:
                        self._count(index, piece)
                        clocks[index].saw(piece)
                        if piece.finish_reason == "error":
                            raise failed_request(piece.detail)
                    yield batch
        finally:
            for index in self._unfinished:
                answers[index].abort()
                clocks[index].end("abort")

    def _count(self, index: int, piece: OutputDelta) -> None:
        self._num_output_tokens[index] = piece.num_output_tokens
        self._num_cached_tokens[index] = piece.num_cached_tokens
        if piece.finish_reason is not None:
            self._unfinished.discard(index)

    def _usage(self) -> Usage:
        """Each prompt counts once, however many answers it has; cached is what its first answer found."""
        num_prompt_tokens = sum(len(prompt.token_ids) for prompt in self._prompts)
        num_output_tokens = sum(self._num_output_tokens)
        cached = sum(self._num_cached_tokens[:: self._request.params.n])
        return Usage(num_prompt_tokens, num_output_tokens, num_prompt_tokens + num_output_tokens, CachedTokens(cached))


def _num_values(piece: OutputDelta) -> int:
    """Log probabilities in it."""
    of_prompt = 0 if piece.prompt_logprobs is None else piece.prompt_logprobs.values.size
    return of_prompt + sum(1 + len(each.logprobs.top) for each in piece.logprobs or ())


async def merge(answers: Sequence[StreamedAnswer]) -> AsyncGenerator[list[tuple[int, OutputDelta]], None]:
    """The pieces of several answers; those that wait come together, so that a step makes one write."""
    if len(answers) == 1:
        async for piece in answers[0].deltas():
            yield [(0, piece)]
        return
    # Bounded, so that behind a slow reader the pieces pile up in the sequences, which merge them.
    queue: asyncio.Queue[tuple[int, OutputDelta] | Exception] = asyncio.Queue(len(answers))

    async def pump(index: int, answer: StreamedAnswer) -> None:
        try:
            async for piece in answer.deltas():
                await queue.put((index, piece))
        except Exception as error:
            await queue.put(error)

    pumps = [asyncio.create_task(pump(index, answer)) for index, answer in enumerate(answers)]
    try:
        num_left = len(answers)
        while num_left:
            items = [await queue.get()]
            with suppress(asyncio.QueueEmpty):
                while True:
                    items.append(queue.get_nowait())
            batch: list[tuple[int, OutputDelta]] = []
            for item in items:
                if isinstance(item, Exception):
                    raise item
                num_left -= item[1].finish_reason is not None
                batch.append(item)
            yield batch
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
