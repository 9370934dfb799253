"""The engine client over ZeroMQ, for asyncio."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import zmq.asyncio

from quire.frontend.engine.scheduler_link import Readers, SchedulerLink
from quire.frontend.engine.streams import Stream
from quire.protocol.errors import InvalidRequest
from quire.protocol.routing import EnginePlace
from quire.protocol.wire.codec import ProtocolError
from quire.protocol.wire.front_end_messages import AddRequest, Control, EngineState, Statistics
from quire.protocol.wire.link_messages import Message

HEARTBEAT_S = 1.0


class EngineClient(ABC):
    """The engine, or several, for one front end: HTTP is written against this. Owns the sockets.

    Attributes:
        max_model_len: maximum number of tokens of a request, prompt and answer together.
        vocab_size: vocabulary size of the model's output; every token id must be below it.
    """

    def __init__(self, max_model_len: int, vocab_size: int) -> None:
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self._context = zmq.asyncio.Context()
        self._state_known = asyncio.Event()
        self._was_ready = asyncio.Event()

    async def wait_state_known(self) -> None:
        """Wait until the state of an engine is known, or that none has started."""
        await self._state_known.wait()

    async def wait_ready(self) -> None:
        """Wait until an engine accepts requests for the first time."""
        await self._was_ready.wait()

    @property
    @abstractmethod
    def places(self) -> list[EnginePlace]:
        """The engines of a server with several, with the reason for each that cannot compute requests now; empty for
        one engine alone."""

    @property
    @abstractmethod
    def state(self) -> str:
        """loading, ready, recovering, draining or failed."""

    @property
    @abstractmethod
    def pause_kind(self) -> str:
        """Which pause an operator has set: pause, pause_new or empty, as in Control."""

    @property
    @abstractmethod
    def seconds_without_progress(self) -> float:
        """Seconds since the last token while an answer is in flight and no pause is set, or since a recovery began."""

    @property
    @abstractmethod
    def is_full(self) -> bool:
        """Whether no scheduler keeps up with the messages."""

    @property
    @abstractmethod
    def requests(self) -> Iterable[AddRequest]:
        """The requests in flight, those that wait for an engine included."""

    async def add(
        self, request: AddRequest, on_update: Callable[[], None], *, parent: Stream | None = None, num_shared: int = 0
    ) -> Stream:
        """Submit one sequence; its parameters have ``n = 1``, no stop strings and a ``max_tokens``.

        Args:
            on_update: called on the event loop when there is an update or an error to take: once per step for all
                sequences that have the same callback. It must not raise.
            parent: a sequence with the same prompt, which is then neither sent nor computed a second time.
            num_shared: output tokens of ``parent`` that the sequence begins with; its first update has them.

        Raises:
            InvalidRequest: refused; ``Stream.take`` may raise it too.
            EngineError: the engine has failed.
        """
        if self.is_full:
            raise InvalidRequest("the engine is overloaded: retry later", None, "queue_full")
        if parent is not None and num_shared:
            shared = np.array(parent.tokens[:num_shared], np.int32)
            request = msgspec.structs.replace(request, output_token_ids=shared)
        return await self.submit(request, on_update, parent)

    @abstractmethod
    async def submit(self, request: AddRequest, on_update: Callable[[], None], parent: Stream | None) -> Stream:
        """Submit a request; ``parent``: as of ``Session.add``."""

    @abstractmethod
    async def statistics_by_engine(self) -> dict[int, Statistics]:
        """Return the current counters and gauges of each engine that answers; one engine alone has the number 0.

        An engine that has not been ready is left out.

        Raises:
            EngineError: the engine has failed.
        """

    @abstractmethod
    async def answer(self, question: Callable[[int], Message]) -> Statistics:
        """Send the message that ``question`` returns for a query number, and return its answer. There is none while
        the scheduler is dead or loading.

        Raises:
            EngineError: the engine has failed.
        """

    async def control(self, kind: str) -> Statistics:
        """Send a Control of this kind and return its answer, as ``answer``."""
        return await self.answer(partial(Control, kind))

    async def ask(self, question: Callable[[int], Message], about: Callable[[AddRequest], bool]) -> Statistics:
        """As ``answer``, with ``done`` false while a request is left for which ``about`` returns True."""
        found = await self.answer(question)
        return msgspec.structs.replace(found, done=found.done and not any(map(about, self.requests)))


class ZmqEngineClient(EngineClient):
    """The client of one engine."""

    def __init__(self, directory: Path, max_model_len: int, vocab_size: int, index: int = 0) -> None:
        super().__init__(max_model_len, vocab_size)
        self._link = SchedulerLink(self._context, directory, index, Readers(), on_change=self._note)
        self._session = self._link.session
        self._beating: asyncio.Task[None] | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def places(self) -> list[EnginePlace]:
        return []

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
        if self._beating is None:
            self._beating = asyncio.create_task(beat_each_second(self._session.beat))
        self._session.was_ready |= incarnation > 1  # an earlier scheduler was ready
        self._link.connect(incarnation)

    async def close(self) -> None:
        self._link.close()
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)
        self._context.term()  # waits at most the sockets' linger time

    @property
    def is_full(self) -> bool:
        return self._link.is_full

    async def submit(self, request: AddRequest, on_update: Callable[[], None], parent: Stream | None) -> Stream:
        stream = self._session.add(request, on_update, parent)
        self._idle.clear()
        return stream

    async def statistics_by_engine(self) -> dict[int, Statistics]:
        self._session.require_alive()
        return {0: await self.control("statistics")} if self._session.accepts else {}

    @property
    def requests(self) -> Iterable[AddRequest]:
        return (stream.request for stream in self._session.table.streams)

    async def answer(self, question: Callable[[int], Message]) -> Statistics:
        return await self._link.ask(question)

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
        self._link.fail_queries(reason)
        self._settle()

    def _note(self, message: Message | ProtocolError | None) -> None:
        """Note what a message has changed."""
        if self.state == "failed":
            self.fail(self._session.detail)
        elif isinstance(message, EngineState):
            self._state_known.set()
        self._settle()

    def _settle(self) -> None:
        if self.state == "ready":
            self._was_ready.set()
        if not len(self._session.table):
            self._idle.set()


async def beat_each_second(beat: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(HEARTBEAT_S)
        beat()
