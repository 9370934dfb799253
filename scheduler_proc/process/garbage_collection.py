"""When the garbage collector runs: never by itself, so that no step of a busy loop waits for a walk over everything."""

import gc
import time
from collections.abc import Callable

YOUNG_EVERY = 16
"""Steps and messages after which what they made is walked, and nothing else: some ten microseconds. Python's own count
of new objects will not do: where as many old ones go, it stays low while the young ones heap up."""

IDLE_SECONDS = 5.0


class Collector:
    """Owns the process' collector from ``start`` to ``stop``.

    The scheduler makes no cycles (a test says so): counting references frees all of it. What others' code may make is
    found while it is young, or else in the next idle moment.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._steps = 0
        self._messages = 0
        self._steps_collected = 0
        self._collected_at = float("-inf")

    def start(self) -> None:
        """What is there by now stays for ever, as far as collections are concerned: no later one walks it."""
        gc.collect()
        gc.freeze()
        gc.disable()

    def stop(self) -> None:
        """Back to Python's own ways."""
        gc.unfreeze()
        gc.enable()

    def after_step(self) -> None:
        self._steps += 1
        self.after_message()

    def after_message(self) -> None:
        """After whatever may have made something that stays: a thousand arrivals may come between two steps."""
        self._messages += 1
        if self._messages % YOUNG_EVERY == 0:
            gc.collect(0)

    def idle(self) -> None:
        """Nothing came for a while: the one chance for a full collection. Soon again, or without a step: not."""
        now = self._clock()
        if self._steps == self._steps_collected or now - self._collected_at < IDLE_SECONDS:
            return
        gc.collect()
        self._steps_collected, self._collected_at = self._steps, now
