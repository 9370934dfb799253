"""The connections of one server that count against its limit, and the clients that they belong to."""

import ipaddress
from collections import Counter
from typing import Any, Protocol


class Connection(Protocol):
    """A connection in the count. ``client``: as ``client_of`` returns it."""

    client_id: str

    def evict(self) -> None:
        """Close the connection, whose client has no unanswered request."""
        ...


class Connections:
    """Counts connections, and closes idle ones to make room for new ones.

    A connection is idle while its client has sent no complete head of a request. Connections of clients that send
    nothing, or slowly, therefore cannot keep out the others. Connections with a request in progress are never closed
    here; of these, one client can have only a share of all, so that the rest is a reserve for other clients.
    """

    def __init__(self, most: int, client_share: float) -> None:
        self._most = most
        self._most_per_client = max(int(most * client_share), 1)
        self._num = 0
        self._num_of: Counter[str] = Counter()
        self._idle: dict[Connection, None] = {}
        """The connection that has been idle longest first."""

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
