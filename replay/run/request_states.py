"""The states of a request from arrival to end, without gaps, and the reasons why it waited."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from quire.replay.run.run_record import RequestRun
from quire.scheduler_proc.requests.reasons import HOLD_REASONS, WaitReason

QUEUED, PREFILL, DECODE, PREEMPTED = "queued", "prefill", "decode", "preempted"
STATES = (QUEUED, PREFILL, DECODE, PREEMPTED)
"""queued: until the first admission. prefill: from there to the first token. decode: from the first token on, including
recomputation after a preemption. preempted: until the request is admitted again."""
COMPUTING = (PREFILL, DECODE)


class StateInterval(NamedTuple):
    """A state from ``begin`` to ``end``, in seconds on the run's clock.

    Attributes:
        reason: why the request was preempted.
        other: the request that got the blocks of a preempted one.
    """

    state: str
    begin: float
    end: float
    reason: str = ""
    other: str = ""


def run_end(requests: Sequence[RequestRun], step_ends: Iterable[float]) -> float:
    """Return the latest time in the record: unfinished requests end there."""
    times = [max(run.arrival, run.scheduled, run.first_token, run.end) for run in requests]
    return max([*times, *step_ends], default=0.0)


def state_intervals(run: RequestRun, cut: float) -> list[StateInterval]:
    """Return the request's intervals in order of time, without gaps or empty ones; none for a rejected request.

    Args:
        cut: the end to use for an unfinished request.
    """
    if run.finish == "rejected":
        return []
    end = run.end if run.end >= 0 else max(cut, run.arrival)
    made: list[StateInterval] = []
    last = StateInterval(QUEUED, run.arrival, end)
    for change in _changes(run):
        begin = min(max(change.begin, last.begin), end)
        if begin > last.begin:
            made.append(last._replace(end=begin))
        last = change._replace(begin=begin, end=end)
    return [*made, last] if end > last.begin else made


def _changes(run: RequestRun) -> list[StateInterval]:
    """Return each change of state. A first token that arrives while its request is preempted changes nothing."""
    turns = [(run.scheduled, PREFILL, "", "")] if run.scheduled >= 0 else []
    turns += [(run.first_token, DECODE, "", "")] if run.first_token >= 0 else []
    turns += [(each.time, each.what, each.reason, each.other) for each in run.moments if each.what != "wait"]
    changes = []
    preempted = False
    for time, what, reason, other in sorted(turns, key=lambda turn: turn[0]):
        if what == "preempt":
            preempted = True
            changes.append(StateInterval(PREEMPTED, time, time, reason, other))
        elif what == "resume":
            preempted = False
            changes.append(StateInterval(DECODE if 0 <= run.first_token <= time else PREFILL, time, time))
        elif not preempted:
            changes.append(StateInterval(what, time, time))
    return changes


def intervals_by_reason(run: RequestRun) -> list[tuple[float, float, str]]:
    """Return (begin, end, what) without gaps; ``what`` is the wait reason once it is known, before that the state."""
    last = max((moment.time for moment in run.moments), default=run.arrival)
    waits = [(moment.time, moment.reason) for moment in run.moments if moment.what == "wait"]
    found = []
    for state, begin, end, *_ in state_intervals(run, max(last, run.scheduled)):
        turns = [(begin, state), *(wait for wait in waits if state not in COMPUTING and begin <= wait[0] < end)]
        ends = [time for time, _ in turns[1:]] + [end]
        found += [(time, until, what) for (time, what), until in zip(turns, ends, strict=True) if until > time]
    return found


class QueueHead:
    """The wait reason of the first request in the queue over time. The requests behind it wait for the same reason.

    Its parallel lists ``_begins``, ``_ends`` and ``_whats`` are intervals in order of time: begin, end, wait reason.
    """

    def __init__(self, runs: Iterable[RequestRun]) -> None:
        passed = (*STATES, *HOLD_REASONS, WaitReason.LOADING)  # others do not wait behind a held request
        waits = sorted(interval for run in runs for interval in intervals_by_reason(run) if interval[2] not in passed)
        self._begins: list[float] = []
        self._ends: list[float] = []
        self._whats: list[str] = []
        for begin, end, what in waits:
            begin = max(begin, self._ends[-1] if self._ends else begin)  # only one request is first at a time
            if end > begin:
                self._begins.append(begin)
                self._ends.append(end)
                self._whats.append(what)
        self._before = {what: self._sums(what) for what in sorted(set(self._whats))}

    def seconds(self, begin: float, end: float) -> dict[str, float]:
        """Return how long the first request waited for each reason from ``begin`` to ``end``. O(reasons)."""
        first, last = bisect_right(self._begins, begin) - 1, bisect_right(self._begins, end) - 1
        found = {}
        for what, before in self._before.items():
            seconds = self._until(end, last, what, before) - self._until(begin, first, what, before)
            if seconds > 0:
                found[what] = seconds
        return found

    def _sums(self, what: str) -> list[float]:
        """Return the running sum of seconds of one wait reason: entry ``i`` is for the intervals before ``i``."""
        pairs = zip(self._begins, self._ends, self._whats, strict=True)
        return list(accumulate((end - begin if which == what else 0.0 for begin, end, which in pairs), initial=0.0))

    def _until(self, time: float, at: int, what: str, before: list[float]) -> float:
        """Return the seconds of the wait reason ``what`` before ``time``.

        ``at``: index of the last interval that begins at ``time`` or earlier, or -1.
        """
        if at < 0:
            return 0.0
        part = min(time, self._ends[at]) - self._begins[at] if self._whats[at] == what else 0.0
        return before[at] + part


def seconds_by_reason(run: RequestRun, head: QueueHead | None = None) -> dict[str, float]:
    """Return the seconds of a successful request by wait reason or state. They add up to its end-to-end latency.

    Args:
        head: reasons to attribute queueing time to while the request has none of its own.
    """
    spent: dict[str, float] = defaultdict(float)
    for begin, end, what in intervals_by_reason(run):
        spent[what] += end - begin
        if head is not None and what == QUEUED:
            for reason, seconds in head.seconds(begin, end).items():
                spent[f"{QUEUED} ({reason})"] += seconds
                spent[QUEUED] -= seconds
    return {what: seconds for what, seconds in spent.items() if abs(seconds) > 1e-9}
