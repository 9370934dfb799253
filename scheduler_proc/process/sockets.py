"""The ZeroMQ transport of the scheduler process: its sockets and the poller that the loop sleeps on."""

import fcntl
import os
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import zmq

from quire.protocol.config import EngineConfig
from quire.protocol.model.checkpoint_digest import begin_digest
from quire.protocol.nodes import NodeLinkKeys, read_links
from quire.protocol.process.log import event_logger
from quire.protocol.wire.channel import Link
from quire.protocol.wire.curve_keys import CurveEnd, PeerContext
from quire.protocol.wire.front_end_messages import FrontEndToScheduler
from quire.protocol.wire.transfer_messages import HostPages
from quire.protocol.wire.worker_messages import WorkerToScheduler
from quire.protocol.wire.zmq_channel import Waiter, ZmqChannel, ZmqHub, frontend_address, worker_address
from quire.scheduler_proc.process.disk_folder import DiskFolder
from quire.scheduler_proc.process.kv_event_feeds import KVEventFeeds, open_feeds
from quire.scheduler_proc.process.worker_group import WorkerGroup

log = event_logger("scheduler")

RECLAIM_S = 1.0
"""Interval at which the files of the bound sockets are checked."""


class SocketFile:
    """The file of a bound ``ipc://`` socket, which another process may remove or replace.

    Keeps the file open, because its inode number would otherwise be that of the next file that is made: one that takes
    its place could not be told from it. For the same reason the socket is bound under another name, which nothing else
    uses, and the file renamed once it is open.
    """

    def __init__(self, socket: "zmq.Socket[Any]", address: str) -> None:
        """``socket`` is bound to ``unnamed(address)``; from now on it is reached at ``address``."""
        self._socket, self._address = socket, address
        self._hold()

    @staticmethod
    def unnamed(address: str) -> str:
        return f"{address}~"

    def reclaim(self) -> None:
        """Bind again if the file is no longer the socket's own. Its connections are not affected."""
        with suppress(OSError):
            if self._file is not None and os.path.samestat(_path(self._address).lstat(), os.fstat(self._file)):
                return
        try:
            self._socket.bind(self.unnamed(self._address))
        except zmq.ZMQError:  # the directory was removed, because the engine stops
            return
        self._close()
        self._hold()
        log.warning("socket file was replaced or removed; the socket was bound once more", address=self._address)

    def _hold(self) -> None:
        self._file: int | None = None
        self._close: Callable[[], object] = lambda: None
        bound = _path(self.unnamed(self._address))
        with suppress(OSError):  # it was removed at once
            self._file = os.open(bound, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
            self._close = weakref.finalize(self, os.close, self._file)
            bound.replace(_path(self._address))


def _path(address: str) -> Path:
    return Path(address.removeprefix("ipc://"))


class Sockets:
    """Implements ``transport.Transport``. Owns the ZeroMQ context and every socket in it."""

    def __init__(
        self, directory: Path, incarnation: int, num_ranks: int, uses_nodes: bool = False, weights_path: str = ""
    ) -> None:
        """
        Args:
            incarnation: the scheduler incarnation, which is part of the path that front ends connect to.
            uses_nodes: the workers are on nodes, and the supervisor has written the links of each epoch.
            weights_path: the checkpoint on this machine, which nodes must have, too.
        """
        self._context: zmq.Context[Any] = zmq.Context()
        self._directory, self._incarnation = directory, incarnation
        self._num_ranks = num_ranks
        self._waiter = Waiter()
        address = frontend_address(directory, incarnation)
        self.hub = ZmqHub(self._context, SocketFile.unnamed(address), FrontEndToScheduler)
        self._waiter.add(self.hub.socket)
        self._channels: dict[WorkerGroup, list[ZmqChannel]] = {}
        self._files = {self.hub.socket: SocketFile(self.hub.socket, address)}
        self._reclaim_at = 0.0
        self._nodes = PeerContext() if uses_nodes else None
        self._checkpoint = begin_digest(Path(weights_path)) if uses_nodes and weights_path else None

    def open_group(self, worker_epoch: int) -> WorkerGroup:
        if self._nodes is None:
            channels = [self._open_local(worker_epoch, rank) for rank in range(self._num_ranks)]
        else:
            links = read_links(self._directory, worker_epoch)
            channels = [self._open_remote(self._nodes, worker_epoch, *each) for each in enumerate(links)]
        for channel in channels:
            self._waiter.add(channel.socket)
        group = WorkerGroup(channels, worker_epoch, self._checkpoint)
        self._channels[group] = channels
        return group

    def _open_local(self, worker_epoch: int, rank: int) -> ZmqChannel:
        address = worker_address(self._directory, worker_epoch, rank)
        # Each epoch has sockets of its own, and the epoch is in each frame: either alone would keep late messages out,
        # and a bug in one is caught by the other.
        unnamed = SocketFile.unnamed(address)
        channel = ZmqChannel(self._context, zmq.PAIR, unnamed, Link(WorkerToScheduler, worker_epoch), bind=True)
        self._files[channel.socket] = SocketFile(channel.socket, address)
        return channel

    @staticmethod
    def _open_remote(nodes: PeerContext, worker_epoch: int, rank: int, link: NodeLinkKeys) -> ZmqChannel:
        """Bind the socket of a worker on a node. Raises EngineError if the address cannot be bound."""
        keys = CurveEnd(link.public_key, link.secret_key, link.worker_key)
        secure = partial(nodes.bind_with, name=f"worker-{rank}", keys=keys)
        numbers = Link(WorkerToScheduler, worker_epoch)
        return ZmqChannel(nodes.context, zmq.PAIR, link.address, numbers, bind=True, secure=secure)

    def close_group(self, group: WorkerGroup) -> None:
        for channel in self._channels.pop(group):
            self._waiter.remove(channel.socket)
            self._files.pop(channel.socket, None)
        group.close()

    def add(self, source: Any) -> None:
        self._waiter.add(source)

    def wait(self, milliseconds: int) -> bool:
        if time.monotonic() >= self._reclaim_at:
            self._reclaim_at = time.monotonic() + RECLAIM_S
            for file in self._files.values():
                file.reclaim()
        return self._waiter.wait(milliseconds)

    def open_kv_events(self, config: EngineConfig) -> KVEventFeeds:
        feeds = open_feeds(self._context, config, self._directory, self._incarnation)
        for socket in feeds.replay_sockets:
            self._waiter.add(socket)
        return feeds

    def make_host_memory(self, num_pages: int, page_bytes: Sequence[int]) -> list[HostPages]:
        """Make an anonymous file per rank. A page of it takes memory when it is first written."""
        made = []
        for rank, size in enumerate(page_bytes):
            # An anonymous file and not shared memory by name: it ends with the last process that has it, so that no
            # start has to clean up after a kill.
            descriptor = os.memfd_create(f"quire-pages-{rank}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(descriptor, num_pages * size)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)  # a truncated page would end its reader
            made.append(HostPages(f"/proc/{os.getpid()}/fd/{descriptor}", num_pages, size))
        return made

    def find_page_files(self, config: EngineConfig, *, is_restart: bool) -> DiskFolder:
        return DiskFolder(config, is_restart=is_restart)

    def close(self) -> None:
        for group in list(self._channels):
            self.close_group(group)
        self.hub.close()
        self._context.term()
        if self._nodes is not None:
            self._nodes.close()
