"""The engine client over ZeroMQ, for asyncio."""

import asyncio
import os
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import numpy as np
import numpy.typing as npt
import zmq.asyncio

from quire.launch.frontend.engine_client import Sequence, Update
from quire.launch.frontend.job import NO_JOB, Job
from quire.launch.frontend.session import Session
from quire.launch.frontend.streams import Stream
from quire.protocol.errors import EngineError, InvalidRequest
from quire.protocol.request.pooling_params import PoolingParams
from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.wire.adapter_messages import AdapterRef, UnloadAdapter
from quire.protocol.wire.channel import Link
from quire.protocol.wire.codec import ProtocolError
from quire.protocol.wire.front_end_messages import AddRequest, Control, EngineState, SchedulerToFrontEnd, Statistics
from quire.protocol.wire.link_messages import Message
from quire.protocol.wire.zmq_channel import AsyncZmqChannel, frontend_address

HEARTBEAT_S = 1.0
RELINK_S = 0.05
"""Delay before a broken link is opened again."""
MAX_MERGED = 16
"""Messages that may be applied before readers are called, if that many have arrived."""


class Readers:
    """Calls each reader once, in the next turn of the event loop, for all of its sequences that have an update."""

    def __init__(self) -> None:
        self._due: dict[Callable[[], None], None] = {}

    def call_later(self, on_update: Callable[[], None]) -> None:
        if not self._due:
            asyncio.get_running_loop().call_soon(self._call)
        self._due[on_update] = None

    def _call(self) -> None:
        due, self._due = self._due, {}
        for on_update in due:
            on_update()


class ZmqSequence:
    """One answer in flight; see ``engine_client.Sequence``."""

    def __init__(self, session: Session, stream: Stream) -> None:
        self.request_id = stream.request_id
        self.take: Callable[[], Update | None] = stream.take
        self._session = session
        self.stream = stream

    def stop_at(self, num_output_tokens: int) -> None:
        self._session.stop_at(self.stream, num_output_tokens)

    def abort(self) -> None:
        self._session.abort(self.stream)

    def calls_tool(self, tool: str) -> None:
        self._session.calls_tool(self.stream, tool)


class ZmqEngineClient:
    """Implements ``engine_client.EngineClient``.

    One task receives, and applies all messages that have arrived before any reader is called: to a front end that falls
    behind, several steps are one. Owns the socket and the session. A request posted while there is no link is not lost:
    the session submits it on the next link.
    """

    def __init__(self, directory: Path, max_model_len: int, vocab_size: int, index: int = 0) -> None:
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self._directory = directory
        self._context = zmq.asyncio.Context()
        self._channel: AsyncZmqChannel | None = None
        self._readers = Readers()
        self._session = Session(self._post, os.getpid(), index, notify=self._readers.call_later)
        self._scheduler_incarnation = 0
        self._queries: dict[int, asyncio.Future[Statistics]] = {}
        self._next_query = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._idle = asyncio.Event()
        self._idle.set()
        self._state_known = asyncio.Event()
        self._was_ready = asyncio.Event()

    @property
    def state(self) -> str:
        return self._session.state

    @property
    def pause_kind(self) -> str:
        return self._session.pause

    @property
    def seconds_without_progress(self) -> float:
        return self._session.seconds_without_progress

    def connect(self, incarnation: int = 1) -> None:
        """Connect to the scheduler of this incarnation, which may not have started yet, and resubmit requests."""
        if not self._tasks:
            self._tasks.append(asyncio.create_task(self._beat()))
        for task in self._tasks[1:]:
            task.cancel()
        del self._tasks[1:]
        had_scheduler, self._scheduler_incarnation = self._scheduler_incarnation > 0, incarnation
        self._session.was_ready |= incarnation > 1  # an earlier scheduler was ready
        self._relink(after_death=had_scheduler)
        self._tasks.append(asyncio.create_task(self._receive()))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._channel is not None:
            self._channel.close()
        self._context.term()  # waits at most the sockets' linger time

    async def add(
        self,
        request_id: str,
        prompt_token_ids: list[int] | npt.NDArray[np.int32],
        params: SamplingParams,
        seed: int,
        priority: int,
        cache_salt: str,
        tenant: int = 0,
        *,
        parent: Sequence | None = None,
        num_shared: int = 0,
        adapter: AdapterRef | None = None,
        job: Job = NO_JOB,
        pooling: PoolingParams | None = None,
        on_update: Callable[[], None],
    ) -> ZmqSequence:
        if self._channel is not None and self._channel.is_full:
            raise InvalidRequest("the engine is overloaded: retry later", None, "queue_full")
        root = parent.stream if isinstance(parent, ZmqSequence) else None
        shared = root.tokens[:num_shared] if root is not None and num_shared else None
        request = AddRequest(
            request_id=request_id,
            prompt_token_ids=np.asarray(prompt_token_ids, dtype=np.int32),
            sampling=params,
            seed=seed,
            output_token_ids=None if shared is None else np.array(shared, np.int32),
            priority=priority,
            cache_salt=cache_salt,
            arrival=time.monotonic(),
            adapter=adapter,
            tenant=tenant,
            job_id=job.id,
            is_last_step=job.is_last_step,
            pooling=pooling,
            hint=job.hint,
        )
        stream = self._session.add(request, on_update, root)
        self._idle.clear()
        return ZmqSequence(self._session, stream)

    async def statistics(self) -> Statistics | None:
        self._session.require_alive()
        return await self.control("statistics") if self._session.accepts else None

    async def control(self, kind: str) -> Statistics:
        return await self._ask(lambda query: Control(kind, query))

    async def unload(self, adapter: AdapterRef, *, force: bool) -> Statistics:
        return await self._ask(lambda query: UnloadAdapter(adapter.name, adapter.digest, force, query))

    async def _ask(self, question: Callable[[int], Message]) -> Statistics:
        """Send the message that ``question`` returns for a query number, and return its answer."""
        self._session.require_alive()
        self._next_query += 1
        query = self._next_query
        answer: asyncio.Future[Statistics] = asyncio.get_running_loop().create_future()
        self._queries[query] = answer
        self._post(question(query))
        try:
            return await answer
        finally:
            del self._queries[query]

    async def wait_state_known(self) -> None:
        """Wait until the scheduler has sent the engine's state."""
        await self._state_known.wait()

    async def wait_ready(self) -> None:
        """Wait until the engine accepts requests for the first time."""
        await self._was_ready.wait()

    async def wait_idle(self, timeout: float) -> bool:
        """Wait until no answer is in flight; return False after ``timeout`` seconds."""
        self._settle()
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            return False
        return True

    def shut_down(self, detail: str) -> None:
        """End every answer in flight with an error; each reader sees it."""
        self._session.shut_down(detail)
        self._settle()

    def drain(self) -> None:
        """Start to refuse new requests."""
        if self.state != "failed":
            self._session.become("draining")

    def fail(self, reason: str) -> None:
        """End every stream and query with ``reason``: the engine has failed."""
        self._session.fail(reason)
        self._state_known.set()
        for answer in self._queries.values():
            if not answer.done():
                answer.set_exception(EngineError(reason))
        self._settle()

    # ---- the link

    def _post(self, message: Message) -> None:
        """Send without blocking. The socket keeps the order, and its queue is bounded."""
        if self._channel is not None:
            self._channel.post(message)

    def _relink(self, *, after_death: bool = False) -> None:
        if self._channel is not None:
            self._channel.close()
        address = frontend_address(self._directory, self._scheduler_incarnation)
        self._channel = AsyncZmqChannel(self._context, address, Link(SchedulerToFrontEnd))
        self._session.begin_link(after_death=after_death)
        self._settle()

    async def _receive(self) -> None:
        for num_received in count(1):
            if num_received % MAX_MERGED == 0:
                await asyncio.sleep(0)  # receiving does not wait while there are messages
            assert self._channel is not None
            try:
                message = await self._channel.receive()
            except ProtocolError as error:
                message = error
            if not self._session.take(message):
                await asyncio.sleep(RELINK_S)
                self._relink()
            elif self.state == "failed":
                self.fail(self._session.detail)
            elif isinstance(message, Statistics):
                self._answer(message)
            elif isinstance(message, EngineState):
                self._state_known.set()
            self._settle()

    def _answer(self, statistics: Statistics) -> None:
        answer = self._queries.get(statistics.query)
        if answer is not None and not answer.done():
            answer.set_result(statistics)

    def _settle(self) -> None:
        if self.state == "ready":
            self._was_ready.set()
        if not len(self._session.table):
            self._idle.set()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            self._session.beat()
