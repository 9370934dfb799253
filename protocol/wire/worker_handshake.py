"""How a worker, real or simulated, learns where it is wanted, and introduces itself to the scheduler there."""

import time

from quire.protocol.errors import EngineError
from quire.protocol.process.child import Child, Command, Report
from quire.protocol.wire.channel import Channel, Received
from quire.protocol.wire.link_messages import PROTOCOL_VERSION, Heartbeat, Hello, Refused, Welcome
from quire.protocol.wire.worker_messages import Configure

HEARTBEAT_S = 1.0


class WorkerCommands:
    """What the supervisor tells a worker: to which group it is to go, or to end. Only the newest call counts."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._call: Command | None = None

    def fileno(self) -> int:
        """Readable when ``pending`` may have become true."""
        return self._child.fileno()

    @property
    def pending(self) -> bool:
        """Whether what the worker does now is not wanted any more."""
        for command in self._child.take_commands():
            self._call = command
        return self._call is not None

    def take(self) -> Command | None:
        """The newest call, once there is one; None: the process is to end. Waits; says that the call was heard."""
        while not self.pending:
            self._child.wait()
        call, self._call = self._call, None
        if call is None or call.kind != "join":
            return None
        self._child.report(Report("joined", worker_epoch=call.worker_epoch))
        return call


class Superseded(Exception):
    """Another call came: this group is not wanted any more."""


def wait_for_message(channel: Channel, calls: WorkerCommands) -> Received | None:
    """The next message; None after a second without one, in which the scheduler was told that we wait.

    Raises:
        CalledAway: there is no need to wait any longer.
        ProtocolError: a message was damaged or lost.
    """
    received = channel.receive(HEARTBEAT_S)
    if received is None:
        if calls.pending:
            raise Superseded
        channel.send(Heartbeat(time.monotonic()))
    return received


def request_configuration(channel: Channel, rank: int, pid: int, calls: WorkerCommands) -> Configure:
    """Say hello, and wait for what to be.

    Raises:
        EngineError: the scheduler does not want this worker.
        CalledAway: there is no need to wait any longer.
    """
    channel.send(Hello(PROTOCOL_VERSION, "worker", rank, pid))
    while True:
        received = wait_for_message(channel, calls)
        match received.message if received else None:
            case Welcome() | Heartbeat() | None:
                continue
            case Configure() as configure:
                return configure
            case Refused(reason=reason):
                raise EngineError(f"the scheduler refused this worker: {reason}")
            case other:
                raise EngineError(f"unexpected {type(other).__name__} instead of Configure")
