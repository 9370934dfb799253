"""The wires between the scheduler and each rank, by epoch, and between front ends and scheduler incarnations."""

from collections.abc import Callable

from sim_events import Events
from sim_scheduler import HubInbox
from sim_wire import Tamper, Wire, WireChannel

from quire.protocol.wire.channel import Link
from quire.protocol.wire.front_end_messages import SchedulerToFrontEnd
from quire.protocol.wire.worker_messages import SchedulerToWorker, WorkerToScheduler


def _nothing() -> None:
    pass


class Net:
    """Owns all links. Messages sent before the other end exists are queued for it, as in ZeroMQ."""

    def __init__(self, events: Events, tamper: Tamper) -> None:
        self._events, self._tamper = events, tamper
        self._pairs: dict[tuple[int, int], tuple[WireChannel, WireChannel]] = {}
        self._inboxes: dict[int, HubInbox] = {}
        self.hub_wakes: dict[int, Callable[[], None]] = {}
        self.to_front: dict[bytes, Wire] = {}
        self._num_peers = 0

    def scheduler_end(self, worker_epoch: int, rank: int, on_arrival: Callable[[], None]) -> WireChannel:
        end = self._pair(worker_epoch, rank)[0]
        end._on_arrival = on_arrival
        return end

    def worker_end(self, worker_epoch: int, rank: int, on_arrival: Callable[[], None]) -> WireChannel:
        end = self._pair(worker_epoch, rank)[1]
        end._on_arrival = on_arrival
        return end

    def _pair(self, worker_epoch: int, rank: int) -> tuple[WireChannel, WireChannel]:
        if (worker_epoch, rank) not in self._pairs:
            near = WireChannel(Link(WorkerToScheduler, worker_epoch), _nothing)
            far = WireChannel(Link(SchedulerToWorker, worker_epoch), _nothing)
            near.out = Wire(self._events, self._tamper, "to_worker", far.arrive)
            far.out = Wire(self._events, self._tamper, "from_worker", near.arrive)
            self._pairs[worker_epoch, rank] = (near, far)
        return self._pairs[worker_epoch, rank]

    def hub_inbox(self, incarnation: int) -> HubInbox:
        return self._inboxes.setdefault(incarnation, HubInbox())

    def front_end(self, incarnation: int, on_arrival: Callable[[], None]) -> tuple[bytes, WireChannel]:
        """Open a connection to the scheduler of this incarnation; return its identity there and the front end's
        channel.
        """
        self._num_peers += 1
        peer = b"peer %d" % self._num_peers
        channel = WireChannel(Link(SchedulerToFrontEnd), on_arrival)
        inbox = self.hub_inbox(incarnation)

        def deliver(frames: list[bytes | memoryview]) -> None:
            inbox.append((peer, frames))
            self.hub_wakes.get(incarnation, _nothing)()

        channel.out = Wire(self._events, self._tamper, "from_front", deliver)
        self.to_front[peer] = Wire(self._events, self._tamper, "to_front", channel.arrive)
        return peer, channel

    def disconnect(self, peer: bytes) -> None:
        wire = self.to_front.pop(peer, None)
        if wire is not None:
            wire.closed = True
