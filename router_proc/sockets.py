"""The ZeroMQ sockets of the router process, and the poller on which its loop sleeps."""

from pathlib import Path
from typing import Any, Protocol

import zmq

from quire.protocol.routing import EnginePlace
from quire.protocol.wire.channel import Channel, Link
from quire.protocol.wire.clients import Hub
from quire.protocol.wire.front_end_messages import SchedulerToFrontEnd
from quire.protocol.wire.kv_events import TOPIC
from quire.protocol.wire.router_messages import FrontEndToRouter
from quire.protocol.wire.zmq_channel import (
    KVEventPeer,
    Waiter,
    ZmqChannel,
    ZmqHub,
    frontend_address,
    kv_events_address,
    router_address,
)


class EventPeer(Protocol):
    """The events of an engine; see ``KVEventPeer``."""

    def request(self, sequence: int) -> None: ...

    def receive(self) -> list[bytes] | None: ...

    def receive_answer(self) -> list[bytes] | None: ...


class Transport(Protocol):
    """The transport of the loop: ZeroMQ, or lists in a test."""

    @property
    def hub(self) -> Hub: ...

    def add(self, source: Any) -> None:
        """Add a file descriptor that also wakes ``wait``."""
        ...

    def wait(self, milliseconds: int) -> bool:
        """Return False when no message arrived within the timeout."""
        ...

    def open_link(self, place: EnginePlace) -> Channel:
        """Connect to the scheduler of an engine as a front end."""
        ...

    def open_events(self, place: EnginePlace) -> EventPeer:
        """Subscribe to the events of an engine."""
        ...

    def close_events(self, peer: EventPeer) -> None: ...


class Sockets:
    """Implements ``Transport``. Owns the ZeroMQ context and every socket in it."""

    def __init__(self, directory: Path, incarnation: int) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._waiter = Waiter()
        self.hub = ZmqHub(self._context, router_address(directory, incarnation), FrontEndToRouter)
        self._waiter.add(self.hub.socket)
        self._peers: dict[EventPeer, KVEventPeer] = {}

    def add(self, source: Any) -> None:
        self._waiter.add(source)

    def wait(self, milliseconds: int) -> bool:
        return self._waiter.wait(milliseconds)

    def open_link(self, place: EnginePlace) -> Channel:
        """The channel does not wake ``wait``: its statistics are wanted once a second."""
        address = frontend_address(Path(place.directory), place.incarnation)
        return ZmqChannel(self._context, zmq.DEALER, address, Link(SchedulerToFrontEnd), bind=False)

    def open_events(self, place: EnginePlace) -> EventPeer:
        endpoint, replay_endpoint = kv_events_address(Path(place.directory), place.incarnation)
        peer = KVEventPeer(self._context, endpoint, replay_endpoint, TOPIC)
        self._waiter.add(peer.sub)
        self._waiter.add(peer.dealer)
        self._peers[peer] = peer
        return peer

    def close_events(self, peer: EventPeer) -> None:
        sockets = self._peers.pop(peer)
        self._waiter.remove(sockets.sub)
        self._waiter.remove(sockets.dealer)
        sockets.close()

    def close(self) -> None:
        """Close all sockets; the links were closed by their owners."""
        for peer in list(self._peers):
            self.close_events(peer)
        self.hub.close()
        self._context.term()
