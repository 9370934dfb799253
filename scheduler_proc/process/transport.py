"""What the loop needs of the outside, as interfaces: sockets.py has them over ZeroMQ, the simulation over lists."""

from typing import Any, Protocol

from quire.protocol.config import EngineConfig
from quire.protocol.wire.channel import Frames
from quire.protocol.wire.zmq_channel import PeerMessage
from quire.scheduler_proc.process.kv_event_publisher import KVEventPublisher
from quire.scheduler_proc.process.worker_group import WorkerGroup


class Hub(Protocol):
    """Many front ends, each behind a name; see ``ZmqHub``."""

    def send(self, peer: bytes, message: Any) -> Frames | None: ...

    def receive(self) -> PeerMessage | None: ...

    def forget(self, peer: bytes) -> None: ...


class Transport(Protocol):
    """Where messages come in, and what the loop sleeps on."""

    @property
    def hub(self) -> Hub: ...

    def open_group(self, worker_epoch: int) -> WorkerGroup:
        """Where the workers of this epoch will connect to."""
        ...

    def close_group(self, group: WorkerGroup) -> None: ...

    def add(self, source: Any) -> None:
        """Something else to be woken by."""
        ...

    def wait(self, milliseconds: int) -> bool:
        """False when nothing came for so long."""
        ...

    def open_kv_events(self, config: EngineConfig) -> KVEventPublisher: ...
