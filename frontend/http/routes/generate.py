"""From a parsed request to its response: submit the sequences, stream or collect their outputs, abort the unfinished.

Both endpoints share this; a ResponseFormatter makes the JSON of each.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.frontend.engine.answers import ForkPoint, OutputDelta, StreamedAnswer, engines_of, start_answers
from quire.frontend.engine.kept_updates import KeptUpdates
from quire.frontend.http.routes.formatter import (
    Collected,
    PromptTokens,
    ResponseFormatter,
    Usage,
    num_prompt_values,
    num_values,
    report_tools,
)
from quire.frontend.http.schema.bodies import ForkBody
from quire.frontend.http.schema.errors import ClientDisconnected, aborted_request, as_api_error, failed_request
from quire.frontend.http.schema.job_hints import with_session
from quire.frontend.http.schema.schema import CommonRequest, fork_request
from quire.frontend.http.serving.gate import IGNORED_FIELDS, REQUEST_ID
from quire.frontend.http.serving.key_queues import WaitingSequences
from quire.frontend.http.serving.metrics import SequenceClock
from quire.frontend.http.serving.server import Server
from quire.frontend.http.serving.socket_protocol import WRITER
from quire.frontend.http.serving.sse import (
    DATA_EVENTS,
    EventStream,
    EventStyle,
    SlowReader,
    SlowWork,
    run_until_disconnect,
)
from quire.frontend.http.serving.tracing import RequestSpan
from quire.frontend.sessions.open_session import Piece
from quire.frontend.text.prompts import Prompt
from quire.protocol.errors import InvalidRequest
from quire.protocol.process.log import event_logger

log = event_logger("http")

# Most log probabilities, of about 150 bytes each in memory and at most 100 in JSON, that are kept until a response is
# complete.
MAX_COLLECTED_VALUES = 2**20
WRITE_BYTES = 1024 * 1024  # Part of a response that is written at once.

# Deltas of one step, with the indices of their sequences.
Batch = list[tuple[int, OutputDelta]]
NewFormatter = Callable[[Any, Sequence[Prompt], str], ResponseFormatter]


def new_request_id(server: Server, prefix: str, request: Request) -> str:
    """Return a unique id that contains the client's ``X-Request-Id``, if it sent one. ``prefix``: as of ``new_id``."""
    return server.new_id(prefix, request.scope["state"][REQUEST_ID])


class Generation:
    """The response to one request, plain or streamed, as an ASGI application."""

    __slots__ = (
        "_answers", "_arrival", "_clocks", "_consume", "_events", "_finish_reasons", "_fork", "_formatter",
        "_has_prompt_logprobs", "_has_running_usage", "_kept", "_new_formatter", "_num_image_tokens", "_num_sequences",
        "_piece", "_place", "_prompts",
        "_request", "_running", "_server", "_style", "_turn", "_waiting", "terms",
    )  # fmt: skip

    def __init__(
        self,
        server: Server,
        request: CommonRequest,
        prompts: Sequence[Prompt],
        formatter: ResponseFormatter,
        style: EventStyle = DATA_EVENTS,
        *,
        new_formatter: NewFormatter | None = None,
        fork: ForkPoint | None = None,
        piece: Piece | None = None,
        kept: KeptUpdates | None = None,
        waiting: WaitingSequences | None = None,
    ) -> None:
        """
        Args:
            style: how events are written, if the request is streamed.
            new_formatter: returns the formatter of a fork, from request, prompts and request id; None: the endpoint
                has no forks.
            fork: where in another answer all of the sequences begin.
            piece: the piece of a session of which the one sequence is the answer.
            kept: keeps the updates of the one sequence, and has those with which it begins.
            waiting: its sequences, if they are in the queue of their key already.
        """
        self._server = server
        self._style = style
        self._request = request
        self._prompts = prompts
        self._formatter = formatter
        self._new_formatter = new_formatter
        self._fork = fork
        self._piece = piece
        self._kept = kept
        self._place = waiting
        self._has_running_usage = request.stream_options.continuous_usage_stats
        self._has_prompt_logprobs = request.params.prompt_logprobs is not None
        self._num_sequences = len(prompts) * request.params.n
        self._num_image_tokens = sum(prompt.num_image_tokens for prompt in prompts)
        self._running: list[tuple[int, StreamedAnswer, SequenceClock]] = []
        """The submitted sequences that have not ended, with their indices."""
        self.terms = request.terms
        self._finish_reasons: set[str] = set()
        self._clocks: list[SequenceClock] = []
        self._answers: list[StreamedAnswer] = []
        self._turn: asyncio.Future[SlowWork | None] | None = None
        self._arrival = server.metrics.now()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"][IGNORED_FIELDS] = self._request.ignored
        session = "" if self._piece is None else self._piece.name
        job = with_session(self.terms.job, scope["headers"], session)
        self.terms = self._server.of_client(replace(self.terms, job=job), scope)
        self._begin()
        try:
            await run_until_disconnect(
                receive, self._stream(scope, send) if self._request.stream else self._respond(scope, receive, send)
            )
        finally:
            self._note_end(scope)

    def fork(self, body: ForkBody, request_id: str) -> "Generation":
        """Return the response to further answers, which begin with the tokens that one of these has so far.

        Raises:
            InvalidRequest: a field is out of range, the answer has ended, or the request cannot be forked.
        """
        request, num_sequences = self._request, self._num_sequences
        if self._new_formatter is None:
            text = "only requests of /v1/completions and /v1/chat/completions can be forked"
            raise InvalidRequest(text, "id", "unsupported_value")
        if request.params.use_beam_search or request.params.n != request.num_returned:
            text = "requests with use_beam_search, or with best_of above n, cannot be forked"
            raise InvalidRequest(text, "id", "unsupported_value")
        if body.index >= num_sequences:
            raise InvalidRequest(f"index must be from 0 to {num_sequences - 1} (got {body.index})", "index")
        answer = next((answer for index, answer, _ in self._running if index == body.index), None)
        if answer is None:
            raise InvalidRequest(f"answer {body.index} of the request has ended", "index", "request_ended")
        so_far = self._clocks[body.index].num_shared + self._clocks[body.index].num_tokens
        num_tokens = so_far if body.num_tokens is None else body.num_tokens
        if num_tokens > so_far:
            text = f"num_tokens must be from 0 to {so_far}, the tokens that the answer has so far (got {num_tokens})"
            raise InvalidRequest(text, "num_tokens")
        if body.max_tokens is not None and body.max_tokens <= num_tokens:
            text = f"max_tokens must be at least {num_tokens + 1}: the fork begins with {num_tokens} output tokens"
            raise InvalidRequest(f"{text} (got {body.max_tokens})", "max_tokens")
        prompts = [self._prompts[body.index // request.params.n]]
        forked = fork_request(request, body, self.terms)
        formatter = self._new_formatter(forked, prompts, request_id)
        return Generation(
            self._server,
            forked,
            prompts,
            formatter,
            self._style,
            new_formatter=self._new_formatter,
            fork=ForkPoint(answer.sequence, num_tokens),
        )

    def _finished(self) -> list[str]:
        """Return the finish reasons of the sequences, each once."""
        is_aborted = bool(self._running) or not self._clocks
        return sorted(self._finish_reasons | ({"abort"} if is_aborted else set()))

    def _note_end(self, scope: Scope) -> None:
        usage = self._usage()
        span = RequestSpan(
            request_id=self._formatter.request_id,
            model=self._request.model,
            params=self._request.params,
            prompt_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
            finish_reasons=self._finished(),
            arrival=self._arrival,
            end=self._server.metrics.now(),
            clocks=self._clocks,
            engines=engines_of(self._answers),
        )
        self._server.note_end(scope, span)

    def _begin(self) -> None:
        request = self._request
        self._server.metrics.began(request.params)
        log.info(
            "request",
            id=self._formatter.request_id,
            **self._server.log_fields(request.model),
            prompts=len(self._prompts),
            prompt_tokens=sum(len(prompt.token_ids) for prompt in self._prompts),
            n=request.params.n,
            max_tokens=request.params.max_tokens,
            stream=request.stream,
        )

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        collected = [Collected() for _ in range(self._num_sequences)]
        num_kept = 0
        self._check_num_values(
            num_prompt_values(self._request.params, self._prompts)
        )  # known before the prompts are computed

        def collect(batch: Batch) -> None:
            nonlocal num_kept
            for index, delta in batch:
                num_kept += num_values(delta)
                collected[index].add(delta)
            self._check_num_values(num_kept)

        await self._run(collect)
        # Formatting one value, or parsing one character, takes about as long as tokenizing one character.
        outputs = [output for each in collected for output in each.outputs()]
        size = num_kept + sum(each.size for each in outputs)
        body = await self._server.texts.run(size, lambda: self._formatter.response(outputs, self._usage()))
        report_tools(self._formatter, self._answers)
        headers = {"x-request-id": self._formatter.request_id}
        start = Response(b"", 200, {**headers, "content-length": str(len(body))}, "application/json")
        await send({"type": "http.response.start", "status": 200, "headers": start.raw_headers})
        rest = memoryview(body)
        while rest.nbytes:  # sending waits while a slow reader has not read the parts before
            part, rest = rest[:WRITE_BYTES], rest[WRITE_BYTES:]
            await send({"type": "http.response.body", "body": bytes(part), "more_body": bool(rest.nbytes)})

    def _check_num_values(self, count: int) -> None:
        if count > MAX_COLLECTED_VALUES:
            limit = f"must be at most {MAX_COLLECTED_VALUES} (got {count})"
            text = f"log probabilities of a response {limit}: request fewer, or stream"
            raise InvalidRequest(text, "logprobs" if self._request.params.logprobs else "prompt_logprobs")

    async def _stream(self, scope: Scope, send: Send) -> None:
        stream = EventStream(send, self._formatter.request_id, scope["state"].get(WRITER), self._style)
        self._events = stream
        try:
            await self._run(self._write_events)
            report_tools(self._formatter, self._answers)
        except SlowReader:
            self._server.metrics.cut_slow_reader()
            raise ClientDisconnected from None
        except Exception as error:
            if not stream.started:
                raise
            await stream.fail(as_api_error(error))

    def _write_events(self, batch: Batch) -> SlowWork | None:
        usage = self._usage() if self._has_running_usage else None
        if self._has_prompt_logprobs:
            num_values = sum(d.prompt_logprobs.values.size for _, d in batch if d.prompt_logprobs is not None)
            if num_values:
                return partial(self._write_slowly, batch, usage, num_values)
        return self._write([self._formatter.event(index, delta, usage) for index, delta in batch])

    async def _write_slowly(self, batch: Batch, usage: Usage | None, num_values: int) -> None:
        def format_batch() -> list[bytes]:
            return [self._formatter.event(index, delta, usage) for index, delta in batch]

        work = self._write(await self._server.texts.run(num_values, format_batch))
        if work is not None:
            await work()

    def _write(self, events: list[bytes]) -> SlowWork | None:
        if self._running:
            return self._events.write(events)
        if self._request.stream_options.include_usage:
            events.append(self._formatter.usage_event(self._usage()))
        if self._style.end is not None:
            events.append(self._style.end)
        return self._events.write(events, last=True)

    async def _run(self, consume: Callable[[Batch], SlowWork | None]) -> None:
        """Submit the sequences, and pass their deltas to ``consume`` as they arrive, those of a step together.

        ``consume`` is called by the engine client, because waking a task for each stream and step would cost more than
        the rest of the step. It may return slow work, until whose end later deltas wait. However this ends, no sequence
        is left running.
        """
        self._consume = consume
        try:
            waiting = self._place or self._server.enter_queue(self.terms, self._num_sequences)
            with waiting as self._waiting, self._piece or nullcontext():
                await self._start()
                self._server.running[self._formatter.request_id] = self
                try:
                    while (work := await self._next_slow_work()) is not None:
                        await work()
                finally:
                    del self._server.running[self._formatter.request_id]
                    for _, answer, clock in self._running:
                        answer.abort()
                        clock.end("abort")
        except InvalidRequest as refused:
            self._server.metrics.rejected(refused.code)
            refused.message = self.terms.without_path(refused.message)
            raise

    async def _next_slow_work(self) -> SlowWork | None:
        """Wait until ``consume`` has returned slow work, or (None) until all sequences have ended."""
        self._turn = asyncio.get_running_loop().create_future()
        self._advance()
        return await self._turn

    def _advance(self) -> None:
        """Consume what is new. The engine client's callback, once per step."""
        if self._turn is None or self._turn.done():
            return
        try:
            batch = self._take()
            work = self._consume(batch) if batch else None
            if self._piece is not None:
                for _, delta in batch:
                    self._piece.add(delta.token_ids, delta.finish_reason)
        except Exception as error:
            self._turn.set_exception(error)
            return
        if work is not None or not self._running:
            self._turn.set_result(work)

    def _take(self) -> Batch:
        """Return the new delta of each sequence that has one."""
        batch: Batch = []
        ended: set[int] = set()
        try:
            for index, answer, clock in self._running:
                delta = answer.take()
                if delta is None:
                    continue
                if not clock.num_tokens and delta.num_output_tokens > clock.num_shared:
                    self._waiting.remove(index)
                clock.record(delta)
                if delta.finish_reason is not None:
                    ended.add(index)
                    self._finish_reasons.add(delta.finish_reason)
                    if delta.finish_reason == "error":
                        raise failed_request(self.terms.without_path(delta.detail))
                    if delta.finish_reason == "abort":
                        raise aborted_request()
                batch.append((index, delta))
        finally:
            if ended:
                self._running = [each for each in self._running if each[0] not in ended]
        return batch

    async def _start(self) -> None:
        request = self._request
        if self._fork is None:
            self.terms = await self._server.for_model(request.model, self.terms)
        answers = await start_answers(
            self._server.engine,
            self._server.text_in,
            self._formatter.request_id,
            self._prompts,
            request.params,
            self.terms,
            clamp_max_tokens=request.clamp_max_tokens,
            prompt_only=request.prompt_only,
            fork=self._fork,
            kept=self._kept,
            on_update=self._advance,
        )
        self._answers, metrics = answers, self._server.metrics
        lengths = [len(prompt.token_ids) for prompt in self._prompts for _ in range(self._request.params.n)]
        num_shared = 0 if self._fork is None else self._fork.num_tokens
        self._clocks = [SequenceClock(metrics, self._arrival, length, num_shared) for length in lengths]
        self._formatter.clocks = self._clocks
        self._running = [*zip(range(self._num_sequences), answers, self._clocks, strict=True)]

    def _usage(self) -> Usage:
        """Return token counts. A prompt, with what a fork begins with, counts once for its n sequences."""
        num_prompt_tokens = sum(len(prompt.token_ids) for prompt in self._prompts)
        num_prompt_tokens += 0 if self._fork is None else self._fork.num_tokens
        num_output_tokens = sum(clock.num_tokens for clock in self._clocks)
        cached = sum(clock.num_cached_tokens for clock in self._clocks[:: self._request.params.n])
        details = PromptTokens(cached, self._num_image_tokens or UNSET)
        return Usage(num_prompt_tokens, num_output_tokens, num_prompt_tokens + num_output_tokens, details)
