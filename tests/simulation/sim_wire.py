"""Links that carry encoded frames with latency, damaged according to the scenario."""

import random
from collections import deque
from collections.abc import Callable
from typing import Any

from sim_events import Events

from quire.protocol.wire.channel import Frames, Link, Received

LATENCY_S = 0.002
HOLD_S = 0.4
"""Seconds for which a frame is held back so that the next one overtakes it."""
LAST_KEPT = 200
"""Frames of each direction that may be replayed."""


class Tamper:
    """Chooses which frames to damage. Owns the pending damage and earlier frames for replay."""

    def __init__(self, rng: random.Random, on_fault: Callable[[str], None]) -> None:
        """``on_fault`` is called with the kind of each damage done."""
        self.rng = rng
        self._on_fault = on_fault
        self._armed: dict[str, deque[str]] = {}
        self._seen: dict[str, deque[tuple[Wire, int, Frames]]] = {}

    def arm(self, direction: str, kind: str) -> None:
        self._armed.setdefault(direction, deque()).append(kind)

    def forget(self) -> None:
        """Drop all pending damage."""
        self._armed.clear()

    def take(self, direction: str) -> str:
        """Return the damage for the next frame of this direction, or an empty string."""
        armed = self._armed.get(direction)
        if not armed:
            return ""
        kind = armed.popleft()
        self._on_fault(f"{direction} {kind}")
        return kind

    def remember(self, wire: "Wire", direction: str, frames: Frames) -> None:
        self._seen.setdefault(direction, deque(maxlen=LAST_KEPT)).append((wire, wire.num_sent, frames))

    def old_frames(self, wire: "Wire", direction: str) -> Frames:
        """Return earlier frames, if possible of an earlier epoch with the expected sequence number, which is the
        hardest case.
        """
        seen = self._seen[direction]
        if direction not in ("to_worker", "from_worker"):  # frames of another connection cannot arrive on this one
            return self.rng.choice([frames for other, _, frames in seen if other is wire])
        same = [frames for other, number, frames in seen if other is not wire and number == wire.num_sent]
        return self.rng.choice(same or [frames for _, _, frames in seen])


class Wire:
    """One direction of one link, in order unless it is tampered with."""

    def __init__(self, events: Events, tamper: Tamper, direction: str, deliver: Callable[[Frames], None]) -> None:
        self._events, self._tamper = events, tamper
        self._direction = direction
        self._deliver = deliver
        self._free_at = 0.0
        self._held: Frames | None = None
        self.num_sent = 0
        self.closed = False

    def send(self, frames: Frames) -> None:
        frames = [bytes(frame) for frame in frames]
        self.num_sent += 1
        self._tamper.remember(self, self._direction, frames)
        kind, rng = self._tamper.take(self._direction), self._tamper.rng
        held, self._held = self._held, None
        match kind:
            case "drop":
                pass
            case "double":
                self._put(frames)
                self._put(frames)
            case "delay":
                self._put(frames, rng.uniform(0.1, 3.0))
            case "reorder":
                self._held = frames
                self._events.after(HOLD_S, self._release_held)
            case "truncate":
                self._put(_truncated(frames, rng))
            case "flip":
                self._put(_flipped(frames, rng))
            case "replay":
                self._put(self._tamper.old_frames(self, self._direction))
                self._put(frames)
            case _:
                self._put(frames)
        if held is not None:
            self._put(held)

    def _release_held(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            self._put(held)

    def _put(self, frames: Frames, late: float = 0.0) -> None:
        self._free_at = max(self._free_at, self._events.now + LATENCY_S + late)
        self._events.after(self._free_at - self._events.now, lambda: self._arrive(frames))

    def _arrive(self, frames: Frames) -> None:
        if not self.closed:
            self._deliver(frames)


def _truncated(frames: Frames, rng: random.Random) -> Frames:
    if len(frames) > 1 and rng.random() < 0.5:
        return frames[:-1]
    return [*frames[:-1], frames[-1][: rng.randrange(len(frames[-1]))]]


def _flipped(frames: Frames, rng: random.Random) -> Frames:
    at = rng.randrange(len(frames))
    damaged = bytearray(frames[at])
    if damaged:
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
    return [*frames[:at], bytes(damaged), *frames[at + 1 :]]


class WireChannel:
    """``protocol.wire.channel.Channel`` over two wires; ``on_arrival`` is called when a message can be received."""

    def __init__(self, link: Link, on_arrival: Callable[[], None]) -> None:
        self.link = link
        self.out: Wire | None = None
        self._inbox: deque[Frames] = deque()
        self._on_arrival = on_arrival
        self._closed = False

    def arrive(self, frames: Frames) -> None:
        if not self._closed:
            self._inbox.append(frames)
            self._on_arrival()

    def send(self, message: Any) -> Frames:
        frames = self.link.outgoing(message)
        assert self.out is not None
        self.out.send(frames)
        return frames

    def receive(self, timeout: float | None = 0.0) -> Received | None:
        return self.link.incoming(self._inbox.popleft()) if self._inbox else None

    def close(self) -> None:
        self._closed = True
        self._inbox.clear()
