"""Follows the KV cache events of one engine, as docs/kv_events.md describes: no gap stays open. No I/O."""

from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from quire.protocol.model.kv_layout import KVLayout
from quire.protocol.wire.kv_events import (
    END,
    GONE,
    MORE,
    TOPIC,
    AllBlocksCleared,
    KVEvent,
    KVEventBatch,
)
from quire.router_proc.core.events import CacheChanged, CacheForgotten
from quire.router_proc.core.index import MEDIA, counted_group

ANSWER_TIMEOUT_S = 3.0
"""Seconds without a message of an answer after which it is requested once more: the engine loads, or lost it."""
MAX_QUEUED_BYTES = 32 * 2**20
"""Size of live messages that are kept while missing ones arrive. Further ones are dropped, and requested later."""
MAX_FUTILE = 3
"""Answers without a new batch after which the missing one is not expected any more."""
BACKOFF_S = (1.0, 5.0, 15.0, 60.0)
"""Seconds without events after each damaged message, and after the last of them the engine is not indexed."""
FORGIVEN_S = 600.0
"""Seconds without damage after which earlier damage no longer counts."""

Frames = Sequence[bytes]


class Damaged(Exception):
    """A message that no intact engine sends; the text says what is wrong with it."""


class Follower:
    """State of one subscription: which message is next, and whether missing ones are being requested.

    It gives the Router a CacheChanged for each batch, in order and without gaps, and a CacheForgotten before it starts
    from the first or the oldest batch. After damage it drops everything and starts from the first batch a while later;
    after repeated damage it gives up, and the engine is routed to by its load.

    Attributes:
        num_gaps: times that messages were missing.
        num_damaged: times that a message was damaged.
        not_indexed: why the engine is not indexed now, or "".
    """

    def __init__(
        self,
        engine: int,
        layout: KVLayout,
        hash_bytes: int,
        consume: Callable[[CacheChanged | CacheForgotten], None],
        request: Callable[[int], None],
    ) -> None:
        """
        Args:
            layout: with the block size that the engine uses.
            hash_bytes: length of its block hashes.
            consume: takes the events for the Router.
            request: sends a sequence number to the replay endpoint.
        """
        self._engine = engine
        self._group = counted_group(layout)
        self._block_sizes = [group.block_size for group in layout.groups]
        self._hash_bytes = hash_bytes
        self._consume = consume
        self._request = request
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self._incarnation: int | None = None
        self._next = 0
        self._is_replaying = False
        self._asked = -1
        """The batch that was requested last. Late answers to repeated requests do not request it once more."""
        self._num_futile = 0
        """Requests for a missing batch, and answers that ended early, since the last batch that was applied."""
        self._has_ended_early = False
        """Whether an answer since the last request ended before the requested batch."""
        self._due = 0.0
        """When to request once more, while replaying; when to start over, after damage."""
        self._live: deque[Frames] = deque()
        self._num_queued_bytes = 0
        self._has_dropped = False
        """Whether a live message was not queued, so that another request must follow the present one."""
        self._damaged_at: list[float] = []
        self.num_gaps = 0
        self.num_damaged = 0
        self.not_indexed = ""
        self._is_waiting = True
        """Whether it waits until ``_due``, and ignores messages until then."""

    @property
    def has_given_up(self) -> bool:
        return len(self._damaged_at) > len(BACKOFF_S)

    def tick(self, now: float) -> None:
        """Call about once a second, and first of all: requests what is due."""
        if self.has_given_up or now < self._due:
            return
        if self._is_waiting:
            self._is_waiting, self.not_indexed = False, ""
            self._start_over(now)
        elif self._is_replaying:
            self._ask(now)

    def published(self, frames: Frames, now: float) -> None:
        """Process a message of the PUB socket."""
        if self._is_waiting:
            return
        if self._is_replaying:
            self._queue(frames)
            return
        self._guarded(self._live_message, frames, now)

    def answered(self, frames: Frames, now: float) -> None:
        """Process a message of the replay socket."""
        if not self._is_waiting:
            self._guarded(self._answer, frames, now)

    def distrust(self, reason: str, now: float) -> None:
        """Drop the engine's contents, and start over after a while; after repeated damage, never."""
        self.num_damaged += 1
        self._damaged_at = [at for at in self._damaged_at if at > now - FORGIVEN_S]
        self._damaged_at.append(now)
        # An engine with a bug would otherwise make the router read its whole cache again every second. Without an index
        # it is still routed to, by its load.
        self._due = now + BACKOFF_S[min(len(self._damaged_at), len(BACKOFF_S)) - 1]
        self._is_waiting, self._is_replaying = True, False
        self._drop_queue()
        self.not_indexed = reason
        self._consume(CacheForgotten(self._engine))

    # ---- messages

    def _guarded(self, process: Callable[[Frames, float], None], frames: Frames, now: float) -> None:
        try:
            process(frames, now)
        except Damaged as damage:
            self.distrust(str(damage), now)

    def _live_message(self, frames: Frames, now: float) -> None:
        kind, sequence, payload = _split(frames)
        if kind != TOPIC:
            raise Damaged(f"topic {kind[:16]!r} instead of {TOPIC!r}")
        batch = self._decode(payload)
        # Numbers begin anew with each publisher. Without the incarnation, batch 7 of a new engine could follow batch 6
        # of an old one.
        if batch.incarnation != self._incarnation:
            self._start_over(now)  # the engine was restarted
        elif sequence == self._next:  # an earlier one was applied
            self._apply(batch)
        elif sequence > self._next:
            self.num_gaps += 1
            self._queue(frames)
            self._ask_for_missing(now)

    def _answer(self, frames: Frames, now: float) -> None:
        kind, sequence, payload = _split(frames)
        if not self._is_replaying:  # of an answer that was requested twice; the other one has ended
            if kind == TOPIC and sequence == self._next:
                self._live_message(frames, now)
            return
        self._due = now + ANSWER_TIMEOUT_S
        if kind == TOPIC:
            self._replayed(sequence, payload, now)
            return
        if kind not in (GONE, MORE, END) or len(payload) != 8:
            raise Damaged(f"replay message {kind[:16]!r} with {len(payload)} bytes")
        if not self._is_of_incarnation(int.from_bytes(payload, "big")):
            self._start_over(now)
        elif kind == GONE:
            if sequence > self._next:
                self._next = sequence
                self._consume(CacheForgotten(self._engine))
        elif kind == MORE:
            if sequence == self._next != self._asked:
                self._ask(now)
        else:
            self._ended(sequence, now)

    def _ended(self, sequence: int, now: float) -> None:
        """Process the end of an answer, which has all batches before ``sequence``."""
        if sequence < self._next:  # of an answer that was requested earlier, or the engine denies its own batches
            # Answers to a request that was repeated after a time limit may both arrive, so one early end is no sign of
            # damage; an engine that keeps denying its own batches is.
            if not self._has_ended_early:
                self._has_ended_early = True
                self._count_futile()
        elif sequence == self._next:
            self._catch_up(now)
        else:
            self._ask_for_missing(now)  # some of its messages were lost

    def _replayed(self, sequence: int, payload: bytes, now: float) -> None:
        batch = self._decode(payload)
        if not self._is_of_incarnation(batch.incarnation):
            self._start_over(now)
        elif sequence == self._next:
            self._apply(batch)

    def _catch_up(self, now: float) -> None:
        """Apply the messages that were published in the meantime."""
        self._is_replaying = False
        # Taken out before they are applied, because applying one may find the next gap and begin to queue again.
        live, had_all = self._live, not self._has_dropped
        self._drop_queue()
        while live and not self._is_replaying:
            self._live_message(live.popleft(), now)
        for frames in live:  # what follows another gap
            self._queue(frames)
        if not had_all and not self._is_replaying:
            self._ask(now)

    def _queue(self, frames: Frames) -> None:
        size = sum(map(len, frames))
        # Later messages are dropped and not earlier ones: the earliest are needed first, and the engine keeps the
        # newest for a replay.
        if self._num_queued_bytes + size > MAX_QUEUED_BYTES:
            self._has_dropped = True
            return
        self._live.append(frames)
        self._num_queued_bytes += size

    def _drop_queue(self) -> None:
        self._live, self._num_queued_bytes, self._has_dropped = deque(), 0, False

    def _is_of_incarnation(self, incarnation: int) -> bool:
        if self._incarnation is None:
            self._incarnation = incarnation
        return incarnation == self._incarnation

    def _start_over(self, now: float) -> None:
        self._incarnation, self._next, self._num_futile = None, 0, 0
        self._drop_queue()
        self._consume(CacheForgotten(self._engine))
        self._ask(now)

    def _ask_for_missing(self, now: float) -> None:
        """Request the next batch, which exists, because a later one does."""
        self._count_futile()
        self._ask(now)

    def _count_futile(self) -> None:
        self._num_futile += 1
        if self._num_futile > MAX_FUTILE:
            raise Damaged(f"batch {self._next} is missing in {MAX_FUTILE} answers, although later ones exist")

    def _ask(self, now: float) -> None:
        self._is_replaying, self._has_ended_early = True, False
        self._due = now + ANSWER_TIMEOUT_S
        self._asked = self._next
        self._request(self._next)

    # ---- batches

    def _decode(self, payload: bytes) -> KVEventBatch:
        try:
            return self._decoder.decode(payload)
        except (msgspec.MsgspecError, RecursionError, ValueError) as error:
            raise Damaged(f"batch {self._next} is damaged: {error}") from None

    def _apply(self, batch: KVEventBatch) -> None:
        self._next += 1
        self._num_futile = 0
        if events := self._counted(batch.events):
            self._consume(CacheChanged(self._engine, events))

    def _counted(self, events: list[KVEvent]) -> list[KVEvent]:
        """Return the events of the counted group. Raises Damaged unless all of them can be true."""
        counted: list[KVEvent] = []
        for event in events:
            # All events of a batch are checked before the first is used. The index has no way back, and a part of a
            # false batch would stay in it.
            if event.medium not in MEDIA and not (isinstance(event, AllBlocksCleared) and not event.medium):
                raise Damaged(f"batch {self._next - 1} has medium {event.medium[:16]!r}: it must be {', '.join(MEDIA)}")
            if isinstance(event, AllBlocksCleared):
                counted.append(event)
                continue
            if set(map(len, event.hashes)) - {self._hash_bytes}:
                raise Damaged(f"batch {self._next - 1} has a hash that is not of {self._hash_bytes} bytes")
            if not 0 <= event.group < len(self._block_sizes):
                groups = len(self._block_sizes)
                raise Damaged(f"batch {self._next - 1} has group {event.group}: it must be below {groups}")
            size = getattr(event, "block_size", self._block_sizes[event.group])
            if size != self._block_sizes[event.group]:
                raise Damaged(f"batch {self._next - 1} has blocks of {size} tokens in group {event.group}")
            if event.group == self._group:
                counted.append(event)
        return counted


def _split(frames: Frames) -> tuple[bytes, int, bytes]:
    """Return kind, sequence number and payload."""
    if len(frames) != 3 or len(frames[1]) != 8:
        raise Damaged(f"a message has frames of {', '.join(str(len(frame)) for frame in frames[:8])} bytes")
    return frames[0], int.from_bytes(frames[1], "big"), frames[2]
