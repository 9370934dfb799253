"""The engine over ZeroMQ, for an asyncio front end."""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import zmq.asyncio

from quire.launch.engine_client import Update
from quire.launch.streams import Stream, StreamTable
from quire.protocol.channel import Link
from quire.protocol.codec import ProtocolError
from quire.protocol.errors import EngineError
from quire.protocol.messages import (
    PROTOCOL_VERSION,
    Abort,
    AddRequest,
    Control,
    EngineState,
    Hello,
    Message,
    Refused,
    Rejected,
    SchedulerToFrontEnd,
    Statistics,
    StepOutputs,
    Stop,
    Welcome,
)
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.zmq_channel import AsyncZmqChannel, frontend_address


class ZmqSequence:
    """One answer in flight; see ``engine_client.Sequence``."""

    def __init__(self, client: "ZmqEngineClient", stream: Stream, news: asyncio.Event) -> None:
        self.request_id = stream.request_id
        self._client = client
        self._stream = stream
        self._news = news

    async def updates(self) -> AsyncIterator[Update]:
        while True:
            await self._news.wait()
            self._news.clear()
            update = self._stream.take()
            if update is not None:
                yield update
                if update.ended is not None:
                    return

    def stop_at(self, num_output_tokens: int) -> None:
        self._end(Stop(self.request_id, num_output_tokens))

    def abort(self) -> None:
        self._end(Abort([self.request_id]))

    def _end(self, message: Message) -> None:
        if not self._stream.over and not self._stream.muted:
            self._client.post(message)
        self._stream.muted = True


class ZmqEngineClient:
    """Implements ``engine_client.EngineClient``.

    One task receives; a step's outputs wake each touched sequence once. Owns the socket and the table of streams.
    """

    def __init__(self, directory: Path, max_model_len: int, vocab_size: int) -> None:
        self.state = "loading"
        self.detail = ""
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self._context = zmq.asyncio.Context()
        self._channel = AsyncZmqChannel(self._context, frontend_address(directory), Link(SchedulerToFrontEnd))
        self._table = StreamTable()
        self._queries: dict[int, asyncio.Future[Statistics]] = {}
        self._next_query = 0
        self._receiver: asyncio.Task[None] | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    async def connect(self, index: int = 0) -> None:
        """Say hello and begin to receive. The engine need not be ready, nor even up, yet."""
        self.post(Hello(PROTOCOL_VERSION, "frontend", index, os.getpid()))
        self._receiver = asyncio.create_task(self._receive())

    async def close(self) -> None:
        if self._receiver is not None:
            self._receiver.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._receiver
        self._channel.close()
        self._context.term()  # waits no longer than the sockets linger

    async def add(
        self,
        request_id: str,
        prompt_token_ids: list[int] | npt.NDArray[np.int32],
        params: SamplingParams,
        seed: int,
        priority: int,
        cache_salt: str,
    ) -> ZmqSequence:
        if self.state == "failed":
            raise EngineError(self.detail)
        news = asyncio.Event()
        stream = self._table.add(request_id, news.set)
        self._idle.clear()
        self.post(
            AddRequest(
                request_id=request_id,
                prompt_token_ids=np.asarray(prompt_token_ids, dtype=np.int32),
                sampling=params,
                seed=seed,
                priority=priority,
                cache_salt=cache_salt,
                arrival=time.monotonic(),
            )
        )
        return ZmqSequence(self, stream, news)

    async def statistics(self) -> Statistics:
        if self.state == "failed":
            raise EngineError(self.detail)
        if self.state == "loading":
            return Statistics(0, done=False)
        self._next_query += 1
        query = self._next_query
        answer: asyncio.Future[Statistics] = asyncio.get_running_loop().create_future()
        self._queries[query] = answer
        self.post(Control("statistics", query))
        try:
            return await answer
        finally:
            del self._queries[query]

    async def wait_idle(self, timeout: float) -> bool:
        """Wait until no answer is in flight; False when that took longer than ``timeout`` seconds."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            return False
        return True

    def abort_all(self) -> None:
        """End every answer in flight; each reader sees its ending."""
        if len(self._table):
            self.post(Abort(self._table.request_ids))

    def post(self, message: Message) -> None:
        """Send without waiting: the socket keeps the order, and its queue is bounded."""
        self._channel.post(message)

    async def _receive(self) -> None:
        try:
            while True:
                self._apply(await self._channel.receive())
        except ProtocolError as error:
            self.fail(f"the link to the scheduler is broken: {error}")

    def _apply(self, message: Message) -> None:
        match message:
            case StepOutputs():
                self._table.apply(message)
            case Rejected():
                self._table.reject(message)
            case Statistics():
                answer = self._queries.get(message.query)
                if answer is not None and not answer.done():
                    answer.set_result(message)
            case EngineState(kind="failed", detail=detail) | Refused(reason=detail):
                self.fail(detail)
            case EngineState():
                if self.state != "draining":
                    self.state = message.kind
            case Welcome():
                pass
        if not len(self._table):
            self._idle.set()

    def fail(self, reason: str) -> None:
        """The engine is gone: every stream and query ends with that."""
        self.state, self.detail = "failed", reason
        self._table.fail(reason)
        self._idle.set()
        for answer in self._queries.values():
            if not answer.done():
                answer.set_exception(EngineError(reason))
