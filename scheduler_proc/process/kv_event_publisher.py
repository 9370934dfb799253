"""Publishes KV cache events: a PUB socket, and a ROUTER socket that resends missed batches. See docs/kv_events.md."""

from collections import deque
from pathlib import Path
from typing import Any, ClassVar

import zmq

from quire.protocol.errors import ConfigError
from quire.protocol.wire.connection_limit import ConnectionLimit
from quire.protocol.wire.curve_keys import CurveContext, load_curve_keys
from quire.protocol.wire.kv_events import END, GONE, MORE, TOPIC, check_endpoints, is_tcp
from quire.protocol.wire.zmq_channel import SLOW_PEER_LINGER_MS, ReplayRouter

KEPT_BATCHES = 10_000
KEPT_BYTES = 64 * 2**20

ANSWER_BATCHES = 32
ANSWER_BYTES = 256 * 2**10
"""Limits of one answer, apart from its first batch: the loop that answers also runs the engine."""

HIGH_WATER_MARK = 1000
"""Batches queued for a slow subscriber. Further ones are dropped, and the subscriber can request them again."""

MAX_REQUEST_BYTES = 1024
"""Most bytes of one received message: a topic, a sequence number, or the roughly 500 bytes of a key exchange."""

NUMBER_BYTES = 64
"""The same for a replay endpoint without keys."""


class KVEventPublisher:
    """Numbers, publishes and keeps batches of events at one endpoint. Never blocks.

    Owns both sockets. Invariant: the kept batches are the newest, without gaps, up to ``next_sequence``.

    ``envelope``: frames before the number in a replay request, and before the frames of each answer.
    """

    envelope: ClassVar[tuple[bytes, ...]] = ()

    def __init__(
        self,
        context: "zmq.Context[Any]",
        endpoint: str,
        replay_endpoint: str,
        incarnation: int,
        *,
        curve_dir: str = "",
        topic: bytes = TOPIC,
        is_open: bool = False,
        kept_batches: int = KEPT_BATCHES,
        kept_bytes: int = KEPT_BYTES,
    ) -> None:
        """
        Args:
            incarnation: a number below 2**64 that no earlier publisher at this endpoint had.
            curve_dir: key files for ``tcp://`` endpoints: the engine's pair, and the public keys of allowed routers.
            is_open: whether ``tcp://`` endpoints need no keys.

        Raises:
            ConfigError: an endpoint is not allowed or cannot be bound.
        """
        check_endpoints(endpoint, replay_endpoint, curve_dir, is_open=is_open)
        self._curve = CurveContext(load_curve_keys(Path(curve_dir))) if curve_dir else None
        self.next_sequence = 0
        self._incarnation, self._topic = incarnation, topic
        self._kept: deque[bytes] = deque()
        self._bytes = 0
        self._kept_batches, self._kept_bytes = kept_batches, kept_bytes
        self._replay: ReplayRouter | None = None
        self._limit: ConnectionLimit | None = None
        self._pub = self._context_for(endpoint, context).socket(zmq.PUB)
        self._pub.setsockopt(zmq.LINGER, SLOW_PEER_LINGER_MS)
        self._pub.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        # A subscriber sends subscriptions only. Without a limit a connection could make this process allocate what it
        # claims to send.
        self._pub.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        failed_endpoint = endpoint
        try:
            if is_tcp(endpoint):
                self._limit = ConnectionLimit(self._pub, endpoint)
            self._pub.bind(endpoint)
            if replay_endpoint:
                failed_endpoint = replay_endpoint
                max_bytes = MAX_REQUEST_BYTES if is_tcp(replay_endpoint) else NUMBER_BYTES
                replay_context = self._context_for(replay_endpoint, context)
                self._replay = ReplayRouter(replay_context, replay_endpoint, max_bytes, self.envelope)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                f"cannot publish KV events at {failed_endpoint}: {zmq.strerror(error.errno or 0)}"
            ) from None

    def _context_for(self, endpoint: str, context: "zmq.Context[Any]") -> "zmq.Context[Any]":
        """Return the context with keys for ``tcp://`` endpoints, if there are any."""
        return self._curve.context if self._curve is not None and is_tcp(endpoint) else context

    @property
    def replay_socket(self) -> "zmq.Socket[Any] | None":
        """The socket to poll: when it is readable, call ``answer``."""
        return None if self._replay is None else self._replay.socket

    @property
    def oldest_sequence(self) -> int:
        """The number of the oldest batch that is kept; ``next_sequence`` if none is."""
        return self.next_sequence - len(self._kept)

    @property
    def is_answering(self) -> bool:
        """Whether ``answer`` has more to send."""
        return False

    def publish(self, payload: bytes) -> None:
        """Publish and keep the next batch, encoded."""
        self._pub.send_multipart([self._topic, _eight_bytes(self.next_sequence), payload], zmq.NOBLOCK)
        self.next_sequence += 1
        self._kept.append(payload)
        self._bytes += len(payload)
        while len(self._kept) > self._kept_batches or (self._bytes > self._kept_bytes and len(self._kept) > 1):
            self._bytes -= len(self._kept.popleft())

    def answer(self) -> None:
        """Answer one replay request, if any. A peer that does not read loses the rest and can request it again."""
        request = None if self._replay is None else self._replay.receive()
        if self._replay is None or request is None:
            return
        peer, start = request
        incarnation = _eight_bytes(self._incarnation)
        oldest = self.oldest_sequence
        if start < oldest:
            self._replay.send(peer, [GONE, _eight_bytes(oldest), incarnation])
            start = oldest
        room = ANSWER_BYTES
        sequence = min(start, self.next_sequence)
        while sequence < min(start + ANSWER_BATCHES, self.next_sequence) and room > 0:
            payload = self._kept[sequence - oldest]
            if not self._replay.send(peer, [TOPIC, _eight_bytes(sequence), payload]):
                return
            room -= len(payload)
            sequence += 1
        # An answer has a limit because the loop that sends it also schedules; the peer asks for the rest.
        last = END if sequence == self.next_sequence else MORE
        self._replay.send(peer, [last, _eight_bytes(sequence), incarnation])

    def close(self) -> None:
        if self._limit is not None:
            self._limit.close()
        self._pub.close()
        if self._replay is not None:
            self._replay.close()
        if self._curve is not None:
            self._curve.close()


def _eight_bytes(number: int) -> bytes:
    return number.to_bytes(8, "big")
