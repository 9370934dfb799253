"""A link within one process. Frames are really encoded and decoded; only the socket is missing."""

from collections import deque
from typing import Any

from quire.protocol.wire.channel import Frames, Link, Received


class MemoryChannel:
    """One end of a pair."""

    def __init__(self, link: Link, inbox: deque[Frames], outbox: deque[Frames]) -> None:
        self._link = link
        self._inbox = inbox
        self._outbox = outbox

    def send(self, message: Any) -> Frames:
        frames = [bytes(f) for f in self._link.outgoing(message)]
        self._outbox.append(list(frames))
        return list(frames)

    def receive(self, timeout: float | None = 0.0) -> Received | None:
        return self._link.incoming(self._inbox.popleft()) if self._inbox else None

    def wake_on(self, fd: int) -> None:
        """Ignore ``fd``: ``receive`` never waits."""

    def close(self) -> None:
        self._inbox.clear()


def memory_pair(a_receives: Any, b_receives: Any, worker_epoch: int = 0) -> tuple[MemoryChannel, MemoryChannel]:
    """Return two connected ends; each is given the union of messages that it may receive."""
    to_a: deque[Frames] = deque()
    to_b: deque[Frames] = deque()
    return (
        MemoryChannel(Link(a_receives, worker_epoch), to_a, to_b),
        MemoryChannel(Link(b_receives, worker_epoch), to_b, to_a),
    )
