"""The front ends of this scheduler: which are connected, as which clients, and what all of them are told."""

from collections.abc import Callable

from quire.protocol.config import EngineConfig
from quire.protocol.wire.codec import ProtocolError
from quire.protocol.wire.front_end_messages import EngineState
from quire.protocol.wire.link_messages import PROTOCOL_VERSION, Heartbeat, Hello, Message, Refused, Welcome
from quire.protocol.wire.zmq_channel import PeerMessage
from quire.scheduler_proc.process.transport import Hub


class FrontEnds:
    """Owns the hub, and each connection's client: the number under which the Scheduler knows it. Knows no requests.

    A number is never given out again, for requests of the front end that had it may still be ending.
    """

    def __init__(self, hub: Hub, config: EngineConfig, on_gone: Callable[[int], None]) -> None:
        """``on_gone``: called with each client that is gone, does not read, or cannot be understood."""
        self._hub = hub
        self._on_gone = on_gone
        self._welcome = Welcome(PROTOCOL_VERSION, config.digest, config.max_model_len)
        self._state = EngineState("loading")
        self._peers: dict[int, bytes] = {}
        self._clients: dict[bytes, int] = {}
        self._places: dict[int, tuple[int, int]] = {}
        """(process id, index) of each client."""
        self._next_client = 0

    def receive(self) -> tuple[int, PeerMessage] | None:
        """(client, message) of the next message that is for the engine, without waiting; None: there is no other.

        A Hello and a heartbeat are answered here; a front end that cannot be understood is cut off.
        """
        while (received := self._hub.receive()) is not None:
            client, message = self._clients.get(received.peer), received.message
            if isinstance(message, ProtocolError):
                self._cut(received.peer, "a message was damaged, lost or unknown")
            elif client is None:
                self._greet(received.peer, message)
            elif isinstance(message, Heartbeat):
                self.send(client, message)
            else:
                return client, received
        return None

    def send(self, client: int, message: Message) -> None:
        """Without effect on a client that is gone. A client that does not take it is gone from now on."""
        peer = self._peers.get(client)
        if peer is not None and self._hub.send(peer, message) is None:
            self._forget(client)

    def announce(self, state: EngineState) -> None:
        """The engine's state from now on: to all that are connected, and to each that comes."""
        self._state = state
        for client in list(self._peers):
            self.send(client, state)

    def on_process_exit(self, pid: int) -> None:
        """The front end with this process id has died, whether its connection shows it or not."""
        for client in [client for client, (its_pid, _) in self._places.items() if its_pid == pid]:
            self._forget(client)

    def _greet(self, peer: bytes, hello: Message) -> None:
        if not isinstance(hello, Hello):
            self._cut(peer, "the first message must be Hello")
            return
        if why := mismatch(hello):
            self._cut(peer, why, final=True)
            return
        place = (hello.pid, hello.index)
        for client in [client for client, other in self._places.items() if other == place]:
            self._forget(client)  # its connection was lost without a word
        client = self._next_client
        self._next_client += 1
        self._clients[peer] = client
        self._peers[client] = peer
        self._places[client] = place
        self.send(client, self._welcome)
        if self._state.kind == "recovering":
            self.send(client, EngineState("ready"))  # it takes requests, which wait here
        self.send(client, self._state)

    def _cut(self, peer: bytes, reason: str, *, final: bool = False) -> None:
        self._hub.send(peer, Refused(reason, final))
        client = self._clients.get(peer)
        if client is None:
            self._hub.forget(peer)
        else:
            self._forget(client)

    def _forget(self, client: int) -> None:
        peer = self._peers.pop(client)
        del self._places[client]
        self._hub.forget(peer)
        del self._clients[peer]
        self._on_gone(client)


def mismatch(hello: Hello) -> str:
    """Why the scheduler cannot talk with the sender; empty where it can."""
    if hello.protocol_version == PROTOCOL_VERSION:
        return ""
    return (
        f"protocol version {hello.protocol_version} of {hello.role} does not match the scheduler's {PROTOCOL_VERSION}"
    )
