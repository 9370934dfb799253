"""The interfaces through which the loop exchanges messages: ZeroMQ in sockets.py, lists in the simulation."""

from typing import Any, Protocol

from quire.protocol.config import EngineConfig
from quire.protocol.wire.channel import Frames
from quire.protocol.wire.zmq_channel import PeerMessage
from quire.scheduler_proc.process.kv_event_publisher import KVEventPublisher
from quire.scheduler_proc.process.worker_group import WorkerGroup


class Hub(Protocol):
    """Connections to many front ends, each identified by a peer name; see ``ZmqHub``."""

    def send(self, peer: bytes, message: Any) -> Frames | None: ...

    def receive(self) -> PeerMessage | None: ...

    def forget(self, peer: bytes) -> None: ...


class Transport(Protocol):
    """The transport of the loop: connections, and the poller on which the loop sleeps."""

    @property
    def hub(self) -> Hub: ...

    def open_group(self, worker_epoch: int) -> WorkerGroup:
        """Open the endpoints that the workers of this epoch will connect to."""
        ...

    def close_group(self, group: WorkerGroup) -> None: ...

    def add(self, source: Any) -> None:
        """Add a file descriptor or socket that also wakes ``wait``."""
        ...

    def wait(self, milliseconds: int) -> bool:
        """Return False when no message arrived within the timeout."""
        ...

    def open_kv_events(self, config: EngineConfig) -> KVEventPublisher: ...
