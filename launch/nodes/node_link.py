"""One link of the head machine to a node: what it sends, and when it is lost. No I/O, no clock."""

from typing import Any

from quire.launch.nodes.connected_heads import HEARTBEAT_S, SILENT_S, different_versions
from quire.protocol.wire.link_messages import PROTOCOL_VERSION, Heartbeat, Refused
from quire.protocol.wire.node_messages import JoinNode, NodeInfo

CONNECT_S = 5.0
"""Time limit for the first answer of a node."""


class NodeLink:
    """The state of one connection to a node; another connection needs another object.

    Attributes:
        info: the answer of the node; None before it.
        lost: why the link is of no use any more, in one line; empty while it is.
        is_final: whether another connection would be refused too, until the node is another.
    """

    def __init__(self, address: str, join: JoinNode, now: float) -> None:
        self.address = address
        self.info: NodeInfo | None = None
        self.lost = ""
        self.is_final = False
        self._join = join
        self._has_joined = False
        self._until = now + CONNECT_S
        self._heartbeat_at = now + HEARTBEAT_S

    def received(self, message: Any, now: float) -> bool:
        """Process a message; return whether the caller has to process it too."""
        self._until = now + SILENT_S
        match message:
            case NodeInfo() as info if self.info is None:
                if (info.protocol_version, info.version) != (PROTOCOL_VERSION, self._join.version):
                    self.lost, self.is_final = different_versions(info, self._join), True
                    return False
                self.info = info
                return True
            case Refused(reason=reason, final=final):
                self.lost, self.is_final = f"the node {self.address} refuses: {reason}", final
                return False
            case Heartbeat():
                return False
            case NodeInfo():
                self.lost = f"the node {self.address} sent an unexpected NodeInfo"
                return False
            case _:
                return True

    def broken(self, reason: str) -> None:
        """Process a message that cannot be accepted."""
        self.lost = f"the link to the node {self.address} is broken: {reason}"

    def due(self, now: float, connection: str) -> list[Any]:
        """Return the messages to send now.

        Args:
            connection: the state of the connection, for the reason when the time limit passes.
        """
        if now > self._until and not self.lost:
            if self.info is None:
                self.lost = f"the node {self.address} does not answer: {connection}"
            else:
                self.lost = f"the node {self.info.host} ({self.address}) has been silent for {SILENT_S:g} s"
        if self.lost:
            return []
        if not self._has_joined:
            self._has_joined = True
            return [self._join]
        if now >= self._heartbeat_at and self.info is not None:
            self._heartbeat_at = now + HEARTBEAT_S
            return [Heartbeat(now)]
        return []
