"""How a worker, real or simulated, receives its group from the supervisor and its configuration from the scheduler."""

import time
from collections.abc import Callable
from socket import gethostname

from quire.protocol.errors import EngineError
from quire.protocol.process.child import Child, Command, Report
from quire.protocol.wire.channel import Channel, Received
from quire.protocol.wire.link_messages import PROTOCOL_VERSION, Heartbeat, Hello, Refused, Welcome
from quire.protocol.wire.worker_messages import Configure

HEARTBEAT_S = 1.0
ANSWER_S = 60.0
"""Time limit for the answer of a scheduler on another machine. It may still be starting."""


class WorkerCommands:
    """Commands of the supervisor to a worker: join a group, or exit. Only the newest counts."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._command: Command | None = None

    def fileno(self) -> int:
        """Readable when ``pending`` may have become true."""
        return self._child.fileno()

    @property
    def pending(self) -> bool:
        """Whether a newer command supersedes the worker's current group."""
        for command in self._child.take_commands():
            self._command = command
        return self._command is not None

    def report_phase(self, text: str) -> None:
        """Report what the start of this worker does now."""
        self._child.report(Report("alive", text))

    def take(self) -> Command | None:
        """Wait for a command. Return a join command, confirmed to the supervisor, or None to exit."""
        while not self.pending:
            self._child.wait()
        command, self._command = self._command, None
        if command is None or command.kind != "join":
            return None
        self._child.report(Report("joined", worker_epoch=command.worker_epoch))
        return command


class Superseded(Exception):
    """A newer command arrived: the current group is obsolete."""


def wait_for_message(
    channel: Channel, commands: WorkerCommands, woken: Callable[[], bool] = lambda: False
) -> Received | None:
    """Return the next message, or None after a second without one, after sending a heartbeat.

    Args:
        woken: whether the wait has ended for another reason of the caller; then None is returned without a heartbeat.

    Raises:
        Superseded: a newer command arrived.
        ProtocolError: a message was damaged or lost.
    """
    received = channel.receive(HEARTBEAT_S)
    if received is None:
        if commands.pending:
            raise Superseded
        if not woken():
            channel.send(Heartbeat(time.monotonic()))
    return received


def request_configuration(
    channel: Channel, rank: int, pid: int, commands: WorkerCommands, remote: str = ""
) -> Configure:
    """Send a Hello and wait for the configuration.

    Args:
        remote: address of a scheduler on another machine, which may be out of reach.

    Raises:
        EngineError: the scheduler rejected this worker, or a remote one does not answer.
        Superseded: a newer command arrived.
    """
    channel.send(Hello(PROTOCOL_VERSION, "worker", rank, pid))
    asked_at = time.monotonic()
    while True:
        received = wait_for_message(channel, commands)
        if received is None and remote and time.monotonic() >= asked_at + ANSWER_S:
            raise EngineError(
                f"{gethostname()} gets no answer of the scheduler at {remote}: nodes must be able to connect to every "
                f"port of the head machine"
            )
        match received.message if received else None:
            case Welcome() | Heartbeat() | None:
                continue
            case Configure() as configure:
                return configure
            case Refused(reason=reason):
                raise EngineError(f"the scheduler refused this worker: {reason}")
            case other:
                raise EngineError(f"unexpected {type(other).__name__} instead of Configure")
