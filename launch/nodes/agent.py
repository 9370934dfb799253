"""``quire node``: the agent of a machine, which starts workers for heads that have an allowed key, and nothing else."""

import argparse
import contextlib
import os
import select
import shutil
import signal
import socket
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import zmq

from quire.launch.nodes.addresses import ReservedPort, parse_address
from quire.launch.nodes.heads import HEARTBEAT_S, Heads
from quire.launch.nodes.keys import make_keys
from quire.launch.supervision.child_process import ChildProcess
from quire.launch.supervision.directory import make_directory
from quire.launch.supervision.members import WatchedProcess
from quire.launch.supervision.supervisor import REAL_WORKER, WORKER_ENVIRONMENT
from quire.protocol.errors import ConfigError
from quire.protocol.process.log import LogOptions, write_line
from quire.protocol.process.signals import IGNORED_SIGNALS, STOP_SIGNALS
from quire.protocol.wire.curve_keys import CurveContext, CurveKeys, load_curve_keys
from quire.protocol.wire.link_messages import PROTOCOL_VERSION
from quire.protocol.wire.node_messages import HeadToNode, NodeInfo, StartWorker
from quire.protocol.wire.zmq_channel import Waiter, ZmqHub
from quire.version import __version__

GPUS = Path("/proc/driver/nvidia/gpus")
KEYS_FLAG = "--keys"
DEVICES = range(1, 1025)


def add_node_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--listen", metavar="ADDRESS", help="where heads connect, such as tcp://10.0.0.5:7100")
    parser.add_argument(
        "--keys", type=Path, metavar="DIR", help="folder of mode 0700 with server.key_secret and allowed/NAME.key"
    )
    parser.add_argument("--devices", type=int, metavar="N", help="workers at once (the number of GPUs; without one 1)")
    parser.add_argument("--stop-with-stdin", action="store_true", help="stop when standard input ends")
    parser.add_argument(
        "--make-keys", type=Path, metavar="DIR", help="write new keys to DIR/node (--keys) and DIR/head (--node-keys)"
    )


def run(args: argparse.Namespace) -> None:
    """Run the command ``quire node``. Raises ConfigError for flags that cannot be used."""
    if args.make_keys is not None:
        node, head = make_keys(args.make_keys)
        write_line(f"wrote {node} for `quire node --keys`, and {head} for `quire serve --node-keys`")
        return
    if not args.listen or args.keys is None:
        raise ConfigError("quire node needs --listen tcp://ADDRESS:PORT and --keys DIR (--make-keys DIR makes keys)")
    parse_address(args.listen, "--listen")
    devices = num_devices() if args.devices is None else args.devices
    if devices not in DEVICES:
        raise ConfigError(f"--devices must be between {DEVICES[0]} and {DEVICES[-1]} (got {devices})")
    agent = Agent(args.listen, load_curve_keys(args.keys, KEYS_FLAG), devices)
    write_line(f"Quire {__version__} runs up to {devices} workers for heads that connect to {args.listen}")
    try:
        agent.run(stdin=sys.stdin.fileno() if args.stop_with_stdin else None)
    finally:
        agent.close()


def num_devices() -> int:
    """Return the number of this machine's GPUs that ``CUDA_VISIBLE_DEVICES`` shows; without one, 1 for the CPU."""
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES", ""):
        return len(visible.split(","))
    return max(1, len(list(GPUS.iterdir()) if GPUS.is_dir() else []))


class Agent:
    """Sockets, processes and folders of a node; ``heads.py`` decides. Implements ``heads.Runner``.

    All methods must be called from one thread, which must not end before the workers.
    """

    def __init__(self, listen: str, keys: CurveKeys, num_devices: int) -> None:
        """Raises ConfigError if the address cannot be used."""
        self._curve = CurveContext(keys)
        try:
            self._hub = ZmqHub(self._curve.context, listen, HeadToNode)
        except zmq.ZMQError as error:
            self._curve.close()
            raise ConfigError(f"--listen {listen}: {zmq.strerror(error.errno or 0)}") from None
        self._waiter = Waiter()
        self._waiter.add(self._hub.socket)
        self._folders: dict[bytes, tuple[Path, int, ReservedPort]] = {}
        """Of each head: a folder for the sockets and files of its workers, the folder's lock, and a port."""
        info = NodeInfo(PROTOCOL_VERSION, __version__, socket.gethostname(), num_devices, 0)
        self.heads = Heads(info, self)
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
        while (received := self._hub.receive()) is not None:
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
            shutil.rmtree(directory, ignore_errors=True)
            port.close()
            with contextlib.suppress(OSError):
                os.close(lock)
