"""The client of several engines over ZeroMQ, for asyncio."""

import asyncio
import os
import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count
from pathlib import Path

import msgspec
import zmq.asyncio

from quire.frontend.engine.block_keys import BlockKeys
from quire.frontend.engine.client import EngineClient, beat_each_second
from quire.frontend.engine.engine_set import EngineSet
from quire.frontend.engine.merge import merge_statistics
from quire.frontend.engine.router_link import RouterLink
from quire.frontend.engine.scheduler_link import MAX_MERGED, RELINK_S, Readers, SchedulerLink
from quire.frontend.engine.session import Session
from quire.frontend.engine.streams import Stream
from quire.protocol.config import EngineConfig
from quire.protocol.routing import EnginePlace
from quire.protocol.wire.channel import Link
from quire.protocol.wire.codec import ProtocolError
from quire.protocol.wire.front_end_messages import AddRequest, Control, EngineState, Statistics
from quire.protocol.wire.link_messages import Message
from quire.protocol.wire.router_messages import RouterToFrontEnd
from quire.protocol.wire.zmq_channel import AsyncZmqChannel, router_address

TICK_S = 0.05
"""Seconds between two looks at what is due; the router learns of started and ended requests as often."""
ANSWER_S = 1.5
"""Seconds that an engine has to answer a question for figures; others do without its answer then."""


class Links:
    """The links to the engines' schedulers; implements ``engines.Transport``."""

    def __init__(self, context: zmq.asyncio.Context, index: int, on_drained: Callable[[int], None]) -> None:
        """``on_drained``: called with an engine that has no stream left."""
        self._context, self._index, self._on_drained = context, index, on_drained
        self._readers, self._link_numbers = Readers(), count(1)
        self._by_engine: dict[int, SchedulerLink] = {}
        self.take: Callable[[int, Message | ProtocolError], bool] = lambda engine, message: True
        self.on_change: Callable[[Message | ProtocolError | None], None] = lambda message: None

    def new_session(self) -> Session:
        """Return a session without a link."""
        return Session(
            lambda message: None,
            os.getpid(),
            self._index,
            notify=self._readers.call_later,
            link_numbers=self._link_numbers,
        )

    def open(self, place: EnginePlace) -> Session:
        link = self._by_engine[place.engine] = SchedulerLink(
            self._context,
            Path(place.directory),
            self._index,
            self._readers,
            take=partial(self.take, place.engine),
            on_change=self.on_change,
            link_numbers=self._link_numbers,
        )
        link.connect(place.incarnation)
        return link.session

    def close(self, engine: int) -> None:
        self._by_engine.pop(engine).close()

    def report_drained(self, engine: int) -> None:
        self._on_drained(engine)

    def close_all(self) -> None:
        for engine in list(self._by_engine):
            self.close(engine)

    @property
    def are_full(self) -> bool:
        links = self._by_engine.values()
        return bool(links) and all(link.is_full for link in links)

    async def ask(
        self, engines: list[int], question: Callable[[int], Message], timeout: float | None = None
    ) -> dict[int, Statistics]:
        """Ask these engines; return the answers of those that have not ended and answer in ``timeout`` seconds."""
        asked = (asyncio.wait_for(self._by_engine[engine].ask(question), timeout) for engine in engines)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        found = zip(engines, answers, strict=True)
        return {engine: answer for engine, answer in found if isinstance(answer, Statistics)}


class SeveralEnginesClient(EngineClient):
    """The client of a server with several engines."""

    def __init__(
        self,
        config: EngineConfig,
        directory: Path,
        index: int,
        drain_timeout: float,
        on_drained: Callable[[int], None],
    ) -> None:
        """
        Args:
            directory: the socket directory of the fleet.
            drain_timeout: seconds after which the streams of a draining engine are moved.
            on_drained: called with each draining engine when none of its streams is left.
        """
        super().__init__(config.max_model_len, config.model.vocab_size)
        self._directory = directory
        self._links = Links(self._context, index, on_drained)
        self._router_channel: AsyncZmqChannel | None = None
        self._router_incarnation = 0
        router = RouterLink(self._post_to_router, os.getpid(), index)
        self._set = EngineSet(self._links, router, self._links.new_session(), drain_timeout)
        self._links.take, self._links.on_change = self._set.take, self._note
        self._keys = BlockKeys(config) if config.feeds_router else None
        self._tasks: list[asyncio.Task[None]] = []
        self._receiving: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    @property
    def places(self) -> list[EnginePlace]:
        return self._set.engines.described()

    def is_usable(self, engine: int) -> bool:
        """Whether an engine can compute new requests now: it serves, and its workers are not being replaced."""
        found = self._set.engines.get(engine)
        return found is not None and found.is_usable

    @property
    def state(self) -> str:
        return self._set.state

    @property
    def pause_kind(self) -> str:
        return self._set.engines.pause

    @property
    def seconds_without_progress(self) -> float:
        return self._set.seconds_without_progress

    @property
    def is_full(self) -> bool:
        return self._links.are_full

    # ---- the fleet's commands

    def set_places(self, places: list[EnginePlace]) -> None:
        """Connect to these engines, and leave those that have ended."""
        if not self._tasks:
            self._tasks = [asyncio.create_task(beat_each_second(self._set.beat)), asyncio.create_task(self._tick())]
        self._set.set_places(places)
        if not self._set.engines.sessions:
            self._state_known.set()
        self._note(None)

    def connect_router(self, incarnation: int) -> None:
        """Connect to the router of this incarnation, which may not have started yet."""
        self._router_incarnation = incarnation
        if self._receiving is not None:
            self._receiving.cancel()
        self._relink_router()
        self._receiving = asyncio.create_task(self._receive_from_router())

    def drain(self) -> None:
        self._set.drain()

    def fail(self, reason: str) -> None:
        """End every stream with ``reason``: no engine can be started any more."""
        self._set.fail(reason)
        self._state_known.set()
        self._note(None)

    def shut_down(self, detail: str) -> None:
        """End every answer in flight with an error; each reader sees it."""
        self._set.shut_down(detail)

    async def close(self) -> None:
        self._links.close_all()
        tasks = [*self._tasks, *([] if self._receiving is None else [self._receiving])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._router_channel is not None:
            self._router_channel.close()
        self._context.term()  # waits at most the sockets' linger time

    async def wait_idle(self, timeout: float) -> bool:
        """Wait until no answer is in flight; return False after ``timeout`` seconds."""
        until = time.monotonic() + timeout
        while self._set.num_in_flight:
            if time.monotonic() >= until:
                return False
            await asyncio.sleep(TICK_S)
        return True

    # ---- requests and questions

    async def submit(self, request: AddRequest, on_update: Callable[[], None], parent: Stream | None) -> Stream:
        self._set.require_alive()
        keys = b""
        if self._keys is not None and parent is None:
            keys = await self._keys.of(request, self._set.engines.block_size)
        return self._set.add(request, on_update, parent, keys)

    async def statistics_by_engine(self) -> dict[int, Statistics]:
        self._set.require_alive()
        return await self._links.ask(self._set.engines.accepting, partial(Control, "statistics"), ANSWER_S)

    @property
    def requests(self) -> Iterable[AddRequest]:
        return self._set.requests

    async def answer(self, question: Callable[[int], Message]) -> Statistics:
        """Ask all engines that accept questions, waiting for one if there is none; return the sums of their answers.

        An order that one of them has not carried out is not answered; callers have a limit of their own.
        """
        while True:
            self._set.require_alive()
            self._changed.clear()
            asked = self._set.engines.accepting
            answers = await self._links.ask(asked, question)
            if answers:
                merged = merge_statistics(list(answers.values()))
                has_lost = len(answers) < len(asked)  # one has ended: its requests are elsewhere now
                return msgspec.structs.replace(merged, done=merged.done and not has_lost)
            await self._changed.wait()

    # ---- the links

    def _note(self, message: Message | ProtocolError | None) -> None:
        """Note what a message, or the fleet, has changed."""
        if message is None or isinstance(message, EngineState):
            self._changed.set()
            if message is not None:
                self._state_known.set()
            if self.state == "ready":
                self._was_ready.set()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._set.tick()

    def _post_to_router(self, message: Message) -> None:
        if self._router_channel is not None:
            self._router_channel.post(message)

    def _relink_router(self) -> None:
        if self._router_channel is not None:
            self._router_channel.close()
        address = router_address(self._directory, self._router_incarnation)
        self._router_channel = AsyncZmqChannel(self._context, address, Link(RouterToFrontEnd))
        self._set.begin_router_link()

    async def _receive_from_router(self) -> None:
        for num_received in count(1):
            if num_received % MAX_MERGED == 0:
                await asyncio.sleep(0)  # receiving does not wait while there are messages
            assert self._router_channel is not None
            try:
                message = await self._router_channel.receive()
            except ProtocolError as error:
                message = error
            if not self._set.take_from_router(message):
                await asyncio.sleep(RELINK_S)
                self._relink_router()
