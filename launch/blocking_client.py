"""The engine over ZeroMQ, for a caller that waits: the offline API's side of the link."""

import time
from collections.abc import Callable
from pathlib import Path

import zmq

from quire.launch.streams import StreamTable
from quire.protocol.channel import Link
from quire.protocol.codec import ProtocolError
from quire.protocol.config import EngineConfig
from quire.protocol.errors import EngineError
from quire.protocol.messages import (
    PROTOCOL_VERSION,
    Control,
    EngineState,
    Hello,
    Message,
    Refused,
    Rejected,
    SchedulerToFrontEnd,
    Statistics,
    StepOutputs,
)
from quire.protocol.zmq_channel import ZmqChannel, connect_hello, frontend_address

POLL_S = 0.5


class BlockingClient:
    """Implements ``batch.BlockingEngine``. Owns the socket and the table of streams; one thread at a time may use it.

    Args:
        watch: looks after the engine's processes for so many seconds, and raises EngineError when one died.
    """

    def __init__(self, config: EngineConfig, directory: Path, watch: Callable[[float], None]) -> None:
        self.config = config
        self.max_model_len = config.max_model_len
        self.vocab_size = config.model.vocab_size
        self.table = StreamTable()
        self._watch = watch
        self._statistics: Statistics | None = None
        self._closed = False
        address = frontend_address(directory)
        self._channel = ZmqChannel(zmq.Context.instance(), zmq.DEALER, address, Link(SchedulerToFrontEnd), bind=False)

    def connect(self, timeout: float) -> None:
        """Say hello.

        Raises:
            EngineError: the scheduler refuses, or did not answer within ``timeout`` seconds.
        """
        answer = connect_hello(self._channel, Hello(PROTOCOL_VERSION, "frontend", 0, 0), time.monotonic() + timeout)
        if isinstance(answer, Refused):
            raise EngineError(answer.reason)

    def close(self) -> None:
        self._channel.close()
        self._closed = True

    def send(self, message: Message) -> None:
        self._check_open()
        self._channel.send(message)

    def ask(self, control: Control) -> Statistics:
        """The answer to a Control."""
        self._statistics = None
        self.send(control)
        while self._statistics is None:
            self.receive()
        return self._statistics

    def receive(self) -> None:
        """Wait for a message, or notice that a process died."""
        self._check_open()
        try:
            received = self._channel.receive(POLL_S)
        except ProtocolError as error:
            raise EngineError(f"the link to the scheduler is broken: {error}") from None
        if received is None:
            self._watch(0.0)
            return
        match received.message:
            case StepOutputs() as outputs:
                self.table.apply(outputs)
            case Rejected() as rejected:
                self.table.reject(rejected)
            case Statistics() as statistics:
                self._statistics = statistics
            case EngineState(kind="failed", detail=detail) | Refused(reason=detail):
                self.table.fail(detail)
                self._watch(1.0)
                raise EngineError(detail)
            case _:
                pass

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("this LLM is closed")
