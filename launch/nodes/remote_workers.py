"""Workers on nodes, for the supervisor of one engine: each looks like a child process of this machine."""

import contextlib
import os
import select
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import zmq

from quire.launch.nodes.addresses import ReservedPort, ip_addresses, own_address, parse_address
from quire.launch.nodes.keys import load_head_keys
from quire.launch.nodes.node_thread import NodeThread
from quire.launch.supervision.child_process import StatusPipe
from quire.protocol.config import EngineConfig
from quire.protocol.errors import ConfigError, EngineError
from quire.protocol.nodes import NodeLinkKeys, WorkerLink, links_file
from quire.protocol.process.child import EX_CONFIG, Command, Report
from quire.protocol.process.log import LogOptions
from quire.protocol.wire.node_messages import (
    KillWorker,
    NodeInfo,
    OrderWorker,
    StartWorker,
    WorkerEnded,
    WorkerReport,
)

MAX_TEXT = 600
"""Longest text of a report."""


class RemoteProcess:
    """A worker on a node. Implements ``supervision.members.WatchedProcess``.

    Its status pipe is written by the thread of the links: the reports that arrive, and its end.
    """

    pid = 0

    def __init__(self, workers: "NodeWorkers", rank: int, number: int) -> None:
        self.rank = rank
        self.number = number
        self._workers = workers
        reads, self._writes = os.pipe()
        os.set_blocking(reads, False)
        os.set_blocking(self._writes, False)
        self._status = StatusPipe(reads)
        self.watched = [reads]
        self._how = "killed"

    def read_reports(self) -> tuple[list[Report], bool]:
        return self._status.read()

    def send(self, command: Command) -> None:
        self._workers.order(self, command)

    def describe_end(self, name: str) -> str:
        return self._how

    def kill(self) -> None:
        """Let the node kill it. The node starts no other worker of this engine until its memory is free."""
        self._workers.kill(self)

    def end(self, deadline: float) -> None:
        while self.watched and (left := deadline - time.monotonic()) > 0:
            if select.select(self.watched, [], [], left)[0] and self.read_reports()[1]:
                break
        self.kill()
        self.close()

    def close(self) -> None:
        for fd in self.watched:
            os.close(fd)
        self.watched.clear()

    # ---- for NodeWorkers, with its lock

    def report(self, report: Report) -> None:
        """Pass on a report, whole or not at all: the supervisor could not read a part."""
        line = msgspec.json.encode(msgspec.structs.replace(report, text=report.text[:MAX_TEXT])) + b"\n"
        if len(line) <= select.PIPE_BUF:
            with contextlib.suppress(OSError):  # full, or closed: the process was killed
                os.write(self._writes, line)

    def note_end(self, how: str) -> None:
        if self._writes >= 0:
            self._how = how
            os.close(self._writes)
            self._writes = -1


class NodeWorkers:
    """The workers of one engine, whose ranks are on nodes. Implements ``supervision.members.RemoteWorkers``.

    Orders are sent when all nodes of the engine are connected, because the ranks meet at a port that the node of rank 0
    reports.
    """

    def __init__(self, config: EngineConfig, log: LogOptions) -> None:
        """``log``: level and format of the workers, which log on their nodes."""
        self._config = config
        self._log = log
        self._places = config.ranks
        self._nodes = list(dict.fromkeys(place.node for place in config.ranks))
        self._lock = threading.Lock()
        self._addresses: dict[str, str] = {}
        """The IPv4 address of each node."""
        self._own: dict[str, str] = {}
        """The address of this machine towards each node."""
        self._info: dict[str, NodeInfo] = {}
        self._unreachable: dict[str, str] = {}
        """Why a node does not answer, which has had its time: workers on it end at once, until it is back."""
        self._processes: dict[int, RemoteProcess] = {}
        """By number, until they have ended."""
        self._unsent: list[tuple[str, RemoteProcess, StartWorker | Command]] = []
        self._num_started = 0
        self._directory: Path | None = None
        self._thread: NodeThread | None = None
        self._links: tuple[int, list[WorkerLink], list[ReservedPort]] = (0, [], [])
        """Epoch, links of its ranks, and their ports."""

    # ---- supervision.members.RemoteWorkers

    def open(self, directory: Path) -> None:
        """Connect to the nodes.

        Raises:
            ConfigError: an address or the key file cannot be used.
        """
        keys = load_head_keys(Path(self._config.head_key_file))
        for node in self._nodes:
            host, _ = parse_address(node, "--nodes")
            try:
                self._addresses[node] = ip_addresses(host)[0]
                self._own[node] = own_address(self._addresses[node])
            except OSError as error:
                raise ConfigError(f"--nodes {node}: the address is not known: {error.strerror}") from None
        self._directory = directory
        self._thread = NodeThread(keys, self)
        for place in self._places:
            self._thread.add(place.node, place.node_key)

    def prepare_group(self, worker_epoch: int) -> None:
        """Make a port and keys for the link of each rank, and write the scheduler's part to a file.

        Raises:
            EngineError: no port is free.
        """
        if worker_epoch == self._links[0] or self._directory is None:
            return
        for port in self._links[2]:
            port.close()
        ports: list[ReservedPort] = []
        workers: list[WorkerLink] = []
        links: list[NodeLinkKeys] = []
        for place in self._places:
            own = self._own[place.node]
            try:
                ports.append(ReservedPort(own))
            except OSError as error:
                raise EngineError(f"no port for a worker's link at {own}: {error.strerror}") from None
            address = f"tcp://{own}:{ports[-1].number}"
            public, secret = (each.decode() for each in zmq.curve_keypair())
            worker_public, worker_secret = (each.decode() for each in zmq.curve_keypair())
            links.append(NodeLinkKeys(address=address, public_key=public, secret_key=secret, worker_key=worker_public))
            workers.append(
                WorkerLink(
                    address=address, scheduler_key=public, public_key=worker_public, secret_key=worker_secret,
                    own_address=self._addresses[place.node],
                )
            )  # fmt: skip
        self._links = (worker_epoch, workers, ports)
        links_file(self._directory, worker_epoch).write_bytes(msgspec.json.encode(links))

    def start(self, rank: int, *, is_quiet: bool) -> RemoteProcess:
        with self._lock:
            self._num_started += 1
            process = RemoteProcess(self, rank, self._num_started)
            self._processes[process.number] = process
            if reason := self._unreachable.get(self._places[rank].node):
                self._end(process, reason)
                return process
            order = StartWorker(process.number, self._places[rank].device, is_quiet, self._log.level, self._log.form)
            self._unsent.append((self._places[rank].node, process, order))
            self._send_all()
        return process

    def close(self) -> None:
        if self._thread is not None:
            self._thread.close()
        for process in list(self._processes.values()):
            process.note_end("the engine stops")
        self._processes.clear()
        for port in self._links[2]:
            port.close()

    # ---- for RemoteProcess

    def order(self, process: RemoteProcess, command: Command) -> None:
        if command.kind == "join":
            assert command.worker_epoch == self._links[0], "the group of a join has links"
            link = self._links[1][process.rank]
            command = msgspec.structs.replace(command, link=link)
        with self._lock:
            if process.number in self._processes:
                self._unsent.append((self._places[process.rank].node, process, command))
                self._send_all()

    def kill(self, process: RemoteProcess) -> None:
        with self._lock:
            if self._processes.pop(process.number, None) is None:
                return
            process.note_end("killed")
            unsent = [order for _, each, order in self._unsent if each is process]
            self._unsent = [each for each in self._unsent if each[1] is not process]
            if self._thread is not None and not any(isinstance(order, StartWorker) for order in unsent):
                self._thread.send(self._places[process.rank].node, KillWorker(process.number))

    def _send_all(self) -> None:
        """Send what waits, if all nodes are connected; the caller has the lock."""
        if self._thread is None or any(node not in self._info for node in self._nodes):
            return
        for node, process, order in self._unsent:
            if isinstance(order, StartWorker):
                self._thread.send(node, order)
            else:
                self._thread.send(node, OrderWorker(process.number, self._with_rendezvous(order)))
        self._unsent.clear()

    def _with_rendezvous(self, command: Command) -> Command:
        if command.link is None or len(self._nodes) < 2:
            return command
        first = self._places[0].node
        rendezvous = f"tcp://{self._addresses[first]}:{self._info[first].rendezvous_port}"
        return msgspec.structs.replace(command, link=msgspec.structs.replace(command.link, rendezvous=rendezvous))

    # ---- node_thread.Handler

    def ready(self, address: str, info: NodeInfo) -> None:
        with self._lock:
            self._info[address] = info
            self._unreachable.pop(address, None)
            self._send_all()

    def lost(self, address: str, reason: str, *, is_final: bool) -> None:
        with self._lock:
            if self._info.pop(address, None) is None:
                self._unreachable[address] = reason
            self._unsent = [each for each in self._unsent if each[0] != address]
            for process in list(self._processes.values()):
                if self._places[process.rank].node == address:
                    if is_final:
                        process.report(Report("failed", reason, EX_CONFIG))
                    self._end(process, reason)

    def received(self, address: str, message: Any) -> None:
        with self._lock:
            process = self._processes.get(getattr(message, "worker", 0))
            if process is None or self._places[process.rank].node != address:
                return
            match message:
                case WorkerReport(report=report):
                    process.report(report)
                case WorkerEnded(how=how):
                    self._end(process, f"{how} (on the node {self._info[address].host})")
                case _:
                    pass  # the node sends nothing else about a worker

    def _end(self, process: RemoteProcess, how: str) -> None:
        del self._processes[process.number]
        process.note_end(how)
