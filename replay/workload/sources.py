"""Sources decide when calls arrive: at recorded times, or when other calls finish."""

import heapq
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from quire.replay.workload.workload import Call

NEVER = float("inf")


def source_of(calls: Sequence[Call], concurrency: int | None, closed_loop: bool) -> "Source":
    """Return the source for the flags; ``concurrency`` overrides ``closed_loop``."""
    if concurrency is not None:
        return Concurrency(calls, concurrency)
    return ClosedLoop(calls) if closed_loop else OpenLoop(calls)


class Source(Protocol):
    """Provides calls in order of arrival. The caller owns the clock: all times are its seconds."""

    def next_time(self) -> float:
        """Return when the next call arrives; NEVER if none arrives before another call finishes."""
        ...

    def take(self, now: float) -> list[Call]:
        """Return the calls that have arrived by ``now``, each once."""
        ...

    def ended(self, call: Call, now: float) -> None:
        """Note that ``call`` has finished or was rejected."""
        ...


class OpenLoop:
    """Every call arrives at its recorded time, regardless of the others."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls
        self._at = 0

    def next_time(self) -> float:
        return self._calls[self._at].arrival if self._at < len(self._calls) else NEVER

    def take(self, now: float) -> list[Call]:
        first = self._at
        while self._at < len(self._calls) and self._calls[self._at].arrival <= now:
            self._at += 1
        return list(self._calls[first : self._at])

    def ended(self, call: Call, now: float) -> None:
        pass


class Concurrency:
    """Keeps ``limit`` calls in flight, in order of arrival; arrival times are ignored."""

    def __init__(self, calls: Sequence[Call], limit: int) -> None:
        self._calls = deque(calls)
        self._room = limit
        self._now = 0.0

    def next_time(self) -> float:
        return self._now if self._calls and self._room else NEVER

    def take(self, now: float) -> list[Call]:
        taken = []
        while self._calls and self._room:
            taken.append(self._calls.popleft())
            self._room -= 1
        return taken

    def ended(self, call: Call, now: float) -> None:
        self._room += 1
        self._now = now


class ClosedLoop:
    """A call with ``after`` arrives ``pause`` seconds after that call finishes; the others at their recorded times.

    A call whose ``after`` is not among the calls also arrives at its recorded time.
    """

    def __init__(self, calls: Sequence[Call]) -> None:
        known = {call.number for call in calls}
        self._due: list[tuple[float, int, Call]] = []
        self._followers: dict[int, list[Call]] = {}
        for call in calls:
            if call.after is not None and call.after in known:
                self._followers.setdefault(call.after, []).append(call)
            else:
                self._due.append((call.arrival, call.number, call))
        heapq.heapify(self._due)

    def next_time(self) -> float:
        return self._due[0][0] if self._due else NEVER

    def take(self, now: float) -> list[Call]:
        taken = []
        while self._due and self._due[0][0] <= now:
            taken.append(heapq.heappop(self._due)[2])
        return taken

    def ended(self, call: Call, now: float) -> None:
        for follower in self._followers.pop(call.number, ()):
            heapq.heappush(self._due, (now + follower.pause, follower.number, follower))
