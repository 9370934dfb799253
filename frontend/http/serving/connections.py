"""The connections of one server: their limits, their number, and the clients that they belong to."""

import asyncio
import ipaddress
from collections import Counter
from dataclasses import dataclass
from typing import Any, Protocol

from quire.protocol.process.descriptors import RESERVED_DESCRIPTORS, descriptors_for_clients


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Limits per client, beyond which its connection is closed. Sizes in bytes, times in seconds.

    Attributes:
        head_bytes: most bytes of a request line with its headers; also of the chunk headers and trailers of a body,
            beyond the size of the body.
        handshake_s: most time for a TLS handshake, before which a connection does not count as one.
        head_s: most time for a head, counted from the start of the connection or the previous response.
        body_s, body_bytes_per_s: progress of a body: in each period of ``body_s`` it must end, or ``body_bytes_per_s``
            bytes per second must arrive.
        rest_s: most time to read the rest of a body after its response, for example of one that is too large.
        stall_s, stall_bytes: a client with unread output must read ``stall_bytes`` every ``stall_s``.
        linger_s: as ``stall_s``, once the server has closed the connection; also the time that a refused client may
            keep sending.
        num_pipelined: most requests that wait for the response to the previous one.
        send_buffer: the socket's SO_SNDBUF (the kernel doubles it); the default would grow to megabytes.
        connections: most connections on which all routes are served; ``spare_connections`` more get only open
            routes, and further ones are closed. None: as the limit on file descriptors allows. Idle connections are
            closed first.
        client_share: largest fraction of ``connections`` for one client.
        socket_s: greatest age of a web socket at which a message is still answered.
        socket_idle_s: most time between an answer and the next message of a web socket.
        socket_message_s: most time for the frames of one message.
        check_s: interval of the checks.
    """

    head_bytes: int = 128 * 1024
    handshake_s: float = 10.0
    head_s: float = 20.0
    body_s: float = 30.0
    body_bytes_per_s: int = 16 * 1024
    rest_s: float = 5.0
    stall_s: float = 30.0
    stall_bytes: int = 4 * 1024
    linger_s: float = 5.0
    num_pipelined: int = 8
    send_buffer: int = 128 * 1024
    connections: int | None = None
    spare_connections: int = RESERVED_DESCRIPTORS // 4
    client_share: float = 0.75
    socket_s: float = 3600.0
    socket_idle_s: float = 600.0
    socket_message_s: float = 60.0
    check_s: float = 1.0

    def max_connections(self) -> int:
        return descriptors_for_clients() if self.connections is None else self.connections


class Connection(Protocol):
    """A connection in the count. ``client``: as ``client_of`` returns it."""

    client_id: str

    def evict(self) -> None:
        """Close the connection, whose client has no unanswered request."""
        ...

    def check(self, now: float) -> None:
        """Check the connection's limits. ``now``: time of the event loop."""
        ...


class Connections:
    """Counts connections, closes idle ones to make room for new ones, and has all of them check their limits.

    A connection is idle while its client has sent no complete head of a request. Connections of clients that send
    nothing, or slowly, therefore cannot keep out the others. Connections with a request in progress are never closed
    here; of these, one client can have only a share of all, so that the rest is a reserve for other clients.

    One timer serves all connections: with one of its own for each of 2,048 streams, every sixth token would pay for a
    timer.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        self._most = limits.max_connections()
        self._most_per_client = max(int(self._most * limits.client_share), 1)
        self._check_s = limits.check_s
        self._open: dict[Connection, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._num = 0
        self._num_of: Counter[str] = Counter()
        self._idle: dict[Connection, None] = {}
        """The connection that has been idle longest first."""

    def watch(self, connection: Connection) -> None:
        """Have ``connection`` check its limits, in every interval of ``check_s``, until ``unwatch``."""
        self._open[connection] = None
        if self._timer is None:
            self._check_later()

    def unwatch(self, connection: Connection) -> None:
        self._open.pop(connection, None)
        if not self._open and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._check_s, self._check)

    def _check(self) -> None:
        self._check_later()
        now = asyncio.get_running_loop().time()
        for connection in [*self._open]:
            connection.check(now)

    def add(self, connection: Connection) -> bool:
        """Count ``connection``, or return False if there is no room and no idle connection to close."""
        client = connection.client_id
        is_client_full = bool(client) and self._num_of[client] >= self._most_per_client
        if is_client_full or self._num >= self._most:
            victim = next((each for each in self._idle if not is_client_full or each.client_id == client), None)
            if victim is None:
                return False
            self.remove(victim)
            victim.evict()
        self._num += 1
        self._num_of[client] += 1
        return True

    def remove(self, connection: Connection) -> None:
        """Subtract ``connection``, which must be in the count."""
        self._idle.pop(connection, None)
        self._num -= 1
        self._num_of[connection.client_id] -= 1
        if not self._num_of[connection.client_id]:
            del self._num_of[connection.client_id]

    def set_idle(self, connection: Connection, is_idle: bool) -> None:
        """Record that a counted connection has become idle, or busy."""
        self._idle.pop(connection, None)
        if is_idle:
            self._idle[connection] = None


def client_of(peer: Any) -> str:
    """Return the client of a connection from its socket's peer name; "" for a unix socket, whose peers have no name.

    It is the address; of an IPv6 address the first 64 bits, because one client often has all addresses with them.
    """
    if not isinstance(peer, tuple) or not peer:
        return ""
    try:
        address = ipaddress.ip_address(str(peer[0]).partition("%")[0])
    except ValueError:
        return ""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.IPv6Network((address, 64), strict=False).network_address)
    return str(address)
