"""The ZeroMQ sockets of the router process, and the poller on which its loop sleeps."""

from pathlib import Path
from typing import Any

import zmq

from quire.protocol.routing import EnginePlace
from quire.protocol.wire.channel import Link
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


class RouterSockets:
    """Owns the ZeroMQ context and every socket in it."""

    def __init__(self, directory: Path, incarnation: int) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._waiter = Waiter()
        self.hub = ZmqHub(self._context, router_address(directory, incarnation), FrontEndToRouter)
        self._waiter.add(self.hub.socket)
        self._peers: set[KVEventPeer] = set()

    def add(self, fd: int) -> None:
        """Add a file descriptor that also wakes ``wait``."""
        self._waiter.add(fd)

    def wait(self, milliseconds: int) -> bool:
        """Return False when no message arrived within the timeout."""
        return self._waiter.wait(milliseconds)

    def open_link(self, place: EnginePlace) -> ZmqChannel:
        """Connect to the scheduler of an engine as a front end.

        The channel does not wake ``wait``: its statistics are wanted once a second.
        """
        address = frontend_address(Path(place.directory), place.incarnation)
        return ZmqChannel(self._context, zmq.DEALER, address, Link(SchedulerToFrontEnd), bind=False)

    def open_events(self, place: EnginePlace) -> KVEventPeer:
        """Subscribe to the events of an engine."""
        endpoint, replay_endpoint = kv_events_address(Path(place.directory), place.incarnation)
        peer = KVEventPeer(self._context, endpoint, replay_endpoint, TOPIC)
        self._waiter.add(peer.sub)
        self._waiter.add(peer.dealer)
        self._peers.add(peer)
        return peer

    def close_events(self, peer: KVEventPeer) -> None:
        self._peers.remove(peer)
        self._waiter.remove(peer.sub)
        self._waiter.remove(peer.dealer)
        peer.close()

    def close(self) -> None:
        """Close all sockets; the links were closed by their owners."""
        for peer in list(self._peers):
            self.close_events(peer)
        self.hub.close()
        self._context.term()
