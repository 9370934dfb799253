"""One end of a link between two processes: ordered messages, numbered and checked.

``Link`` numbers messages; a transport (``zmq_channel``, or a pair in memory in a test) only moves frames. All
transports implement ``Channel``, so that the same loops run over sockets and in tests.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from quire.protocol.errors import EngineError
from quire.protocol.wire.codec import Codec, ProtocolError

Frames = list[bytes | memoryview]


class Received(NamedTuple):
    """A message and the frames in which it arrived; the event log stores the frames, which are already encoded."""

    message: Any
    frames: Frames


class SendFailed(EngineError):
    """The other process exited or does not read; ``frames`` were not sent."""

    def __init__(self, frames: Frames) -> None:
        super().__init__("the other process does not accept messages any more")
        self.frames = frames


class Channel(Protocol):
    """Interface of a link, as process loops use it."""

    def send(self, message: Any) -> Frames:
        """Number, encode and send a message; return the sent frames. Raises SendFailed."""
        ...

    def receive(self, timeout: float | None = 0.0) -> Received | None:
        """Return the next message, or None if none arrived within ``timeout`` seconds (None: wait without limit).

        Raises:
            ProtocolError: a frame is damaged, lost, duplicated or of another epoch. The link is unusable after it.
        """
        ...

    def wake_on(self, fd: int) -> None:
        """Let a waiting ``receive`` also return, with None, when ``fd`` is readable."""
        ...

    def close(self) -> None: ...


class Link:
    """Numbering of both directions of one link; owns no transport.

    Invariant: it accepts exactly the messages that the other side sent in this epoch, in order and without gaps.
    """

    def __init__(self, incoming: Any, worker_epoch: int = 0) -> None:
        self.worker_epoch = worker_epoch
        self.refused: Counter[str] = Counter()
        self._codec: Codec[Any] = Codec(incoming)
        self._sent = 0
        self._accepted = 0

    def outgoing(self, message: Any) -> Frames:
        self._sent += 1
        return self._codec.encode(self.worker_epoch, self._sent, message)

    def incoming(self, frames: Sequence[bytes | memoryview]) -> Received:
        """Check and decode a message.

        Raises:
            ProtocolError: the message cannot be accepted; counted in ``refused``.
        """
        try:
            envelope = self._codec.decode(frames)
            if envelope.worker_epoch != self.worker_epoch:
                raise ProtocolError("epoch", f"message of epoch {envelope.worker_epoch} in epoch {self.worker_epoch}")
            if envelope.seq != self._accepted + 1:
                raise ProtocolError("gap", f"message {envelope.seq} after message {self._accepted}")
        except ProtocolError as error:
            self.refused[error.kind] += 1
            raise
        self._accepted = envelope.seq
        return Received(envelope.message, list(frames))
