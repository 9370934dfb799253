"""The front ends connected to this scheduler."""

from collections.abc import Callable

import msgspec

from quire.protocol.config import EngineConfig
from quire.protocol.wire.clients import Clients, Hub
from quire.protocol.wire.front_end_messages import EngineState, TenantService
from quire.protocol.wire.link_messages import PROTOCOL_VERSION, Hello, Message, Welcome
from quire.protocol.wire.zmq_channel import PeerMessage


class FrontEnds:
    """Owns the engine state that connected front ends know. Does not know requests.

    A client number is never reused, because requests of a disconnected front end may still be ending. The router of a
    server with several engines connects as a front end that has no requests.
    """

    def __init__(self, hub: Hub, config: EngineConfig, on_disconnect: Callable[[int], None]) -> None:
        """``on_disconnect``: called with each client that exited, does not read, or sent an invalid message."""
        welcome = Welcome(PROTOCOL_VERSION, config.digest, config.max_model_len)
        self._clients = Clients(hub, welcome, self._connected, self._disconnected)
        self._on_disconnect = on_disconnect
        self._state = EngineState("loading")
        self._routers: set[int] = set()
        """Clients that are the router: at most one, because a new one replaces it."""

    def receive(self) -> tuple[int, PeerMessage] | None:
        """Return the next (client, message) for the engine, or None, without waiting."""
        while (found := self._clients.receive()) is not None:
            client, received = found
            if not isinstance(received.message, TenantService) or client in self._routers:
                return client, received
            # It changes the order in which tenants are admitted, so that no other client may send it.
            self._clients.refuse(client, "only the router may send TenantService")
        return None

    def send(self, client: int, message: Message) -> None:
        """Send to a client. No-op for a disconnected client; a failed send disconnects it."""
        self._clients.send(client, message)

    def announce(self, state: EngineState) -> None:
        """Send the engine state to all connected clients, and to each that connects later."""
        self._state = state = msgspec.structs.replace(state, pause=self._state.pause)
        for client in self._clients.connected:
            self.send(client, state)

    def announce_pause(self, pause: str) -> None:
        """Announce the engine state with another pause."""
        self._state = msgspec.structs.replace(self._state, pause=pause)
        self.announce(self._state)

    def on_process_exit(self, pid: int) -> None:
        """Disconnect all clients of a front-end process that has exited."""
        self._clients.on_process_exit(pid)

    def _connected(self, client: int, hello: Hello) -> None:
        if hello.role == "router":
            for other in sorted(self._routers):
                self._clients.disconnect(other)  # its exit was not noticed
            self._routers.add(client)
        if self._state.kind == "recovering":
            # It accepts requests, which wait in the scheduler.
            self.send(client, EngineState("ready", pause=self._state.pause))
        self.send(client, self._state)

    def _disconnected(self, client: int) -> None:
        self._routers.discard(client)
        self._on_disconnect(client)
