"""The router's link to one engine's scheduler, which treats it as a front end without requests: for its counters."""

from collections.abc import Callable

from quire.protocol.errors import EngineError
from quire.protocol.wire.channel import Channel
from quire.protocol.wire.codec import ProtocolError
from quire.protocol.wire.front_end_messages import Control, Statistics
from quire.protocol.wire.link_messages import PROTOCOL_VERSION, Hello, Message, Refused, Welcome

ROLE = "router"


class EngineLink:
    """Asks for statistics, and reconnects after an error, at most once per ``poll``."""

    def __init__(self, connect: Callable[[], Channel], pid: int) -> None:
        """``connect``: opens a channel to the scheduler."""
        self._connect = connect
        self._pid = pid
        self._channel: Channel | None = None
        self._is_welcome = False
        self._num_queries = 0

    def poll(self) -> None:
        """Ask for statistics. Called about once a second, it is the link's heartbeat too."""
        try:
            if self._channel is None:
                self._channel = self._connect()
                self._channel.send(Hello(PROTOCOL_VERSION, ROLE, 0, self._pid))
            # Not before its Welcome: the scheduler may be of another version, and refuse the link.
            elif self._is_welcome:
                self._num_queries += 1
                self._channel.send(Control("statistics", self._num_queries))
        except EngineError:
            self.close()

    def receive(self) -> Statistics | None:
        """Return the next statistics that have arrived."""
        try:
            while self._channel is not None and (received := self._channel.receive()) is not None:
                match received.message:
                    case Statistics() as statistics:
                        return statistics
                    case Welcome():
                        self._is_welcome = True
                    case Refused():
                        self.close()
                    case _:
                        pass  # states of the engine, which the fleet announces too
        except ProtocolError:
            self.close()
        return None

    def send(self, message: Message) -> None:
        """Send a message. Without effect on a broken link."""
        try:
            if self._channel is not None and self._is_welcome:
                self._channel.send(message)
        except EngineError:
            self.close()

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._channel, self._is_welcome = None, False
