"""The engine client over ZeroMQ for a blocking caller, the offline API."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import zmq

from quire.launch.frontend.session import Session
from quire.launch.frontend.streams import Stream
from quire.protocol.config import EngineConfig
from quire.protocol.errors import EngineError, QuireError
from quire.protocol.wire.channel import Link
from quire.protocol.wire.codec import ProtocolError
from quire.protocol.wire.front_end_messages import AddRequest, Control, SchedulerToFrontEnd, Statistics
from quire.protocol.wire.link_messages import Message
from quire.protocol.wire.zmq_channel import ZmqChannel, frontend_address

POLL_S = 0.5
HEARTBEAT_S = 1.0


class Engine(Protocol):
    """The part of ``engine_thread.EngineThread`` that the client uses."""

    incarnation: int
    failure: QuireError | None

    def fileno(self) -> int: ...

    def clear_notification(self) -> None: ...


class BlockingClient:
    """Implements ``batch.BlockingEngine``. Owns the socket and the session. Not thread-safe."""

    def __init__(self, config: EngineConfig, directory: Path, engine: Engine) -> None:
        self.config = config
        self.max_model_len = config.max_model_len
        self.vocab_size = config.model.vocab_size
        self._directory = directory
        self._engine = engine
        self._statistics: Statistics | None = None
        self._closed = False
        self._incarnation = engine.incarnation
        self._beat_at = 0.0
        self.session = Session(self._post, os.getpid())
        self._channel: ZmqChannel | None = None
        self._relink()

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._closed = True

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

    def receive(self) -> None:
        """Wait a bounded time for a message and apply it to the stream table.

        Raises:
            EngineError: the engine has failed.
        """
        self._check_open()
        assert self._channel is not None
        try:
            received = self._channel.receive(POLL_S)
            message: Message | ProtocolError | None = None if received is None else received.message
        except ProtocolError as error:
            message = error
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
            self._relink(after_death=died)
        elif time.monotonic() > self._beat_at:
            self._beat_at = time.monotonic() + HEARTBEAT_S
            self.session.beat()

    def _relink(self, *, after_death: bool = False) -> None:
        if self._channel is not None:
            self._channel.close()
        address = frontend_address(self._directory, self._incarnation)
        self._channel = ZmqChannel(zmq.Context.instance(), zmq.DEALER, address, Link(SchedulerToFrontEnd), bind=False)
        self._channel.wake_on(self._engine.fileno())
        self.session.begin_link(after_death=after_death)

    def _post(self, message: Message) -> None:
        self._check_open()
        assert self._channel is not None
        self._channel.send(message)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("this LLM is closed")
