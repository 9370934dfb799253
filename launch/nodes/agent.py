"""``quire node``: the agent of a machine, which starts worker processes only, for heads with an allowed key."""

import os
import select
import signal
import socket
import time
from pathlib import Path
from types import FrameType
from typing import Any

import zmq

from quire.launch.nodes.addresses import ReservedPort
from quire.launch.nodes.connected_heads import HEARTBEAT_S, ConnectedHeads
from quire.launch.supervision.child_process import ChildProcess
from quire.launch.supervision.directory import make_directory
from quire.launch.supervision.members import WatchedProcess
from quire.launch.supervision.supervisor import REAL_WORKER, WORKER_ENVIRONMENT
from quire.protocol.errors import ConfigError
from quire.protocol.process.log import LogOptions
from quire.protocol.process.owned_folder import remove_folder
from quire.protocol.process.signals import IGNORED_SIGNALS, STOP_SIGNALS
from quire.protocol.wire.curve_keys import CurveContext, CurveKeys
from quire.protocol.wire.link_messages import PROTOCOL_VERSION
from quire.protocol.wire.node_messages import HeadToNode, NodeInfo, StartWorker
from quire.protocol.wire.zmq_channel import Waiter, ZmqHub
from quire.version import __version__

MAX_MESSAGE_BYTES = 65_536
"""Longest message of a head. A peer without a key can make the agent keep as much per connection."""

MAX_MESSAGES = 1000
"""Messages per turn, so that a head which sends without end does not keep the others from their heartbeats."""


class Agent:
    """Sockets, processes and folders of a node; ``heads.py`` decides. Implements ``heads.Runner``.

    All methods must be called from one thread, which must not end before the workers.
    """

    def __init__(self, listen: str, keys: CurveKeys, num_devices: int) -> None:
        """Raises ConfigError if the address cannot be used."""
        self._curve = CurveContext(keys)
        try:
            self._hub = ZmqHub(self._curve.context, listen, HeadToNode, MAX_MESSAGE_BYTES)
        except zmq.ZMQError as error:
            self._curve.close()
            raise ConfigError(f"--listen {listen}: {zmq.strerror(error.errno or 0)}") from None
        self._waiter = Waiter()
        self._waiter.add(self._hub.socket)
        self._folders: dict[bytes, tuple[Path, int, ReservedPort]] = {}
        """By head: a folder for the files of the workers, the folder's lock, and a port."""
        info = NodeInfo(PROTOCOL_VERSION, __version__, socket.gethostname(), num_devices, 0)
        self.heads = ConnectedHeads(info, self)
        self._is_stopping = False

    def run(self, stdin: int | None = None) -> None:
        """Serve heads until one of STOP_SIGNALS, or the end of ``stdin``: a pipe from which nothing else is read."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._stop)
        for number in IGNORED_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        if stdin is not None:
            self._waiter.add(stdin)
        while not self._is_stopping:
            self.turn(HEARTBEAT_S / 2)
            if stdin is not None and select.select([stdin], [], [], 0)[0]:
                return

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._is_stopping = True

    def turn(self, timeout: float) -> None:
        """Wait for at most ``timeout`` seconds, and process what has happened."""
        self._waiter.wait(int(timeout * 1000))
        for _ in range(MAX_MESSAGES):
            if (received := self._hub.receive()) is None:
                break
            self.heads.received(received.peer, received.message, time.monotonic())
        for process in list(self.heads.processes()):
            self._read(process)
        self.heads.tick(time.monotonic())

    def _read(self, process: WatchedProcess) -> None:
        reports, has_ended = process.read_reports()
        for report in reports:
            self.heads.reported(process, report, time.monotonic())
        if has_ended:
            how = process.describe_end("worker")
            for fd in process.watched:
                self._waiter.remove(fd)
            process.close()
            self.heads.ended(process, how, time.monotonic())

    def close(self) -> None:
        """Kill all workers, and wait for their ends."""
        self.heads.close(time.monotonic())
        for process in list(self.heads.processes()):
            process.kill()
            process.close()
        self._hub.close()
        self._curve.close()

    # ---- heads.Runner

    def send(self, head: bytes, message: Any) -> None:
        self._hub.send(head, message)

    def open(self, head: bytes) -> int:
        port = ReservedPort()
        self._folders[head] = (*make_directory(), port)
        return port.number

    def start(self, head: bytes, order: StartWorker) -> WatchedProcess:
        arguments = ["--directory", str(self._folders[head][0]), *(["--quiet"] if order.is_quiet else [])]
        environment = {name: value for name, value in WORKER_ENVIRONMENT.items() if name not in os.environ}
        environment |= LogOptions(order.log_level, order.log_format).environment
        process = ChildProcess(REAL_WORKER.module, arguments, environment=environment)
        for fd in process.watched:
            self._waiter.add(fd)
        return process

    def kill(self, process: WatchedProcess) -> None:
        assert isinstance(process, ChildProcess)
        process.process.kill()

    def forget(self, head: bytes) -> None:
        self._hub.forget(head)
        directory, lock, port = self._folders.pop(head, (None, -1, None))
        if directory is not None and port is not None:
            remove_folder(directory, lock)
            port.close()
