"""The front ends connected to this scheduler."""

from collections.abc import Callable

import msgspec

from quire.protocol.config import EngineConfig
from quire.protocol.wire.codec import ProtocolError
from quire.protocol.wire.front_end_messages import EngineState, TenantService
from quire.protocol.wire.link_messages import PROTOCOL_VERSION, Heartbeat, Hello, Message, Refused, Welcome
from quire.protocol.wire.zmq_channel import PeerMessage
from quire.scheduler_proc.process.transport import Hub


class FrontEnds:
    """Owns the hub, and the client number under which the Scheduler knows each connection. Does not know requests.

    A client number is never reused, because requests of a disconnected front end may still be ending. The router of a
    server with several engines connects as a front end that has no requests.
    """

    def __init__(self, hub: Hub, config: EngineConfig, on_disconnect: Callable[[int], None]) -> None:
        """``on_disconnect``: called with each client that exited, does not read, or sent an invalid message."""
        self._hub = hub
        self._on_disconnect = on_disconnect
        self._welcome = Welcome(PROTOCOL_VERSION, config.digest, config.max_model_len)
        self._state = EngineState("loading")
        self._peers: dict[int, bytes] = {}
        self._clients: dict[bytes, int] = {}
        self._places: dict[int, tuple[int, int]] = {}
        """(process id, index) of each client."""
        self._routers: set[int] = set()
        """Clients that are the router: at most one, because a new one replaces it."""
        self._next_client = 0

    def receive(self) -> tuple[int, PeerMessage] | None:
        """Return the next (client, message) for the engine, or None, without waiting.

        Hello and Heartbeat are answered here. A front end that sends an invalid message is disconnected.
        """
        while (received := self._hub.receive()) is not None:
            client, message = self._clients.get(received.peer), received.message
            if isinstance(message, ProtocolError):
                self._refuse(received.peer, "a message is corrupt, missing or of unknown type")
            elif client is None:
                self._on_hello(received.peer, message)
            elif isinstance(message, Heartbeat):
                self.send(client, message)
            elif isinstance(message, TenantService) and client not in self._routers:
                self._refuse(received.peer, "only the router may send TenantService")
            else:
                return client, received
        return None

    def send(self, client: int, message: Message) -> None:
        """Send to a client. No-op for a disconnected client; a failed send disconnects it."""
        peer = self._peers.get(client)
        if peer is not None and self._hub.send(peer, message) is None:
            self._disconnect(client)

    def announce(self, state: EngineState) -> None:
        """Send the engine state to all connected clients, and to each that connects later."""
        self._state = state = msgspec.structs.replace(state, pause=self._state.pause)
        for client in list(self._peers):
            self.send(client, state)

    def announce_pause(self, pause: str) -> None:
        """Announce the engine state with another pause."""
        self._state = msgspec.structs.replace(self._state, pause=pause)
        self.announce(self._state)

    def on_process_exit(self, pid: int) -> None:
        """Disconnect all clients of a front-end process that has exited."""
        for client in [client for client, (client_pid, _) in self._places.items() if client_pid == pid]:
            self._disconnect(client)

    def _on_hello(self, peer: bytes, hello: Message) -> None:
        if not isinstance(hello, Hello):
            self._refuse(peer, "the first message must be Hello")
            return
        if reason := mismatch(hello):
            self._refuse(peer, reason, final=True)
            return
        place = (hello.pid, hello.index)
        lost = {client for client, other in self._places.items() if other == place}
        for client in sorted(lost | self._routers if hello.role == "router" else lost):
            self._disconnect(client)  # its previous connection was lost unnoticed
        client = self._next_client
        self._next_client += 1
        self._clients[peer] = client
        self._peers[client] = peer
        self._places[client] = place
        if hello.role == "router":
            self._routers.add(client)
        self.send(client, self._welcome)
        if self._state.kind == "recovering":
            # It accepts requests, which wait in the scheduler.
            self.send(client, EngineState("ready", pause=self._state.pause))
        self.send(client, self._state)

    def _refuse(self, peer: bytes, reason: str, *, final: bool = False) -> None:
        self._hub.send(peer, Refused(reason, final))
        client = self._clients.get(peer)
        if client is None:
            self._hub.forget(peer)
        else:
            self._disconnect(client)

    def _disconnect(self, client: int) -> None:
        peer = self._peers.pop(client)
        del self._places[client]
        self._routers.discard(client)
        self._hub.forget(peer)
        del self._clients[peer]
        self._on_disconnect(client)


def mismatch(hello: Hello) -> str:
    """Return why the peer's protocol version is refused; empty when it matches."""
    if hello.protocol_version == PROTOCOL_VERSION:
        return ""
    return (
        f"protocol version {hello.protocol_version} of {hello.role} does not match the scheduler's {PROTOCOL_VERSION}"
    )
