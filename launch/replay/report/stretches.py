"""A request's life as stretches without gaps: what it was doing from when to when."""

from typing import NamedTuple

from quire.launch.replay.run.run_record import RequestRun

STATES = ("queued", "prefill", "decode", "preempted")
"""prefill: let in, no token yet; decode: from its first token on, what is computed again after a preemption included;
preempted: put out, until it is let in again."""


class Stretch(NamedTuple):
    """Seconds on the run's clock; ``reason`` of a preemption, and ``other``, for whose sake."""

    state: str
    begin: float
    end: float
    reason: str = ""
    other: str = ""


def run_end(requests: list[RequestRun], step_ends: list[float]) -> float:
    """The last time that anything says: where what had not ended is cut."""
    times = [max(run.arrival, run.scheduled, run.first_token, run.end) for run in requests]
    return max([*times, *step_ends], default=0.0)


def stretches(run: RequestRun, cut: float) -> list[Stretch]:
    """In order of time, each beginning where the one before ended; none is empty. A rejected request has none.

    Args:
        cut: where a request that has not ended is cut.
    """
    if run.finish == "rejected":
        return []
    end = run.end if run.end >= 0 else max(cut, run.arrival)
    made: list[Stretch] = []
    at, state, reason, other = run.arrival, "queued", "", ""
    for time, to_state, to_reason, to_other in _changes(run):
        begin = min(max(time, at), end)
        if begin > at:
            made.append(Stretch(state, at, begin, reason, other))
        at, state, reason, other = begin, to_state, to_reason, to_other
    if end > at:
        made.append(Stretch(state, at, end, reason, other))
    return made


def _changes(run: RequestRun) -> list[tuple[float, str, str, str]]:
    """(time, state from then on, reason, other)."""
    changes: list[tuple[float, str, str, str]] = []
    if run.scheduled >= 0:
        changes.append((run.scheduled, "prefill", "", ""))
    if run.first_token >= 0:
        changes.append((run.first_token, "decode", "", ""))
    for moment in run.moments:
        if moment.what == "preempt":
            changes.append((moment.time, "preempted", moment.reason, moment.other))
        elif moment.what == "resume":
            changes.append((moment.time, "resume", "", ""))
    changes.sort(key=lambda change: change[0])
    return _resolved(changes, run)


def _resolved(changes: list[tuple[float, str, str, str]], run: RequestRun) -> list[tuple[float, str, str, str]]:
    """A token that was in flight may come while its request is out: it stays out until it resumes."""
    resolved: list[tuple[float, str, str, str]] = []
    out = False
    for time, state, reason, other in changes:
        if state == "preempted":
            out = True
        elif state == "resume":
            out = False
            state = "decode" if 0 <= run.first_token <= time else "prefill"
        elif out:
            continue
        resolved.append((time, state, reason, other))
    return resolved
