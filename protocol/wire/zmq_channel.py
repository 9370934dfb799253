"""Links over ZeroMQ ``ipc://`` sockets. The only module that receives from a socket.

Every socket lies in a directory of mode 0700. High-water marks are finite, sends do not block indefinitely, and linger
times are short: a process that exits does not wait for a peer that has exited.
"""

import asyncio
import contextlib
import os
import stat
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import zmq
import zmq.asyncio

from quire.protocol.errors import EngineError
from quire.protocol.wire.channel import Frames, Link, Received, SendFailed
from quire.protocol.wire.codec import MAX_FRAME_BYTES, ProtocolError
from quire.protocol.wire.connection_limit import ConnectionLimit

HIGH_WATER_MARK = 4096
REPLAY_HIGH_WATER_MARK = 1000
LINGER_MS = 500
SLOW_PEER_LINGER_MS = 100
"""Linger time of sockets whose peers may not read. Not 0: libzmq 4.3 aborts the process if such a socket is closed when
a peer disconnects that has received a part of a message (libzmq issue 3442)."""
PAIR_CONNECTIONS = 8
"""Connections to a bound socket with one peer: each may use MAX_FRAME_BYTES of memory before it has shown a key."""
RECONNECT_MS = 10
"""Interval at which a socket retries to reach an address that is not bound yet."""


def check_socket_directory(path: Path) -> None:
    """Reject a directory that other users could access or that belongs to another user.

    Raises:
        EngineError: not a directory, not owned by this user, or open to others.
    """
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode):
        raise EngineError(f"socket directory {path}: not a directory")
    if info.st_uid != os.getuid():
        raise EngineError(f"socket directory {path}: belongs to user id {info.st_uid}, expected {os.getuid()}")
    if info.st_mode & 0o077:
        raise EngineError(f"socket directory {path}: must have mode 0700 (has {stat.S_IMODE(info.st_mode):04o})")


def frontend_address(directory: Path, incarnation: int = 1) -> str:
    """Return the address at which the scheduler of ``incarnation`` accepts front ends; no older process uses it."""
    return f"ipc://{directory}/frontend-{incarnation}.sock"


def router_address(directory: Path, incarnation: int) -> str:
    """Return the address at which the router of ``incarnation`` accepts front ends."""
    return f"ipc://{directory}/router-{incarnation}.sock"


def kv_events_address(directory: Path, incarnation: int) -> tuple[str, str]:
    """Return where the scheduler of ``incarnation`` publishes its KV cache events to the router, and resends them."""
    return f"ipc://{directory}/kv-{incarnation}.sock", f"ipc://{directory}/kv-replay-{incarnation}.sock"


def worker_address(directory: Path, worker_epoch: int, rank: int) -> str:
    return f"ipc://{directory}/worker-{worker_epoch}-{rank}.sock"


def _configure(socket: "zmq.Socket[Any] | zmq.asyncio.Socket") -> None:
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)


class ZmqChannel:
    """One end of a PAIR or a DEALER: one peer, synchronous."""

    def __init__(
        self,
        context: "zmq.Context[Any]",
        kind: int,
        address: str,
        link: Link,
        *,
        bind: bool,
        secure: Callable[["zmq.Socket[Any]"], None] | None = None,
    ) -> None:
        """``secure``: sets the keys of the socket, for an address that other machines can reach.

        Raises:
            EngineError: the address cannot be bound.
        """
        self.socket: zmq.Socket[Any] = context.socket(kind)
        self._limit: ConnectionLimit | None = None
        _configure(self.socket)
        if secure is not None:
            secure(self.socket)
            self._limit = ConnectionLimit(self.socket, address, PAIR_CONNECTIONS) if bind else None
        try:
            (self.socket.bind if bind else self.socket.connect)(address)
        except zmq.ZMQError as error:
            self.close()
            raise EngineError(f"cannot use the address {address}: {zmq.strerror(error.errno or 0)}") from None
        self.link = link
        self._poller = zmq.Poller()
        self._poller.register(self.socket, zmq.POLLIN)

    def wake_on(self, fd: int) -> None:
        """Let a waiting ``receive`` also return, with None, when ``fd`` is readable."""
        self._poller.register(fd, zmq.POLLIN)

    def send(self, message: Any) -> Frames:
        frames = self.link.outgoing(message)
        try:
            self.socket.send_multipart(frames, zmq.NOBLOCK, copy=True)
        except zmq.Again:
            raise SendFailed(frames) from None
        return frames

    def receive(self, timeout: float | None = 0.0) -> Received | None:
        if timeout != 0.0 and not self._poller.poll(None if timeout is None else max(0, int(timeout * 1000))):
            return None
        try:
            frames = self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return self.link.incoming(frames)

    def close(self) -> None:
        if self._limit is not None:
            self._limit.close()
        self.socket.close()


class Waiter:
    """Poller over sockets and file descriptors for a process loop."""

    def __init__(self) -> None:
        self._poller = zmq.Poller()

    def add(self, source: "zmq.Socket[Any] | int") -> None:
        self._poller.register(source, zmq.POLLIN)

    def remove(self, source: "zmq.Socket[Any] | int") -> None:
        self._poller.unregister(source)

    def wait(self, milliseconds: int) -> bool:
        """Wait for any source; return False on timeout."""
        return bool(self._poller.poll(milliseconds))


class PeerMessage(NamedTuple):
    """``peer`` is the identity of the connection; ``message`` is a ProtocolError if it could not be accepted."""

    peer: bytes
    message: Any
    frames: Frames


class _BoundRouter:
    """A ROUTER at an address that peers may connect to; of them, those at ``tcp://`` are limited in number."""

    def __init__(self, context: "zmq.Context[Any]", address: str, max_message_bytes: int) -> None:
        """``max_message_bytes``: longest message, also of a peer that has not shown its key yet."""
        self.socket: zmq.Socket[Any] = context.socket(zmq.ROUTER)
        _configure(self.socket)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
        self._limit = ConnectionLimit(self.socket, address) if address.startswith("tcp://") else None

    def _bind(self, address: str) -> None:
        try:
            self.socket.bind(address)
        except zmq.ZMQError:
            self.close()
            raise

    def close(self) -> None:
        if self._limit is not None:
            self._limit.close()
        self.socket.close()


class ZmqHub(_BoundRouter):
    """A bound ROUTER: many peers, each with its own numbering."""

    def __init__(
        self, context: "zmq.Context[Any]", address: str, receives: Any, max_message_bytes: int = MAX_FRAME_BYTES
    ) -> None:
        super().__init__(context, address, max_message_bytes)
        self._bind(address)
        self.refused: Counter[str] = Counter()
        self._receives = receives
        self._links: dict[bytes, Link] = {}

    def send(self, peer: bytes, message: Any) -> Frames | None:
        """Send to ``peer``. Return None if it disconnected or does not read, which the caller treats alike."""
        link = self._links.get(peer)
        if link is None:
            return None
        frames = link.outgoing(message)
        try:
            self.socket.send_multipart([peer, *frames], zmq.NOBLOCK, copy=True)
        except (zmq.Again, zmq.ZMQError):
            return None
        return frames

    def receive(self) -> PeerMessage | None:
        """Return the next message of any peer without waiting; a damaged one as its ProtocolError."""
        try:
            peer, *frames = self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        link = self._links.get(peer)
        if link is None:
            link = self._links[peer] = Link(self._receives)
        try:
            received = link.incoming(frames)
        except ProtocolError as error:
            self.refused[error.kind] += 1
            return PeerMessage(peer, error, [])
        return PeerMessage(peer, received.message, received.frames)

    def forget(self, peer: bytes) -> None:
        self._links.pop(peer, None)


class ReplayRouter(_BoundRouter):
    """A bound ROUTER for untrusted peers, which send one number per message. Stateless; never blocks."""

    def __init__(
        self, context: "zmq.Context[Any]", address: str, max_message_bytes: int, envelope: tuple[bytes, ...] = ()
    ) -> None:
        """``envelope``: frames before the number, and before the frames of each answer."""
        super().__init__(context, address, max_message_bytes)
        self._envelope = envelope
        self.socket.setsockopt(zmq.LINGER, SLOW_PEER_LINGER_MS)
        self.socket.setsockopt(zmq.SNDHWM, REPLAY_HIGH_WATER_MARK)
        self.socket.setsockopt(zmq.RCVHWM, REPLAY_HIGH_WATER_MARK)
        self._bind(address)

    def receive(self) -> tuple[bytes, int] | None:
        """Return (peer, number) of one message, or None without a well-formed one."""
        if not int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            return None  # the usual case, for which an exception would be slow
        peer, *frames = self.socket.recv_multipart(zmq.NOBLOCK)
        if not frames or (*frames[:-1],) != self._envelope or len(frames[-1]) != 8:
            return None
        return peer, int.from_bytes(frames[-1], "big")

    def send(self, peer: bytes, frames: Sequence[bytes]) -> bool:
        """Send without waiting; return False if the peer disconnected or does not read."""
        try:
            self.socket.send_multipart([peer, *self._envelope, *frames], zmq.NOBLOCK)
        except zmq.ZMQError:  # includes zmq.Again
            return False
        return True


class AsyncZmqChannel:
    """A connected DEALER for an asyncio front end."""

    def __init__(self, context: zmq.asyncio.Context, address: str, link: Link) -> None:
        self.socket = context.socket(zmq.DEALER)
        _configure(self.socket)
        self.socket.connect(address)
        self.link = link
        self._num_unsent = 0

    @property
    def is_full(self) -> bool:
        """Whether as many messages wait for the socket as it buffers itself: the other side does not keep up."""
        return self._num_unsent >= HIGH_WATER_MARK

    def post(self, message: Any) -> None:
        """Send without waiting; the socket keeps the order of calls."""
        self._num_unsent += 1
        future = asyncio.ensure_future(self.socket.send_multipart(self.link.outgoing(message)))
        future.add_done_callback(self._sent)

    def _sent(self, future: "asyncio.Future[Any]") -> None:
        """Ignore a failed send: it means that the socket was closed."""
        self._num_unsent -= 1
        if not future.cancelled():
            future.exception()

    async def receive(self) -> Any:
        return self.link.incoming(await self.socket.recv_multipart()).message

    def close(self) -> None:
        self.socket.close()


class KVEventPeer:
    """The connected ends of an engine's KV cache events: a SUB, and a DEALER that requests missed messages."""

    def __init__(self, context: "zmq.Context[Any]", endpoint: str, replay_endpoint: str, topic: bytes) -> None:
        self.sub: zmq.Socket[Any] = context.socket(zmq.SUB)
        self.dealer: zmq.Socket[Any] = context.socket(zmq.DEALER)
        for socket in (self.sub, self.dealer):
            _configure(socket)
            socket.setsockopt(zmq.LINGER, 0)
        self.sub.setsockopt(zmq.SUBSCRIBE, topic)
        self.sub.connect(endpoint)
        self.dealer.connect(replay_endpoint)

    def request(self, sequence: int) -> None:
        """Request all messages from this number. Without effect while the engine does not read: request once more."""
        with contextlib.suppress(zmq.Again):
            self.dealer.send(sequence.to_bytes(8, "big"), zmq.NOBLOCK)

    def receive(self) -> list[bytes] | None:
        """Return the next published message without waiting."""
        return _receive(self.sub)

    def receive_answer(self) -> list[bytes] | None:
        """Return the next message of an answer to ``request`` without waiting."""
        return _receive(self.dealer)

    def close(self) -> None:
        self.sub.close()
        self.dealer.close()


def _receive(socket: "zmq.Socket[Any]") -> list[bytes] | None:
    try:
        return socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None
