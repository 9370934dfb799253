"""One call of the offline API: submits its sequences, a bounded number at a time, and takes their updates."""

import heapq
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from quire.frontend.engine.session import Session
from quire.frontend.engine.streams import Stream
from quire.frontend.engine.terms import Terms
from quire.frontend.engine.update import Update
from quire.frontend.text.prompts import ModelLimits
from quire.protocol.config import EngineConfig
from quire.protocol.errors import EngineError, InvalidRequest
from quire.protocol.wire.front_end_messages import AddRequest

# Maximum number of requests in flight. More would only fill the sockets' bounded queues.
MAX_SUBMITTED = 1024


class BlockingEngine(ModelLimits, Protocol):
    """The engine, for a blocking caller."""

    config: EngineConfig
    session: Session

    def turn(self) -> AbstractContextManager[None]:
        """Let one call at a time use the engine."""
        ...

    def submit(self, request: AddRequest, on_update: Callable[[], None], parent: Stream | None = None) -> Stream:
        """Submit a request; raise EngineError if the client is closed. ``parent``: as of ``Session.add``."""
        ...

    def wait(self) -> None:
        """Wait a bounded time for a message and apply it to the stream table.

        Raises:
            EngineError: the engine has failed, or a pause stops what the caller waits for.
        """
        ...


class BatchPart(ABC):
    """One sequence of a call.

    Attributes:
        terms: its priority, among others.
        stream: it in the engine, once it is submitted.
        is_queued: it has received nothing yet, so it may be in the waiting queue.
    """

    terms: Terms
    stream: Stream
    is_queued = True

    @abstractmethod
    def submit(self, on_update: Callable[[], None]) -> Stream:
        """Submit it, also a second time after ``put_back``."""

    @abstractmethod
    def take(self, update: Update) -> bool:
        """Process an update; return whether the sequence has ended."""

    def put_back(self) -> None:  # noqa: B027
        """Process a refusal for a full queue: the sequence will be submitted again."""

    @property
    def ends_prompt(self) -> bool:
        """Whether its prompt has no other sequence in flight, once it has ended."""
        return True


class Batch:
    """The sequences of one call, and which of them are in flight.

    The number of queued requests is kept below the scheduler's queue limit. A request can still be refused, because
    preempted requests wait in the queue too; it is resubmitted later. The queue limit never fails a call.
    """

    def __init__(self, engine: BlockingEngine, parts: Sequence[BatchPart]) -> None:
        """``parts``: in the order in which they are submitted; with priorities, those of the best one are first."""
        urgent = engine.config.scheduling_policy == "priority"
        self._engine = engine
        self._parts = sorted(parts, key=lambda part: part.terms.priority) if urgent else parts
        self._max_queued = engine.config.max_num_queued_reqs or MAX_SUBMITTED
        self._to_submit = list(range(len(parts)))
        """A heap of numbers of parts."""
        self._touched: deque[int] = deque()
        self._open: dict[int, BatchPart] = {}
        self._num_queued = 0
        self._refused = False
        """A request was refused because the queue was full, and no update has arrived since the refusal."""

    def finish(self, on_prompt: Callable[[], object]) -> None:
        """Run until all sequences have ended. ``on_prompt``: called when all those of a prompt have.

        Raises:
            InvalidRequest: the scheduler refused a request.
            EngineError: the engine has failed.
        """
        self._submit()
        while self._open:
            self._engine.wait()
            while self._touched:
                number = self._touched.popleft()
                if number in self._open and self._advance(number, self._open[number]):
                    on_prompt()
            self._submit()

    def abort(self) -> None:
        """Abort all requests in flight, unless the engine has failed."""
        for part in self._open.values():
            try:
                part.stream.abort()
            except EngineError:
                return

    def _submit(self) -> None:
        if self._refused and self._open:
            return
        while self._to_submit and len(self._open) < MAX_SUBMITTED and self._num_queued < self._max_queued:
            self._start(heapq.heappop(self._to_submit))

    def _start(self, number: int) -> None:
        part = self._parts[number]
        part.stream = part.submit(lambda: self._touched.append(number))
        part.is_queued = True
        self._open[number] = part
        self._num_queued += 1

    def _advance(self, number: int, part: BatchPart) -> bool:
        """Take what has arrived for a part; return whether its prompt has ended with it."""
        try:
            update = part.stream.take()
        except InvalidRequest as refused:
            if refused.code != "queue_full":
                raise
            self._refused = True
            self._leave_queue(part)
            del self._open[number]
            part.put_back()
            heapq.heappush(self._to_submit, number)  # to be submitted once another part has received an update
            return False
        if update is None:
            return False
        self._refused = False
        self._leave_queue(part)
        if not part.take(update):
            return False
        del self._open[number]
        return part.ends_prompt

    def _leave_queue(self, part: BatchPart) -> None:
        self._num_queued -= part.is_queued
        part.is_queued = False
