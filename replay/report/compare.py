"""Compares two runs of one workload request by request: which took longer in the second run, and why."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.bench.measure.report import Table
from quire.replay.report.figures import latency
from quire.replay.run.request_states import COMPUTING, QueueHead, intervals_by_reason, seconds_by_reason
from quire.replay.run.run_record import RequestRun, RunRecord

MAX_SHOWN = 10
MAX_BEHIND = 3


@dataclass(frozen=True, slots=True)
class TimePart:
    """Seconds of a request in each run for one ``what``: a wait reason or a state."""

    what: str
    seconds: tuple[float, float]

    @property
    def change(self) -> float:
        return self.seconds[1] - self.seconds[0]


@dataclass(frozen=True, slots=True)
class RequestDelta:
    """One request in both runs. Changes are the second run's figure minus the first's, in milliseconds.

    Attributes:
        parts: parts of the end-to-end latency, the largest change first; the changes add up to ``e2e``.
        preempted_for: for each preemption in the second run, the request that got the blocks, or ``none``.
        behind: the requests of the second run that ran longest while this one waited, with the seconds.
    """

    request_id: str
    ttft: float
    e2e: float
    queue: float
    cached_tokens: int
    preemptions: int
    parts: list[TimePart]
    preempted_for: list[str] = field(default_factory=list)
    behind: list[tuple[str, float]] = field(default_factory=list)

    @property
    def why(self) -> str:
        """Why the request took more or less time, as text."""
        causes = [f"{part.what} {_signed(part.change * 1e3)} ms" for part in self.parts[:3] if abs(part.change) >= 5e-7]
        if self.behind and any(part.what not in COMPUTING and part.change > 0 for part in self.parts):
            causes.append("behind " + ", ".join(name for name, _ in self.behind))
        if self.preemptions:
            times = f"preempted {_signed(self.preemptions)} times"
            causes.append(
                times + (f" (for {', '.join(dict.fromkeys(self.preempted_for))})" if self.preempted_for else "")
            )
        if self.cached_tokens:
            causes.append(f"{_signed(self.cached_tokens)} cached tokens")
        return "; ".join(causes) or "nothing changed"


@dataclass(frozen=True, slots=True)
class RunComparison:
    """A comparison of two runs by the requests that succeeded in both.

    Attributes:
        deltas: one per request, the largest increase of end-to-end latency first.
        parts: total seconds of these requests by wait reason or state.
        only_first, only_second: ids of requests that succeeded in one run only.
    """

    titles: tuple[str, str]
    settings: dict[str, tuple[Any, Any]]
    deltas: list[RequestDelta]
    parts: list[TimePart]
    only_first: list[str]
    only_second: list[str]

    @property
    def slower(self) -> list[RequestDelta]:
        """The requests that took longer in the second run, the largest increase first."""
        return [delta for delta in self.deltas if delta.e2e > 0]

    @property
    def num_faster(self) -> int:
        return sum(delta.e2e < 0 for delta in self.deltas)

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison as JSON types."""
        return {
            "runs": list(self.titles),
            "settings": {key: list(values) for key, values in self.settings.items()},
            "requests": len(self.deltas),
            "slower": len(self.slower),
            "faster": self.num_faster,
            "mean_change_ms": {name: _mean(self.deltas, name) for name in ("ttft", "e2e", "queue")},
            "seconds_by_reason": {part.what: list(part.seconds) for part in self.parts},
            "only_first": self.only_first,
            "only_second": self.only_second,
            "most_delayed": [_delta_dict(delta) for delta in self.slower[:MAX_SHOWN]],
        }

    def tables(self) -> list[Table]:
        """Return the comparison as tables."""
        made = [
            Table("change, ms", ("mean",), [(name, [_mean(self.deltas, name)]) for name in ("ttft", "queue", "e2e")]),
            Table(
                "seconds of all requests",
                ("first", "second", "change"),
                [(part.what, [*part.seconds, part.change]) for part in self.parts],
            ),
        ]
        if shown := self.slower[:MAX_SHOWN]:
            rows = [(each.request_id, (each.ttft, each.queue, each.e2e, each.why)) for each in shown]
            made.append(Table("took longer, ms", ("ttft", "queue", "e2e", "why"), rows))
        return made

    def text(self) -> str:
        """Return the tables below the titles and the settings that differ."""
        lines = [
            f"first:  {self.titles[0]}",
            f"second: {self.titles[1]}",
            *(f"  {key}: {first} -> {second}" for key, (first, second) in self.settings.items()),
            f"{len(self.deltas)} requests finished in both runs: {len(self.slower)} slower in the second, "
            f"{self.num_faster} faster; {len(self.only_first)} finished in the first only, {len(self.only_second)} "
            "in the second only",
        ]
        return "\n\n".join(["\n".join(lines), *(table.text() for table in self.tables())])


def compare(a: RunRecord, b: RunRecord) -> RunComparison:
    """Compare ``b`` with ``a``. Requests are matched by id, then by order of arrival."""
    first, second = _by_name(a), _by_name(b)
    common = [name for name in first if name in second]
    heads = QueueHead(a.requests), QueueHead(b.requests)
    pairs = [(_delta(first[name], second[name], heads), second[name]) for name in common]
    pairs.sort(key=lambda pair: (-pair[0].e2e, pair[0].request_id))
    deltas = [delta for delta, _ in pairs]
    whole: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for delta in deltas:
        for part in delta.parts:
            whole[part.what][0] += part.seconds[0]
            whole[part.what][1] += part.seconds[1]
    for delta, run in [pair for pair in pairs if pair[0].e2e > 0][:MAX_SHOWN]:
        delta.behind.extend(_ran_meanwhile(run, b.requests))
    keys = dict.fromkeys([*a.settings, *b.settings])
    settings = {key: (a.settings.get(key), b.settings.get(key)) for key in keys}
    return RunComparison(
        (a.title, b.title),
        {key: values for key, values in settings.items() if values[0] != values[1]},
        deltas,
        _ranked({what: (seconds[0], seconds[1]) for what, seconds in whole.items()}),
        [run.request_id for name, run in first.items() if name not in second],
        [run.request_id for name, run in second.items() if name not in first],
    )


def _delta(a: RequestRun, b: RequestRun, heads: tuple[QueueHead, QueueHead]) -> RequestDelta:
    before, after, spent = latency(a), latency(b), (seconds_by_reason(a, heads[0]), seconds_by_reason(b, heads[1]))
    names = dict.fromkeys([*spent[0], *spent[1]])
    return RequestDelta(
        b.request_id,
        (after.ttft or 0.0) - (before.ttft or 0.0),
        (after.e2e or 0.0) - (before.e2e or 0.0),
        (after.queue or 0.0) - (before.queue or 0.0),
        b.num_cached_tokens - a.num_cached_tokens,
        b.num_preemptions - a.num_preemptions,
        _ranked({what: (spent[0].get(what, 0.0), spent[1].get(what, 0.0)) for what in names}),
        [moment.other or "none" for moment in b.moments if moment.what == "preempt"],
    )


def _ran_meanwhile(run: RequestRun, others: Sequence[RequestRun]) -> list[tuple[str, float]]:
    """Return the requests that ran while ``run`` waited, with the seconds, the longest first. O(requests)."""
    waits = [(begin, end) for begin, end, what in intervals_by_reason(run) if what not in COMPUTING]
    if not waits:
        return []
    shares = []
    for other in others:
        if other is not run and other.scheduled >= 0:
            share = sum(max(min(end, other.end) - max(begin, other.scheduled), 0.0) for begin, end in waits)
            if share > 0:
                shares.append((other.request_id, share))
    return sorted(shares, key=lambda pair: (-pair[1], pair[0]))[:MAX_BEHIND]


def _by_name(record: RunRecord) -> dict[tuple[str, int], RequestRun]:
    """Return the successful requests by (id, number of requests so far with this id)."""
    counts: dict[str, int] = defaultdict(int)
    found: dict[tuple[str, int], RequestRun] = {}
    for run in record.requests:
        counts[run.request_id] += 1
        if latency(run).e2e is not None:
            found[run.request_id, counts[run.request_id]] = run
    return found


def _ranked(seconds: Mapping[str, tuple[float, float]]) -> list[TimePart]:
    parts = [TimePart(what, each) for what, each in seconds.items()]
    return sorted(parts, key=lambda part: (-abs(part.change), part.what))


def _mean(deltas: Sequence[RequestDelta], name: str) -> float | None:
    values: list[float] = [getattr(delta, name) for delta in deltas]
    return sum(values) / len(values) if values else None


def _delta_dict(delta: RequestDelta) -> dict[str, Any]:
    return {
        "request_id": delta.request_id,
        "change_ms": {"ttft": delta.ttft, "e2e": delta.e2e, "queue": delta.queue},
        "cached_tokens": delta.cached_tokens,
        "preemptions": delta.preemptions,
        "seconds_by_reason": {part.what: list(part.seconds) for part in delta.parts},
        "preempted_for": delta.preempted_for,
        "behind": [[name, seconds] for name, seconds in delta.behind],
        "why": delta.why,
    }


def _signed(value: float) -> str:
    return f"{value:+,.0f}" if abs(value) >= 1 else f"{value:+.3g}"
