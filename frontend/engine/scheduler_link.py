"""The link to one scheduler over ZeroMQ, for asyncio."""

import asyncio
import os
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import zmq.asyncio

from quire.frontend.engine.session import Session
from quire.protocol.errors import EngineError
from quire.protocol.wire.channel import Link
from quire.protocol.wire.codec import ProtocolError
from quire.protocol.wire.front_end_messages import SchedulerToFrontEnd, Statistics
from quire.protocol.wire.link_messages import Message
from quire.protocol.wire.zmq_channel import AsyncZmqChannel, frontend_address

RELINK_S = 0.05
"""Delay before a broken link is opened again."""
MAX_MERGED = 16
"""Messages that may be applied before readers are called, if that many have arrived."""

Take = Callable[[Message | ProtocolError], bool]


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


class SchedulerLink:
    """Owns the socket, the session and the queries of one scheduler.

    One task receives, and applies all messages that have arrived before any reader is called: to a front end that falls
    behind, several steps are one. A request posted while there is no link is not lost: the session submits it on the
    next link.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        directory: Path,
        index: int,
        readers: Readers,
        *,
        take: Take | None = None,
        on_change: Callable[[Message | ProtocolError | None], None],
        link_numbers: Iterator[int] | None = None,
    ) -> None:
        """
        Args:
            take: processes each message, as ``Session.take``, which is the default.
            on_change: called after each message, and with None when a new link begins.
            link_numbers: as of Session.
        """
        self.session = Session(self.post, os.getpid(), index, notify=readers.call_later, link_numbers=link_numbers)
        self._context, self._directory = context, directory
        self._take = self.session.take if take is None else take
        self._on_change = on_change
        self._channel: AsyncZmqChannel | None = None
        self._incarnation = 0
        self._receiving: asyncio.Task[None] | None = None
        self._queries: dict[int, asyncio.Future[Statistics]] = {}
        self._next_query = 0

    @property
    def is_full(self) -> bool:
        """Whether the scheduler does not keep up with the messages."""
        return self._channel is not None and self._channel.is_full

    def connect(self, incarnation: int) -> None:
        """Connect to the scheduler of this incarnation, which may not have started yet, and resubmit requests."""
        if self._receiving is not None:
            self._receiving.cancel()
        had_scheduler, self._incarnation = self._incarnation > 0, incarnation
        self._relink(after_death=had_scheduler)
        self._receiving = asyncio.create_task(self._receive())

    def close(self) -> None:
        """Close the link. Queries end with an error, and messages are posted in vain."""
        if self._receiving is not None:
            self._receiving.cancel()
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self.fail_queries("the scheduler has ended")

    def post(self, message: Message) -> None:
        """Send without blocking. The socket keeps the order, and its queue is bounded."""
        if self._channel is not None:
            self._channel.post(message)

    async def ask(self, question: Callable[[int], Message]) -> Statistics:
        """Send the message that ``question`` returns for a query number, and return its answer.

        Raises:
            EngineError: the engine has failed, or the link was closed.
        """
        self.session.require_alive()
        self._next_query += 1
        query = self._next_query
        answer: asyncio.Future[Statistics] = asyncio.get_running_loop().create_future()
        self._queries[query] = answer
        self.post(question(query))
        try:
            return await answer
        finally:
            del self._queries[query]

    def fail_queries(self, reason: str) -> None:
        for answer in self._queries.values():
            if not answer.done():
                answer.set_exception(EngineError(reason))

    def _relink(self, *, after_death: bool = False) -> None:
        if self._channel is not None:
            self._channel.close()
        address = frontend_address(self._directory, self._incarnation)
        self._channel = AsyncZmqChannel(self._context, address, Link(SchedulerToFrontEnd))
        self.session.begin_link(after_death=after_death)
        self._on_change(None)

    async def _receive(self) -> None:
        for num_received in count(1):
            if num_received % MAX_MERGED == 0:
                await asyncio.sleep(0)  # receiving does not wait while there are messages
            if self._channel is None:
                return
            try:
                message = await self._channel.receive()
            except ProtocolError as error:
                message = error
            if not self._take(message):
                await asyncio.sleep(RELINK_S)
                self._relink()
            elif isinstance(message, Statistics):
                self._answer(message)
            self._on_change(message)

    def _answer(self, statistics: Statistics) -> None:
        answer = self._queries.get(statistics.query)
        if answer is not None and not answer.done():
            answer.set_result(statistics)
