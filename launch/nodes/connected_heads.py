"""The agent's decisions: which heads are connected, and which workers run for them. No I/O; the Agent carries them out.

The workers of a head end with its link: when the head leaves, is silent, or sends a damaged message.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from quire.launch.supervision.members import WatchedProcess
from quire.protocol.process.child import Command, Report
from quire.protocol.process.log import event_logger
from quire.protocol.wire.codec import ProtocolError
from quire.protocol.wire.link_messages import Heartbeat, Refused
from quire.protocol.wire.node_messages import (
    JoinNode,
    KillWorker,
    LeaveNode,
    NodeInfo,
    OrderWorker,
    StartWorker,
    WorkerEnded,
    WorkerReport,
)

log = event_logger("node")

HEARTBEAT_S = 0.5
SILENT_S = 3.0
"""Time limit between two messages of a head, and of a node."""
KILL_S = 10.0
"""Longest wait for the end of a killed worker before another one starts on its device: a driver may keep a process."""
DEVICE_S = 15.0
"""Longest wait for a device that a worker of another head uses: that head may have died, which its silence shows."""


class WorkerRunner(Protocol):
    """Carries out decisions."""

    def send(self, head: bytes, message: Any) -> None:
        """Send a message; no effect if the head is not connected any more."""
        ...

    def open(self, head: bytes) -> int:
        """Prepare for the workers of a head; return a free port for their rendezvous."""
        ...

    def start(self, head: bytes, order: StartWorker) -> WatchedProcess:
        """Start a worker. Raises OSError, or ValueError for an order that no head of Quire gives."""
        ...

    def kill(self, process: WatchedProcess) -> None:
        """Kill a worker without waiting for its end, which is then reported by ``ConnectedHeads.ended``."""
        ...

    def forget(self, head: bytes) -> None:
        """Remove what ``open`` has prepared, and the numbering of messages."""
        ...


@dataclass(slots=True, eq=False)
class _Worker:
    """``process`` is None while it waits for its device; ``commands`` wait with it."""

    order: StartWorker
    ordered_at: float
    process: WatchedProcess | None = None
    commands: list[Command] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Head:
    name: str
    received_at: float
    sent_at: float
    workers: dict[int, _Worker] = field(default_factory=dict)


class ConnectedHeads:
    """The heads that are connected to a node, and their workers.

    Invariants (``check``): a process is a worker of one head, or was killed and has not ended yet; no device is used by
    two processes that were not killed; a worker waits only while its device is used.
    """

    def __init__(self, info: NodeInfo, runner: WorkerRunner) -> None:
        """``info``: the answer to JoinNode; its port is replaced by that of ``WorkerRunner.open``."""
        self._info = info
        self._runner = runner
        self._heads: dict[bytes, _Head] = {}
        self._ending: dict[int, tuple[WatchedProcess, int, float]] = {}
        """Killed processes by ``id``, their devices, and until when to wait for their ends."""

    # ---- events

    def received(self, peer: bytes, message: Any, now: float) -> None:
        """Process a message of a head, or the ProtocolError of a message that cannot be accepted."""
        head = self._heads.get(peer)
        if head is not None:
            head.received_at = now
        match message:
            case JoinNode() if head is None:
                self._join(peer, message, now)
            case StartWorker() if head is not None:
                self._start(peer, head, message, now)
            case OrderWorker(worker=number, command=command) if head is not None and command.kind in ("join", "stop"):
                self._order(head, number, command)
            case KillWorker(worker=number) if head is not None:
                if (worker := head.workers.pop(number, None)) is not None:
                    self._kill(worker, now)
            case Heartbeat() if head is not None:
                pass
            case LeaveNode():
                self._leave(peer, now)
            case ProtocolError() as error:
                self._refuse(peer, f"damaged or lost message: {error}", now)
            case other:
                self._refuse(peer, f"unexpected {type(other).__name__}", now)

    def reported(self, process: WatchedProcess, report: Report, now: float) -> None:
        if (found := self._find(process)) is not None:
            self._send(found[0], WorkerReport(found[1], report), now)

    def ended(self, process: WatchedProcess, how: str, now: float) -> None:
        if self._ending.pop(id(process), None) is None and (found := self._find(process)) is not None:
            del self._heads[found[0]].workers[found[1]]
            self._send(found[0], WorkerEnded(found[1], how), now)
        self._start_waiting(now)

    def tick(self, now: float) -> None:
        """Leave silent heads, send heartbeats to the others, and start workers that have waited long enough."""
        for peer, head in list(self._heads.items()):
            if now > head.received_at + SILENT_S:
                log.error("head is silent; its workers are killed", head=head.name, workers=len(head.workers))
                self._leave(peer, now)
            elif now >= head.sent_at + HEARTBEAT_S:
                self._send(peer, Heartbeat(now), now)
        self._start_waiting(now)

    def close(self, now: float) -> None:
        """Kill all workers, and refuse all heads, because the agent stops."""
        for peer in list(self._heads):
            self._runner.send(peer, Refused(f"the node {self._info.host} stops"))
            self._leave(peer, now)

    # ---- state

    def processes(self) -> Iterator[WatchedProcess]:
        """Yield the processes that have not ended, also killed ones."""
        for head in self._heads.values():
            yield from (worker.process for worker in head.workers.values() if worker.process is not None)
        yield from (process for process, _, _ in self._ending.values())

    def check(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        found = [id(process) for process in self.processes()]
        assert len(found) == len(set(found)), "a process twice"
        workers = [worker for head in self._heads.values() for worker in head.workers.values()]
        used = [worker.order.device for worker in workers if worker.process is not None]
        assert len(used) == len(set(used)), "a device is used twice"
        killed = {device for _, device, _ in self._ending.values()}
        waiting = {worker.order.device for worker in workers if worker.process is None}
        assert waiting <= {*used, *killed}, "a worker waits for nothing"

    # ---- decisions

    def _join(self, peer: bytes, message: JoinNode, now: float) -> None:
        own = (self._info.protocol_version, self._info.version)
        if (message.protocol_version, message.version) != own:
            self._refuse(peer, different_versions(self._info, message), now, is_final=True)
            return
        try:
            port = self._runner.open(peer)
        except OSError as error:
            self._refuse(peer, f"the node {self._info.host} cannot accept a head: {error.strerror}", now)
            return
        self._heads[peer] = _Head(f"{message.host} process {message.pid}", now, now)
        info = self._info
        self._send(peer, NodeInfo(*own, info.host, info.num_devices, port), now)
        log.info("head connected", head=message.host, pid=message.pid)

    def _start(self, peer: bytes, head: _Head, order: StartWorker, now: float) -> None:
        host, num_devices = self._info.host, self._info.num_devices
        reason = ""
        if order.worker in head.workers or len(head.workers) >= num_devices:
            reason = f"the node {host} runs at most {num_devices} workers of an engine"
        elif not 0 <= order.device < num_devices:
            reason = f"the node {host} has no device {order.device}: its --devices is {num_devices}"
        if reason:
            self._send(peer, WorkerEnded(order.worker, reason), now)
            return
        head.workers[order.worker] = _Worker(order, now)
        self._start_waiting(now)

    def _start_waiting(self, now: float) -> None:
        """Start the workers whose devices are free; refuse those that have waited for another head's for too long."""
        users = {
            worker.order.device: head.name
            for head in self._heads.values()
            for worker in head.workers.values()
            if worker.process is not None
        }
        killed = {device for _, device, until in self._ending.values() if now < until}
        for peer, head in self._heads.items():
            for number, worker in list(head.workers.items()):
                device = worker.order.device
                if worker.process is not None or device in killed:
                    continue
                if device not in users:
                    reason = self._launch(peer, worker)
                    users[device] = head.name
                elif now > worker.ordered_at + DEVICE_S:
                    reason = f"device {device} of the node {self._info.host} is used by {users[device]}"
                else:
                    continue
                if reason:
                    del head.workers[number]
                    self._send(peer, WorkerEnded(number, reason), now)

    def _launch(self, peer: bytes, worker: _Worker) -> str:
        """Start a worker, and pass on the commands that have waited. Return why it cannot be started, or ""."""
        try:
            worker.process = self._runner.start(peer, worker.order)
        except (OSError, ValueError) as error:
            return f"a worker cannot be started: {getattr(error, 'strerror', error)}"
        for command in worker.commands:
            worker.process.send(command)
        worker.commands.clear()
        return ""

    def _order(self, head: _Head, number: int, command: Command) -> None:
        worker = head.workers.get(number)
        if worker is None:
            return  # it has ended, and the head does not know yet
        if worker.process is None:
            worker.commands.append(command)
        else:
            worker.process.send(command)

    def _kill(self, worker: _Worker, now: float) -> None:
        if worker.process is not None:
            self._ending[id(worker.process)] = worker.process, worker.order.device, now + KILL_S
            self._runner.kill(worker.process)

    def _leave(self, peer: bytes, now: float) -> None:
        head = self._heads.pop(peer, None)
        if head is not None:
            for worker in head.workers.values():
                self._kill(worker, now)
        self._runner.forget(peer)

    def _refuse(self, peer: bytes, reason: str, now: float, *, is_final: bool = False) -> None:
        log.error("a head is refused", reason=reason)
        self._runner.send(peer, Refused(" ".join(reason.split()), is_final))
        self._leave(peer, now)

    def _send(self, peer: bytes, message: Any, now: float) -> None:
        self._heads[peer].sent_at = now
        self._runner.send(peer, message)

    def _find(self, process: WatchedProcess) -> tuple[bytes, int] | None:
        """Return the head and number of a worker that was not killed, or None."""
        for peer, head in self._heads.items():
            for number, worker in head.workers.items():
                if worker.process is process:
                    return peer, number
        return None


def different_versions(node: NodeInfo, head: JoinNode) -> str:
    """Return in one line that node and head run different versions."""
    return (
        f"the node {node.host} runs Quire {node.version} (protocol {node.protocol_version}), the head "
        f"{head.version} (protocol {head.protocol_version}): install the same version on both"
    )
