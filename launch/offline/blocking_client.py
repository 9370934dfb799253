"""The engine client over ZeroMQ for a blocking caller, the offline API."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import zmq

from quire.frontend.engine.session import Session
from quire.frontend.engine.streams import Stream
from quire.launch.offline.engine_thread import EngineThread
from quire.protocol.config import EngineConfig
from quire.protocol.errors import EngineError
from quire.protocol.wire.channel import Link
from quire.protocol.wire.codec import ProtocolError
from quire.protocol.wire.front_end_messages import AddRequest, Control, SchedulerToFrontEnd, Statistics
from quire.protocol.wire.link_messages import Message
from quire.protocol.wire.zmq_channel import ZmqChannel, frontend_address

POLL_S = 0.5
HEARTBEAT_S = 1.0
CLOSE_S = 5.0
"""Time that ``close`` gives the call of another thread to end, which may be in a callback of its caller."""


class BlockingClient:
    """Implements ``batch.BlockingEngine``. Owns the socket and the session. A thread calls it in its ``turn`` only."""

    def __init__(self, config: EngineConfig, directory: Path, engine: EngineThread) -> None:
        self.config = config
        self.max_model_len = config.max_model_len
        self.vocab_size = config.model.vocab_size
        self._directory = directory
        self._engine = engine
        self._statistics: Statistics | None = None
        self._closed = False
        self._num_received = 0
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._incarnation = engine.incarnation
        self._beat_at = 0.0
        self.session = Session(self._post, self._pid)
        self._channel = self._connect()
        self.session.begin_link(after_death=False)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Let one call at a time use the client. Raise EngineError if it is closed, or in a forked process."""
        self._check_open()
        with self._lock:
            yield

    def close(self) -> None:
        """Close the socket, once the call of another thread has raised EngineError."""
        self._closed = True
        if self._lock.acquire(timeout=CLOSE_S):
            self._channel.close()
            self._lock.release()

    def submit(self, request: AddRequest, on_update: Callable[[], None], parent: Stream | None = None) -> Stream:
        self._check_open()
        return self.session.add(request, on_update, parent)

    def ask(self, control: Control) -> Statistics:
        """Send a Control message and wait for its reply."""
        self._statistics = None
        asked = 0
        while self._statistics is None:
            if self.session.state in ("ready", "recovering") and asked != self.session.link_number:
                asked = self.session.link_number  # a new scheduler has not received the message
                self._post(control)
            self.receive()
        return self._statistics

    def wait(self) -> None:
        """As ``receive``. Raise EngineError too if nothing comes because of a pause, which only the caller can end."""
        before = self._num_received
        self.receive()
        if self.session.pause and self._num_received == before:
            statistics = self.ask(Control("statistics", 1))
            if self._num_received == before + 1 and (self.session.pause == "pause" or not statistics.num_running):
                raise EngineError("this LLM is paused: call resume before you wait for answers")

    def receive(self) -> None:
        """Wait a bounded time for a message and apply it to the stream table.

        Raises:
            EngineError: the engine has failed.
        """
        self._check_open()
        try:
            received = self._channel.receive(POLL_S)
            message: Message | ProtocolError | None = None if received is None else received.message
        except ProtocolError as error:
            message = error
        except zmq.ZMQError:
            self._check_open()  # a signal's handler has closed it
            raise
        self._num_received += message is not None
        if isinstance(message, Statistics):
            self._statistics = message
        self._check_link(message is None or self.session.take(message))
        if self.session.state == "failed":
            raise EngineError(self.session.detail)

    def _check_link(self, is_intact: bool) -> None:
        self._engine.clear_notification()
        if self._engine.failure is not None:
            self.session.fail(str(self._engine.failure))
            raise self._engine.failure
        if not is_intact or self._engine.incarnation != self._incarnation:
            died, self._incarnation = self._engine.incarnation != self._incarnation, self._engine.incarnation
            self._channel.close()
            self._channel = self._connect()
            self.session.begin_link(after_death=died)
        elif time.monotonic() > self._beat_at:
            self._beat_at = time.monotonic() + HEARTBEAT_S
            self.session.beat()

    def _connect(self) -> ZmqChannel:
        address = frontend_address(self._directory, self._incarnation)
        channel = ZmqChannel(zmq.Context.instance(), zmq.DEALER, address, Link(SchedulerToFrontEnd), bind=False)
        channel.wake_on(self._engine.fileno())
        return channel

    def _post(self, message: Message) -> None:
        self._check_open()
        self._channel.send(message)

    def _check_open(self) -> None:
        if os.getpid() != self._pid:
            raise EngineError(f"this LLM belongs to process {self._pid}: make one in the process that uses it")
        if self._closed:
            raise EngineError("this LLM is closed")
