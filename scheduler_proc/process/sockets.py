"""The ZeroMQ transport of the scheduler process: its sockets and the poller that the loop sleeps on."""

import secrets
from pathlib import Path
from typing import Any

import zmq

from quire.protocol.config import EngineConfig
from quire.protocol.wire.channel import Link
from quire.protocol.wire.front_end_messages import FrontEndToScheduler
from quire.protocol.wire.worker_messages import WorkerToScheduler
from quire.protocol.wire.zmq_channel import Waiter, ZmqChannel, ZmqHub, frontend_address, worker_address
from quire.scheduler_proc.process.kv_event_publisher import KVEventPublisher
from quire.scheduler_proc.process.worker_group import WorkerGroup


class Sockets:
    """Implements ``transport.Transport``. Owns the ZeroMQ context and every socket in it."""

    def __init__(self, directory: Path, incarnation: int, num_ranks: int) -> None:
        """``incarnation``: the scheduler incarnation, which is part of the path that front ends connect to."""
        self._context: zmq.Context[Any] = zmq.Context()
        self._directory = directory
        self._num_ranks = num_ranks
        self._waiter = Waiter()
        self.hub = ZmqHub(self._context, frontend_address(directory, incarnation), FrontEndToScheduler)
        self._waiter.add(self.hub.socket)
        self._channels: dict[WorkerGroup, list[ZmqChannel]] = {}

    def open_group(self, worker_epoch: int) -> WorkerGroup:
        channels = []
        for rank in range(self._num_ranks):
            address = worker_address(self._directory, worker_epoch, rank)
            channel = ZmqChannel(self._context, zmq.PAIR, address, Link(WorkerToScheduler, worker_epoch), bind=True)
            self._waiter.add(channel.socket)
            channels.append(channel)
        group = WorkerGroup(channels, worker_epoch)
        self._channels[group] = channels
        return group

    def close_group(self, group: WorkerGroup) -> None:
        for channel in self._channels.pop(group):
            self._waiter.remove(channel.socket)
        group.close()

    def add(self, source: Any) -> None:
        self._waiter.add(source)

    def wait(self, milliseconds: int) -> bool:
        return self._waiter.wait(milliseconds)

    def open_kv_events(self, config: EngineConfig) -> KVEventPublisher:
        publisher = KVEventPublisher(
            self._context,
            config.kv_events_endpoint,
            config.kv_events_replay_endpoint,
            secrets.randbits(64),
            curve_dir=config.kv_events_curve_dir,
        )
        if publisher.replay_socket is not None:
            self._waiter.add(publisher.replay_socket)
        return publisher

    def close(self) -> None:
        for group in list(self._channels):
            self.close_group(group)
        self.hub.close()
        self._context.term()
