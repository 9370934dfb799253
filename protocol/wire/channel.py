"""One end of a link between two processes: ordered messages, numbered and checked.

``Link`` keeps the numbers; a transport (``zmq_channel``, or a pair in memory in a test) only moves frames. All have the
interface ``Channel``, so that the same loops run over sockets and in a test.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from quire.protocol.errors import EngineError
from quire.protocol.wire.codec import Codec, ProtocolError

Frames = list[bytes | memoryview]


class Received(NamedTuple):
    """A message and the frames that it came in (the event log keeps those, already encoded)."""

    message: Any
    frames: Frames


class SendFailed(EngineError):
    """The other process is gone, or does not take messages any more: ``frames`` did not go out."""

    def __init__(self, frames: Frames) -> None:
        super().__init__("the other process does not take messages any more")
        self.frames = frames


class Channel(Protocol):
    """What a loop needs of a link."""

    def send(self, message: Any) -> Frames:
        """Number, encode and send; returns the frames that went out. Raises NotTaken."""
        ...

    def receive(self, timeout: float | None = 0.0) -> Received | None:
        """The next message; None when none came in ``timeout`` seconds (None: wait for ever).

        Raises:
            ProtocolError: a frame was damaged, lost, doubled or of another epoch. The link is not usable after it.
        """
        ...

    def close(self) -> None: ...


class Link:
    """The numbering of both directions of one link. Owns no transport.

    Invariant: what it accepts is exactly what the other side sent in this epoch, in order, without a gap.
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
        """Check and decode. Raises ProtocolError (counted in ``refused``) when the message cannot be accepted."""
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
