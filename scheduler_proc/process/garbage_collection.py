"""Controls when Python's garbage collector and other maintenance run, so that no step waits for them."""

import gc
import time
from collections.abc import Callable

YOUNG_EVERY = 16
"""Messages after which the youngest generation is collected, which takes some ten microseconds.

Python's own trigger counts allocations minus deallocations. That number stays low while a busy engine frees as many old
objects as it makes new ones.
"""

IDLE_SECONDS = 1.0
"""Seconds without a step after which there is maintenance, and between two times. Not a silent socket: workers send
heartbeats while they have no step."""
FULL_EVERY_SECONDS = 5.0


class Collector:
    """Owns the garbage collector of the process from ``start`` to ``stop``.

    The scheduler makes no reference cycles (a test checks this), so reference counting frees all of its objects. Cycles
    made by libraries are collected while young, or in the next idle moment.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, maintain: Callable[[], None] | None = None) -> None:
        """``maintain``: called while no step is decided."""
        self._clock, self._maintain = clock, maintain or (lambda: None)
        self._due = float("-inf")
        self._steps = 0
        self._messages = 0
        self._steps_collected = 0
        self._collected_at = float("-inf")

    def start(self) -> None:
        """Disable automatic collection, and exclude all existing objects from collections."""
        gc.collect()
        # Frozen objects are never traversed again, so that the cost of a full collection follows what the engine has
        # made, and not the libraries that it has loaded.
        gc.freeze()
        gc.disable()

    def stop(self) -> None:
        """Restore Python's defaults."""
        gc.unfreeze()
        gc.enable()

    def after_step(self) -> None:
        self._steps += 1
        self._due = self._clock() + IDLE_SECONDS
        self.after_message()

    def after_message(self) -> None:
        """Count an event that may have made long-lived objects. A thousand arrivals can come between two steps."""
        self._messages += 1
        if self._messages % YOUNG_EVERY == 0:
            gc.collect(0)

    def turn(self) -> None:
        """Call often. Without a step for a while, do maintenance, and a full collection if steps ran since the last."""
        now = self._clock()
        if now < self._due:
            return
        self._due = now + IDLE_SECONDS
        self._maintain()
        if self._steps == self._steps_collected or now - self._collected_at < FULL_EVERY_SECONDS:
            return
        gc.collect()
        self._steps_collected, self._collected_at = self._steps, now
