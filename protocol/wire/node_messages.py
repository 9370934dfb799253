"""Messages between a head machine and the agent of a node, which starts workers there.

A head has one link to each node per process that needs it: the fleet, which only learns what the node has, and each
engine's supervisor, which starts workers. The workers of a link end with it.
"""

from typing import TypeAlias

from quire.protocol.process.child import Command, Report
from quire.protocol.wire.link_messages import Heartbeat, Message, Refused


class JoinNode(Message, frozen=True, tag=70):
    """First message of a head. ``version``: that of Quire, which must be the node's. ``host``: the head's name."""

    protocol_version: int
    version: str
    host: str
    pid: int


class NodeInfo(Message, frozen=True, tag=71):
    """The answer to JoinNode.

    Attributes:
        num_devices: workers that the node runs at once: its GPUs, or as many as ``quire node --devices`` says.
        rendezvous_port: a free TCP port, at which the ranks of a group on several nodes meet if rank 0 is here.
    """

    protocol_version: int
    version: str
    host: str
    num_devices: int
    rendezvous_port: int


class StartWorker(Message, frozen=True, tag=72):
    """Start a worker process, which joins a group by a later OrderWorker.

    Attributes:
        worker: its number, never used before on this link.
        device: the device that it uses, from 0. It starts when no other worker uses it.
        is_quiet: as the worker's flag ``--quiet``.
        log_level, log_format: of ``protocol.process.log``; empty for the defaults.
    """

    worker: int
    device: int
    is_quiet: bool
    log_level: str = ""
    log_format: str = ""


class OrderWorker(Message, frozen=True, tag=73):
    """Pass a command to a worker."""

    worker: int
    command: Command


class KillWorker(Message, frozen=True, tag=74):
    """Kill a worker. The next one on its device starts when it has ended and its memory is free."""

    worker: int


class LeaveNode(Message, frozen=True, tag=75):
    """Kill all workers of this link, which ends."""


class WorkerReport(Message, frozen=True, tag=76):
    worker: int
    report: Report


class WorkerEnded(Message, frozen=True, tag=77):
    """A worker has ended, or could not start. ``how`` is one line."""

    worker: int
    how: str


HeadToNode: TypeAlias = JoinNode | Heartbeat | StartWorker | OrderWorker | KillWorker | LeaveNode
NodeToHead: TypeAlias = NodeInfo | Refused | Heartbeat | WorkerReport | WorkerEnded
