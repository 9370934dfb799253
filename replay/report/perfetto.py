"""Writes a run as a Chrome trace for https://ui.perfetto.dev: steps, counters, a bar per request, arrows.

Each request is on a lane, a thread that shows one request after another; there are as many lanes as concurrent
requests. Requests are ordinary slices, because arrows cannot end at asynchronous ones.
"""

import gzip
import heapq
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from quire.replay.run.request_states import StateInterval, run_end, state_intervals
from quire.replay.run.run_record import RequestRun, RunRecord

Event = dict[str, Any]
_ENGINE, _REQUESTS = 1, 2
_COUNTERS = (
    ("requests", ("running", "waiting")),
    ("KV blocks", ("held", "cached", "free")),
    ("batch tokens", ("prefill_tokens", "decode_tokens")),
)
_COLOURS = {"queued": "grey", "prefill": "yellow", "decode": "good", "preempted": "terrible"}


def write_perfetto(path: Path, record: RunRecord) -> None:
    """Write the trace event by event, compressed if the name ends in ``.gz``. Equal records give equal bytes.

    Raises:
        OSError: the file cannot be written.
    """
    with path.open("wb") as raw:
        if path.suffix != ".gz":
            _write(raw, record)
        else:  # without name and time in the header, for equal bytes
            with gzip.GzipFile("", "wb", compresslevel=6, fileobj=raw, mtime=0) as packed:
                _write(packed, record)


def _write(raw: Any, record: RunRecord) -> None:
    out = io.TextIOWrapper(raw, encoding="ascii", newline="\n")
    about = {"title": record.title, "source": record.source, "cost": record.cost, "notes": record.notes}
    out.write(f'{{"displayTimeUnit":"ms","otherData":{_json(about)},"traceEvents":[')
    for number, event in enumerate(_events(record)):
        out.write(f"{',' if number else ''}\n{_json(event)}")
    out.write("\n]}\n")
    out.detach()


def _json(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _time(seconds: float) -> float:
    """Return microseconds, rounded to nanoseconds."""
    return round(seconds * 1e6, 3)


def _events(record: RunRecord) -> Iterator[Event]:
    yield _name(_ENGINE, 0, "process_name", record.title or "engine")
    yield _name(_ENGINE, 1, "thread_name", "steps")
    yield _name(_REQUESTS, 0, "process_name", "requests")
    yield from _steps(record)
    yield from _counters(record)
    timelines = _timelines(record)
    for lane in range(max((timeline.lane for timeline in timelines), default=-1) + 1):
        yield _name(_REQUESTS, lane + 1, "thread_name", f"lane {lane}")
    for timeline in timelines:
        yield from _slices(timeline)
        yield from _instants(timeline)
    yield from _flows(timelines)


def _name(process: int, thread: int, kind: str, name: str) -> Event:
    return {"ph": "M", "pid": process, "tid": thread, "name": kind, "args": {"name": name}}


def _steps(record: RunRecord) -> Iterator[Event]:
    """Yield a slice per step, cut at the start of the next: slices of one thread must not overlap."""
    steps = record.steps
    for i, begin in enumerate(steps.begin):
        end = min(steps.end[i], steps.begin[i + 1]) if i + 1 < len(steps) else steps.end[i]
        prefill, decode = steps.prefill_tokens[i], steps.decode_tokens[i]
        kind = "mixed" if prefill and decode else "prefill" if prefill else "decode"
        args = {"prefill tokens": prefill, "decode tokens": decode, "number": i}
        args |= {"budget": record.max_num_batched_tokens, "running": steps.running[i], "waiting": steps.waiting[i]}
        yield _slice(_ENGINE, 1, kind, begin, max(end, begin), args)


def _slice(process: int, thread: int, name: str, begin: float, end: float, args: dict[str, Any]) -> Event:
    start = _time(begin)
    duration = round(max(_time(end) - start, 0), 3)
    return {"ph": "X", "pid": process, "tid": thread, "name": name, "ts": start, "dur": duration, "args": args}


def _counters(record: RunRecord) -> Iterator[Event]:
    """Yield the counters where they change."""
    steps = record.steps
    for name, columns in _COUNTERS:
        before: tuple[int, ...] | None = None
        tracks = [(column.removesuffix("_tokens"), getattr(steps, column)) for column in columns]
        for i, begin in enumerate(steps.begin):
            values = tuple(track[i] for _, track in tracks)
            if values != before:
                before = values
                args = {track: value for (track, _), value in zip(tracks, values, strict=True)}
                yield {"ph": "C", "pid": _ENGINE, "name": name, "ts": _time(begin), "args": args}


class _Timeline(NamedTuple):
    run: RequestRun
    lane: int
    intervals: list[StateInterval]
    begin: float
    end: float

    def is_active_at(self, time: float) -> bool:
        return self.begin <= time < self.end


def _timelines(record: RunRecord) -> list[_Timeline]:
    """Place each request on the lowest free lane at its arrival."""
    cut = run_end(record.requests, list(record.steps.end[-1:]))
    timelines: list[_Timeline] = []
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    num_lanes = 0
    for run in sorted(record.requests, key=lambda run: run.arrival):
        while busy and busy[0][0] <= run.arrival:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            heapq.heappush(free, num_lanes)
            num_lanes += 1
        lane = heapq.heappop(free)
        found = state_intervals(run, cut)
        end = found[-1].end if found else run.arrival
        timelines.append(_Timeline(run, lane, found, run.arrival, end))
        heapq.heappush(busy, (end, lane))
    return timelines


def _slices(timeline: _Timeline) -> Iterator[Event]:
    run = timeline.run
    if not timeline.intervals:
        why = {"request": run.request_id, "why": run.finish_detail}
        yield _instant(timeline.lane, run.finish or "unfinished", run.arrival, why)
        return
    args: dict[str, Any] = {
        "prompt tokens": run.num_prompt_tokens,
        "cached tokens": run.num_cached_tokens,
        "output tokens": run.num_output_tokens,
        "preemptions": run.num_preemptions,
        "priority": run.priority,
        "conversation": run.conversation,
        "finish": run.finish,
        "detail": run.finish_detail,
    }
    yield _slice(_REQUESTS, timeline.lane + 1, f"request {run.request_id}", timeline.begin, timeline.end, args)
    for each in timeline.intervals:
        preemption = {"reason": each.reason, "beneficiary": each.other} if each.state == "preempted" else {}
        event = _slice(_REQUESTS, timeline.lane + 1, each.state, each.begin, each.end, preemption)
        yield event | {"cname": _COLOURS[each.state]}


def _instants(timeline: _Timeline) -> Iterator[Event]:
    for moment in timeline.run.moments:
        args = {"request": timeline.run.request_id, "reason": moment.reason, "beneficiary": moment.other}
        name = f"{moment.what}: {moment.reason}" if moment.reason else moment.what
        yield _instant(timeline.lane, name, moment.time, args)


def _instant(lane: int, name: str, time: float, args: dict[str, Any]) -> Event:
    return {"ph": "i", "s": "t", "pid": _REQUESTS, "tid": lane + 1, "name": name, "ts": _time(time), "args": args}


def _flows(timelines: list[_Timeline]) -> Iterator[Event]:
    """Yield arrows from each preemption to its resumption and to the request that got the blocks.

    They must follow all slices that they bind to.
    """
    by_id: dict[str, list[_Timeline]] = {}
    for timeline in timelines:
        by_id.setdefault(timeline.run.request_id, []).append(timeline)
    number = 0
    for timeline in timelines:
        for i, out in enumerate(timeline.intervals):
            if out.state != "preempted":
                continue
            back = timeline.intervals[i + 1] if i + 1 < len(timeline.intervals) else out
            if back.state != "preempted":
                number += 1
                yield _flow("s", "resume", number, timeline, out.begin)
                yield _flow("f", "resume", number, timeline, back.begin)
            for other in by_id.get(out.other, ()):
                if other is not timeline and other.is_active_at(out.begin):
                    number += 1
                    yield _flow("s", "makes room for", number, timeline, out.begin)
                    yield _flow("f", "makes room for", number, other, out.begin)
                    break


def _flow(phase: str, name: str, number: int, timeline: _Timeline, time: float) -> Event:
    """Return one end of an arrow; ``bp`` binds it to the enclosing slice, not to the next one."""
    event = {"ph": phase, "cat": name, "name": name, "id": number, "ts": _time(time)}
    return event | {"pid": _REQUESTS, "tid": timeline.lane + 1} | ({"bp": "e"} if phase == "f" else {})
