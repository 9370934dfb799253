"""The processes that have connected to a bound hub: a handshake, and a number for each connection."""

from collections.abc import Callable
from typing import Any, Protocol

from quire.protocol.wire.channel import Frames
from quire.protocol.wire.codec import ProtocolError
from quire.protocol.wire.link_messages import PROTOCOL_VERSION, Heartbeat, Hello, Message, Refused, Welcome
from quire.protocol.wire.zmq_channel import PeerMessage


class Hub(Protocol):
    """Connections to many peers, each identified by a peer name; see ``ZmqHub``."""

    def send(self, peer: bytes, message: Any) -> Frames | None: ...

    def receive(self) -> PeerMessage | None: ...

    def forget(self, peer: bytes) -> None: ...


class Clients:
    """Owns the hub, and the number of each connection, which is never used for another one."""

    def __init__(
        self,
        hub: Hub,
        welcome: Welcome,
        on_connect: Callable[[int, Hello], None],
        on_disconnect: Callable[[int], None],
    ) -> None:
        """
        Args:
            welcome: the answer to an accepted Hello.
            on_connect: called with each new client, after its Welcome.
            on_disconnect: called with each client that exited, does not read, or sent an invalid message.
        """
        self._hub = hub
        self._welcome = welcome
        self._on_connect, self._on_disconnect = on_connect, on_disconnect
        self._peers: dict[int, bytes] = {}
        self._numbers: dict[bytes, int] = {}
        self._places: dict[int, tuple[int, int]] = {}
        """(process id, index) of each client."""
        self._next = 0

    @property
    def connected(self) -> list[int]:
        return list(self._peers)

    def receive(self) -> tuple[int, PeerMessage] | None:
        """Return the next (client, message), or None, without waiting.

        Hello and Heartbeat are answered here. A client that sends an invalid message is disconnected.
        """
        while (received := self._hub.receive()) is not None:
            client, message = self._numbers.get(received.peer), received.message
            if isinstance(message, ProtocolError):
                self._refuse_peer(received.peer, "a message is corrupt, missing or of unknown type")
            elif client is None:
                self._on_hello(received.peer, message)
            elif isinstance(message, Heartbeat):
                self.send(client, message)
            else:
                return client, received
        return None

    def send(self, client: int, message: Message) -> None:
        """Send to a client. No-op for a disconnected client; a failed send disconnects it."""
        peer = self._peers.get(client)
        if peer is not None and self._hub.send(peer, message) is None:
            self.disconnect(client)

    def refuse(self, client: int, reason: str) -> None:
        """Reject the last message of a client, and disconnect it."""
        self._refuse_peer(self._peers[client], reason)

    def disconnect(self, client: int) -> None:
        peer = self._peers.pop(client)
        del self._places[client]
        self._hub.forget(peer)
        del self._numbers[peer]
        self._on_disconnect(client)

    def on_process_exit(self, pid: int) -> None:
        """Disconnect all clients of a process that has exited."""
        for client in [client for client, (client_pid, _) in self._places.items() if client_pid == pid]:
            self.disconnect(client)

    def _on_hello(self, peer: bytes, hello: Message) -> None:
        if not isinstance(hello, Hello):
            self._refuse_peer(peer, "the first message must be Hello")
            return
        if reason := mismatch(hello):
            self._refuse_peer(peer, reason, final=True)
            return
        place = (hello.pid, hello.index)
        for client in [client for client, other in self._places.items() if other == place]:
            self.disconnect(client)  # its previous connection was lost unnoticed
        client = self._next
        self._next += 1
        self._numbers[peer] = client
        self._peers[client] = peer
        self._places[client] = place
        self.send(client, self._welcome)
        self._on_connect(client, hello)

    def _refuse_peer(self, peer: bytes, reason: str, *, final: bool = False) -> None:
        self._hub.send(peer, Refused(reason, final))
        client = self._numbers.get(peer)
        if client is None:
            self._hub.forget(peer)
        else:
            self.disconnect(client)


def mismatch(hello: Hello) -> str:
    """Return why the peer's protocol version is refused; empty when it matches."""
    if hello.protocol_version == PROTOCOL_VERSION:
        return ""
    return f"protocol version {hello.protocol_version} of {hello.role} does not match version {PROTOCOL_VERSION} here"
