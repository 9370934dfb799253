"""What a request did from its arrival to its end: states without gaps, and the reasons why it waited."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from quire.launch.replay.run.run_record import RequestRun

QUEUED, PREFILL, DECODE, PREEMPTED = "queued", "prefill", "decode", "preempted"
STATES = (QUEUED, PREFILL, DECODE, PREEMPTED)
"""prefill: admitted, no token yet. decode: from the first token on, including what is recomputed after a preemption.
preempted: until the request is admitted again."""
COMPUTING = (PREFILL, DECODE)


class Stretch(NamedTuple):
    """A state from ``begin`` to ``end``, in seconds on the run's clock.

    Attributes:
        reason: of a preemption. ``other``: the request that got the blocks.
    """

    state: str
    begin: float
    end: float
    reason: str = ""
    other: str = ""


def run_end(requests: Sequence[RequestRun], step_ends: Iterable[float]) -> float:
    """The latest time in the record, where requests that had not ended are cut."""
    times = [max(run.arrival, run.scheduled, run.first_token, run.end) for run in requests]
    return max([*times, *step_ends], default=0.0)


def stretches(run: RequestRun, cut: float) -> list[Stretch]:
    """In order of time, each beginning where the one before ended; none is empty. A rejected request has none.

    Args:
        cut: the end of a request that has not ended.
    """
    if run.finish == "rejected":
        return []
    end = run.end if run.end >= 0 else max(cut, run.arrival)
    made: list[Stretch] = []
    last = Stretch(QUEUED, run.arrival, end)
    for change in _changes(run):
        begin = min(max(change.begin, last.begin), end)
        if begin > last.begin:
            made.append(last._replace(end=begin))
        last = change._replace(begin=begin, end=end)
    return [*made, last] if end > last.begin else made


def _changes(run: RequestRun) -> list[Stretch]:
    """The state from each change on. A token in flight that arrives while its request is preempted changes nothing."""
    turns = [(run.scheduled, PREFILL, "", "")] if run.scheduled >= 0 else []
    turns += [(run.first_token, DECODE, "", "")] if run.first_token >= 0 else []
    turns += [(each.time, each.what, each.reason, each.other) for each in run.moments if each.what != "wait"]
    changes = []
    preempted = False
    for time, what, reason, other in sorted(turns, key=lambda turn: turn[0]):
        if what == "preempt":
            preempted = True
            changes.append(Stretch(PREEMPTED, time, time, reason, other))
        elif what == "resume":
            preempted = False
            changes.append(Stretch(DECODE if 0 <= run.first_token <= time else PREFILL, time, time))
        elif not preempted:
            changes.append(Stretch(what, time, time))
    return changes


def stretches_by_reason(run: RequestRun) -> list[tuple[float, float, str]]:
    """(begin, end, what) without gaps; ``what`` is the reason to wait as soon as it is known, else the state."""
    last = max((moment.time for moment in run.moments), default=run.arrival)
    waits = [(moment.time, moment.reason) for moment in run.moments if moment.what == "wait"]
    found = []
    for state, begin, end, *_ in stretches(run, max(last, run.scheduled)):
        turns = [(begin, state), *(wait for wait in waits if state not in COMPUTING and begin <= wait[0] < end)]
        ends = [time for time, _ in turns[1:]] + [end]
        found += [(time, until, what) for (time, what), until in zip(turns, ends, strict=True) if until > time]
    return found


class QueueHead:
    """What the first of the queue waited for, over the time of a run: those behind it wait for the same."""

    def __init__(self, runs: Iterable[RequestRun]) -> None:
        told = sorted(stretch for run in runs for stretch in stretches_by_reason(run) if stretch[2] not in STATES)
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
    """Return the seconds of a request that ended well, by reason or state. They add up to its end-to-end latency.

    Args:
        head: what the requests before it in the queue waited for.
    """
    spent: dict[str, float] = defaultdict(float)
    for begin, end, what in stretches_by_reason(run):
        spent[what] += end - begin
        if head is not None and what == QUEUED:
            for reason, seconds in head.seconds(begin, end).items():
                spent[f"{QUEUED} ({reason})"] += seconds
                spent[QUEUED] -= seconds
    return {what: seconds for what, seconds in spent.items() if abs(seconds) > 1e-9}
