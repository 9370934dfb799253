"""The front ends of this scheduler: who is connected, as which client, and what all of them are told."""

from collections import deque
from collections.abc import Callable

from quire.protocol.config import EngineConfig
from quire.protocol.wire.codec import Codec, ProtocolError
from quire.protocol.wire.messages import (
    PROTOCOL_VERSION,
    Control,
    EngineState,
    FrontEndToScheduler,
    Heartbeat,
    Hello,
    Message,
    Refused,
    Trial,
    Welcome,
)
from quire.protocol.wire.zmq_channel import FromPeer
from quire.scheduler_proc.process.doors import Hub


class FrontEnds:
    """Owns the hub, and each connection's client: the number under which the Scheduler knows it. Knows no requests.

    A number is never given out again, for requests of whoever had it may still be ending.

    Attributes:
        only: while set, requests of others than this client are kept until it is not any more.
    """

    def __init__(self, hub: Hub, config: EngineConfig, on_gone: Callable[[int], None]) -> None:
        """``on_gone``: called with each client that is gone, does not read, or cannot be understood."""
        self._hub = hub
        self._on_gone = on_gone
        self._welcome = Welcome(PROTOCOL_VERSION, config.digest, config.max_model_len)
        self._state = EngineState("loading")
        self._peers: dict[int, bytes] = {}
        self._clients: dict[bytes, int] = {}
        self._who: dict[int, tuple[int, int]] = {}
        """(process id, index) of whoever has a number."""
        self._next_client = 0
        self.only: int | None = None
        self._unaware: tuple[int, int] | None = None
        """Who was cut off as the only one, and may not know that yet."""
        self._kept: deque[tuple[int, FromPeer]] = deque()
        done = Trial("done")
        self._done = FromPeer(b"", done, Codec(FrontEndToScheduler).encode(0, 0, done))

    def receive(self) -> tuple[int, FromPeer] | None:
        """(client, message) of the next message that is for the engine, without waiting; None: there is no other.

        Whoever comes is greeted, a heartbeat is answered, and who cannot be understood is cut off. For one who was cut
        off in a trial that is said to be done when it knows: it has died, or come back. Until then it thinks that
        whatever ends this process is whom it tried.
        """
        for index, come in enumerate(self._kept):
            if self.only in (None, come[0]):
                del self._kept[index]
                return come
        while (received := self._hub.receive()) is not None:
            client, message = self._clients.get(received.peer), received.message
            if isinstance(message, ProtocolError):
                self._cut(received.peer, "a message was damaged, lost or unknown")
            elif client is None:
                self._greet(received.peer, message)
            elif isinstance(message, Heartbeat):
                self.send(client, message)
            elif self.only in (None, client) or isinstance(message, Control):
                return client, received
            else:
                self._kept.append((client, received))
        if self.only is not None and self.only not in self._who and self._unaware is None:
            return self.only, self._done
        return None

    def send(self, client: int, message: Message) -> None:
        """To who is gone already: nothing happens. Who does not take it, is gone from now on."""
        peer = self._peers.get(client)
        if peer is not None and self._hub.send(peer, message) is None:
            self._forget(client)

    def announce(self, state: EngineState) -> None:
        """The engine's state from now on: to all who are connected, and to whoever comes."""
        self._state = state
        for client in list(self._peers):
            self.send(client, state)

    def process_gone(self, pid: int) -> None:
        """The front end with this process id has died, whether its connection shows it or not."""
        for client in [client for client, (its_pid, _) in self._who.items() if its_pid == pid]:
            self._forget(client)
        if self._unaware is not None and self._unaware[0] == pid:
            self._unaware = None

    def _greet(self, peer: bytes, hello: Message) -> None:
        if not isinstance(hello, Hello):
            self._cut(peer, "the first message must be Hello")
            return
        if why := mismatch(hello):
            self._cut(peer, why, final=True)
            return
        who = (hello.pid, hello.index)
        for client in [client for client, other in self._who.items() if other == who]:
            self._forget(client)  # its connection was lost without a word
        if self._unaware == who:
            self._unaware = None
        client = self._next_client
        self._next_client += 1
        self._clients[peer] = client
        self._peers[client] = peer
        self._who[client] = who
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
        who = self._who.pop(client)
        if client == self.only:
            self._unaware = who
        self._hub.forget(peer)
        del self._clients[peer]
        self._kept = deque(come for come in self._kept if come[0] != client)
        self._on_gone(client)


def mismatch(hello: Hello) -> str:
    """Why the scheduler cannot talk with who said this; empty where it can."""
    if hello.protocol_version == PROTOCOL_VERSION:
        return ""
    return (
        f"protocol version {hello.protocol_version} of {hello.role} does not match the scheduler's {PROTOCOL_VERSION}"
    )
