"""The links of a process on the head machine to nodes, in a thread of their own."""

import contextlib
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol
from uuid import uuid4

import zmq
from zmq.utils.monitor import recv_monitor_message

from quire.launch.nodes.connected_heads import HEARTBEAT_S
from quire.launch.nodes.keys import HeadKeys
from quire.launch.nodes.node_link import NodeLink
from quire.protocol.errors import EngineError
from quire.protocol.wire.channel import Link
from quire.protocol.wire.codec import ProtocolError
from quire.protocol.wire.curve_keys import CurveEnd
from quire.protocol.wire.link_messages import PROTOCOL_VERSION
from quire.protocol.wire.node_messages import JoinNode, LeaveNode, NodeInfo, NodeToHead
from quire.protocol.wire.zmq_channel import Waiter, ZmqChannel
from quire.version import __version__

RETRY_S = 1.0
"""Pause between two connections to a node."""
_REFUSED = (
    "it does not allow this key: copy the public key of the head to its --keys as allowed/NAME.key, and start it again"
)
_NO_KEY = "the keys do not fit: node.key must be the public key of that node"
_NO_CONNECTION = "no connection: is `quire node` running there, and is the port open?"


class Handler(Protocol):
    """What happens on the links. All methods are called from the thread, and must not wait."""

    def ready(self, address: str, info: NodeInfo) -> None:
        """A node is connected, and gets messages."""
        ...

    def lost(self, address: str, reason: str, *, is_final: bool) -> None:
        """A link is lost, and its workers with it, or a node did not answer. Another connection is tried."""
        ...

    def received(self, address: str, message: Any) -> None: ...


class NodeThread:
    """Connects to nodes, and connects again when a link is lost. Methods may be called from any thread, and have no
    effect once it is closed."""

    def __init__(self, keys: HeadKeys, handler: Handler) -> None:
        self._keys = keys
        self._handler = handler
        self._join = JoinNode(PROTOCOL_VERSION, __version__, socket.gethostname(), os.getpid())
        self._nodes: dict[str, _Node] = {}
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wake_lock = threading.Lock()
        """Of ``_wake``, which is -1 once it is closed."""
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="nodes", daemon=True)
        self._thread.start()

    def add(self, address: str, node_key: str) -> None:
        """Connect to a node; no effect on one that was added before."""
        self._call(lambda: self._add(address, node_key))

    def remove(self, address: str) -> None:
        """Disconnect from a node. Its workers end."""
        self._call(lambda: self._remove(address))

    def send(self, address: str, message: Any) -> None:
        """Send a message to a node that is ready; no effect on others."""
        self._call(lambda: self._send(address, message))

    def close(self) -> None:
        """Leave all nodes and end the thread. May be called twice."""
        if self._thread.is_alive():
            self._call(self._close)
            self._thread.join()
            with self._wake_lock:
                os.close(self._wake)
                self._wake = -1

    # ---- the thread

    def _call(self, call: Callable[[], None]) -> None:
        with self._wake_lock:
            if self._wake >= 0:
                self._calls.put(call)
                os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        self._waiter = Waiter()
        self._waiter.add(self._wake)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        while not self._is_closing:
            self._waiter.wait(int(HEARTBEAT_S * 500))
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            while not self._calls.empty():
                self._calls.get()()
            for node in list(self._nodes.values()):
                node.turn(time.monotonic())
        self._context.term()

    def _add(self, address: str, node_key: str) -> None:
        if address not in self._nodes:
            keys = CurveEnd(self._keys.public, self._keys.secret, node_key)
            self._nodes[address] = _Node(address, keys, self._join, self._context, self._waiter, self._handler)

    def _remove(self, address: str) -> None:
        if (node := self._nodes.pop(address, None)) is not None:
            node.leave()

    def _send(self, address: str, message: Any) -> None:
        if (node := self._nodes.get(address)) is not None:
            node.send(message)

    def _close(self) -> None:
        for node in self._nodes.values():
            node.leave()
        self._nodes.clear()
        self._is_closing = True


class _Node:
    """One node: a connection, or the time at which the next one begins. Used by the thread only."""

    def __init__(
        self,
        address: str,
        keys: CurveEnd,
        join: JoinNode,
        context: "zmq.Context[Any]",
        waiter: Waiter,
        handler: Handler,
    ) -> None:
        self._address = address
        self._keys = keys
        self._join = join
        self._context = context
        self._waiter = waiter
        self._handler = handler
        self._channel: ZmqChannel | None = None
        self._events: zmq.Socket[Any] | None = None
        self._problem = _NO_CONNECTION
        self._retry_at = 0.0

    def turn(self, now: float) -> None:
        """Process what has arrived, and send what is due."""
        if self._channel is None:
            if now < self._retry_at:
                return
            try:
                self._connect(now)
            except (EngineError, zmq.ZMQError) as error:  # such as a lack of descriptors
                self._end(f"the node {self._address} cannot be connected: {error}", now, is_final=False)
                return
        has_closed = self._follow_connection()
        self._receive(now)  # after it, so that messages which arrived before the end are read
        if has_closed and self._link.info is not None and not self._link.lost:
            self._link.broken("the connection was closed")
        for message in self._link.due(now, self._problem):
            self.send(message)
        if self._link.lost:
            self._end(self._link.lost, now, is_final=self._link.is_final)

    def send(self, message: Any) -> None:
        if self._channel is not None and (self._link.info is not None or isinstance(message, JoinNode)):
            try:
                self._channel.send(message)
            except EngineError as error:
                self._link.broken(str(error))

    def leave(self) -> None:
        self.send(LeaveNode())
        self._disconnect()

    def _connect(self, now: float) -> None:
        self._link = NodeLink(self._address, self._join, now)
        self._channel = ZmqChannel(
            self._context, zmq.DEALER, self._address, Link(NodeToHead), bind=False, secure=self._keys.connect_with
        )
        # Not the default address, which has a number that the connection before may have had.
        self._events = self._channel.socket.get_monitor_socket(addr=f"inproc://node-{uuid4()}")
        self._problem = _NO_CONNECTION
        self._waiter.add(self._channel.socket)
        self._waiter.add(self._events)

    def _end(self, reason: str, now: float, *, is_final: bool) -> None:
        self._disconnect()
        self._retry_at = now + RETRY_S
        self._handler.lost(self._address, reason, is_final=is_final)

    def _disconnect(self) -> None:
        if self._channel is not None and self._events is not None:
            self._waiter.remove(self._channel.socket)
            self._waiter.remove(self._events)
            self._channel.socket.disable_monitor()
            self._events.close(0)
        if self._channel is not None:
            self._channel.close()
        self._channel = self._events = None

    def _receive(self, now: float) -> None:
        """Read messages until one cannot be accepted."""
        while self._channel is not None and not self._link.lost:
            try:
                received = self._channel.receive()
            except ProtocolError as error:
                self._link.broken(str(error))
                return
            if received is None:
                return
            if self._link.received(received.message, now):
                if isinstance(received.message, NodeInfo):
                    self._handler.ready(self._address, received.message)
                else:
                    self._handler.received(self._address, received.message)

    def _follow_connection(self) -> bool:
        """Note why a connection does not work, as far as libzmq reports it; return whether it was closed."""
        has_closed = False
        while self._events is not None and int(self._events.get(zmq.EVENTS)) & zmq.POLLIN:
            match recv_monitor_message(self._events)["event"]:
                case zmq.EVENT_CONNECTED:
                    self._problem = _NO_KEY
                case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                    self._problem = _REFUSED
                case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self._problem = "it accepts the key, but sends nothing"
                case zmq.EVENT_DISCONNECTED:
                    has_closed = True
        return has_closed
