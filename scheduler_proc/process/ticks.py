"""The time as an event, for policies that depend on it."""

from typing import Any

from quire.protocol.wire.codec import Codec
from quire.scheduler_proc.requests.events import Clock, Consumed
from quire.scheduler_proc.scheduler import Scheduler
from quire.scheduler_proc.trace.journal import Journal

TICK_S = 0.05
"""Shortest time between two events."""


class Ticks:
    """Passes the time as an event, so that a replay decides with the same times. Without need for it, there is none."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._codec: Codec[Any] = Codec(Consumed)

    def turn(self, scheduler: Scheduler, now: float) -> None:
        """Consume ``Clock(now)`` if a policy uses the time and the last one is older than TICK_S."""
        scheduler.decisions.now = now
        if scheduler.programs.is_enabled and now - scheduler.programs.now >= TICK_S:
            event = Clock(now)
            scheduler.consume(event)
            self._journal.consumed(0, self._codec.encode(0, 0, event), event)
