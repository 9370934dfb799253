"""The endpoints at which an engine publishes KV cache events: the server's router, and subscribers of the user."""

import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

from quire.protocol.config import EngineConfig
from quire.protocol.model.kv_layout import KVLayout
from quire.protocol.wire.kv_events import KVEventBatch
from quire.protocol.wire.zmq_channel import kv_events_address
from quire.scheduler_proc.kv.events import DescribingRecorder, KVEventRecorder
from quire.scheduler_proc.process.kv_event_publisher import KVEventPublisher
from quire.scheduler_proc.process.vllm_kv_events import VllmEncoder, VllmPublisher


class KVEventFeeds:
    """Records the changes of the prefix cache and publishes them at every endpoint. Never blocks.

    Owns the publishers. A batch is encoded once in each format, and the publishers of a format keep the same bytes.
    """

    def __init__(
        self,
        publishers: Sequence[KVEventPublisher],
        incarnation: int = 0,
        rank: int = 0,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """
        Args:
            incarnation: that of all ``publishers`` of Quire's format.
            rank: number of this engine among those of the server.
            wall: the time in seconds since 1970, of which vLLM's batches have the time.
        """
        self._publishers = publishers
        self._plain = [each for each in publishers if not isinstance(each, VllmPublisher)]
        self._vllm = [each for each in publishers if isinstance(each, VllmPublisher)]
        self._incarnation, self._wall = incarnation, wall
        self._recorder: KVEventRecorder | None = None
        self._encoder, self._vllm_encoder = msgspec.msgpack.Encoder(), VllmEncoder(rank)

    @property
    def replay_sockets(self) -> "list[zmq.Socket[Any]]":
        """The sockets to poll: when one is readable, call ``answer``."""
        return [each.replay_socket for each in self._publishers if each.replay_socket is not None]

    def remaining(self) -> float | None:
        """Return 0 if ``answer`` has more to send, and None if it waits for a request."""
        return 0.0 if any(each.is_answering for each in self._publishers) else None

    def record(self, layout: KVLayout, hash_bytes: int) -> KVEventRecorder:
        """Return the recorder for a new pool, whose events are published."""
        self._recorder = (DescribingRecorder if self._vllm else KVEventRecorder)(layout, hash_bytes)
        self._recorder.cleared()
        return self._recorder

    def publish(self, now: float) -> None:
        """Publish the events since the last call, if any, as one batch."""
        events = [] if self._recorder is None else self._recorder.take()
        if events and self._plain:
            payload = self._encoder.encode(KVEventBatch(now, events, self._incarnation))
            for publisher in self._plain:
                publisher.publish(payload)
        if isinstance(self._recorder, DescribingRecorder):
            if events:
                payload = self._vllm_encoder.encode(self._wall(), events, self._recorder)
                for publisher in self._vllm:
                    publisher.publish(payload)
            self._recorder.forget()

    def answer(self) -> None:
        """Answer one replay request at each endpoint, if any."""
        for publisher in self._publishers:
            publisher.answer()

    def close(self) -> None:
        for publisher in self._publishers:
            publisher.close()


def open_feeds(
    context: "zmq.Context[Any]", config: EngineConfig, directory: Path, scheduler_incarnation: int
) -> KVEventFeeds:
    """Return the feeds of the configured endpoints. ``directory``: that of the engine's sockets.

    Raises:
        ConfigError: an endpoint is not allowed or cannot be bound.
    """
    incarnation, rank = secrets.randbits(64), config.data_parallel_rank
    publishers: list[KVEventPublisher] = []
    if config.feeds_router:
        addresses = kv_events_address(directory, scheduler_incarnation)
        publishers.append(KVEventPublisher(context, *addresses, incarnation))
    if config.kv_events_endpoint:
        endpoints = config.kv_events_endpoint, config.kv_events_replay_endpoint
        options: dict[str, Any] = {"curve_dir": config.kv_events_curve_dir, "is_open": config.kv_events_without_keys}
        if config.kv_events_format == "vllm":
            publishers.append(VllmPublisher(context, *endpoints, config.kv_events_topic, **options))
        else:
            publishers.append(KVEventPublisher(context, *endpoints, incarnation, **options))
    return KVEventFeeds(publishers, incarnation, rank)
