"""What each request's time went to, from its arrival to its end."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from itertools import accumulate

from quire.launch.replay.run.run_record import RequestRun

QUEUED, PREEMPTED, RUNNING = "queued", "preempted", "running"
PREFILL, DECODE = "prefill", "decode"
COMPUTING = (PREFILL, DECODE)


class QueueHead:
    """What the first of the queue waited for, over the time of a run: those behind it wait for the same."""

    def __init__(self, runs: Iterable[RequestRun]) -> None:
        told = sorted(
            (begin, end, what)
            for run in runs
            for begin, end, what in stretches(run)
            if what not in (QUEUED, PREEMPTED, *COMPUTING)
        )
        self._begins: list[float] = []
        self._ends: list[float] = []
        self._whats: list[str] = []
        for begin, end, what in told:
            begin = max(begin, self._ends[-1] if self._ends else begin)  # one is the first at a time
            if end > begin:
                self._begins.append(begin)
                self._ends.append(end)
                self._whats.append(what)
        self._before = {what: self._sums(what) for what in sorted(set(self._whats))}

    def seconds(self, begin: float, end: float) -> dict[str, float]:
        """Of this time, how long it waited for each reason. O(reasons)."""
        first, last = bisect_right(self._begins, begin) - 1, bisect_right(self._begins, end) - 1
        found = {}
        for what, before in self._before.items():
            seconds = self._until(end, last, what, before) - self._until(begin, first, what, before)
            if seconds > 0:
                found[what] = seconds
        return found

    def _sums(self, what: str) -> list[float]:
        """Of ``what``, before each stretch."""
        pairs = zip(self._begins, self._ends, self._whats, strict=True)
        return list(accumulate((end - begin if which == what else 0.0 for begin, end, which in pairs), initial=0.0))

    def _until(self, time: float, at: int, what: str, before: list[float]) -> float:
        """``at``: the last stretch that begins by ``time``; -1: none does."""
        if at < 0:
            return 0.0
        part = min(time, self._ends[at]) - self._begins[at] if self._whats[at] == what else 0.0
        return before[at] + part


def life(run: RequestRun, head: QueueHead | None = None) -> dict[str, float]:
    """Seconds from arrival to end, by what they went to; a request that ended well. They add up to all of it.

    ``head``: tells what the others before it in the queue waited for.
    """
    spent: dict[str, float] = defaultdict(float)
    for begin, end, what in stretches(run):
        spent[what] += end - begin
        if head is not None and what == QUEUED:
            for reason, seconds in head.seconds(begin, end).items():
                spent[f"{QUEUED} ({reason})"] += seconds
                spent[QUEUED] -= seconds
    return {what: seconds for what, seconds in spent.items() if abs(seconds) > 1e-9}


def stretches(run: RequestRun) -> list[tuple[float, float, str]]:
    """(begin, end, what) of all that it did from arrival to end: waiting for a reason, prefill, decode."""
    found: list[tuple[float, float, str]] = []
    at, what, waits = run.arrival, QUEUED, True

    def go_on(time: float, following: str) -> None:
        nonlocal at, what
        if time > at:
            found.append((at, time, what))
        at, what = max(at, time), following

    turns = [(moment.time, moment.what, moment.reason) for moment in run.moments]
    turns += [(run.scheduled, "resume", "")] if run.scheduled >= 0 else []
    turns.sort(key=lambda turn: turn[0])  # stable: at one time as they were told
    for time, kind, reason in turns:
        if kind == "preempt":
            go_on(time, PREEMPTED)
            waits = True
        elif kind == "resume":
            go_on(time, RUNNING)
            waits = False
        elif waits:
            go_on(time, reason)
    go_on(run.end, "")
    return [cut for stretch in found for cut in _cut(stretch, run.first_token)]


def _cut(stretch: tuple[float, float, str], first_token: float) -> list[tuple[float, float, str]]:
    """What ran is prefill up to the first token, and decode from then on."""
    begin, end, what = stretch
    if what != RUNNING:
        return [stretch]
    middle = min(max(first_token, begin), end)
    return [each for each in ((begin, middle, PREFILL), (middle, end, DECODE)) if each[1] > each[0]]
