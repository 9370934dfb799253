"""A run as a Chrome trace, which https://ui.perfetto.dev opens: steps, counters, a bar per request, arrows.

Each request is on a lane: a thread that shows one request after another. There are as many lanes as concurrent
requests.
Requests are plain slices, because arrows cannot end at asynchronous ones.
"""

import gzip
import heapq
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from quire.launch.replay.run.request_states import Stretch, run_end, stretches
from quire.launch.replay.run.run_record import RequestRun, RunRecord

Event = dict[str, Any]
_ENGINE, _REQUESTS = 1, 2
_COUNTERS = (
    ("requests", ("running", "waiting")),
    ("KV blocks", ("held", "cached", "free")),
    ("batch tokens", ("prefill_tokens", "decode_tokens")),
)
_COLOURS = {"queued": "grey", "prefill": "yellow", "decode": "good", "preempted": "terrible"}


def write_perfetto(path: Path, record: RunRecord) -> None:
    """Write event by event, compressed if the name ends in ``.gz``. The same record gives the same bytes.

    Raises:
        OSError: the file cannot be written.
    """
    with path.open("wb") as raw:
        if path.suffix != ".gz":
            _write(raw, record)
        else:  # no name and no time in the header
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
    lives = _lives(record)
    for lane in range(max((life.lane for life in lives), default=-1) + 1):
        yield _name(_REQUESTS, lane + 1, "thread_name", f"lane {lane}")
    for life in lives:
        yield from _slices(life)
        yield from _instants(life)
    yield from _flows(lives)


def _name(process: int, thread: int, kind: str, name: str) -> Event:
    return {"ph": "M", "pid": process, "tid": thread, "name": kind, "args": {"name": name}}


def _steps(record: RunRecord) -> Iterator[Event]:
    """A step ends where the next begins at the latest: slices of one thread must not overlap."""
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


class _Life(NamedTuple):
    run: RequestRun
    lane: int
    stretches: list[Stretch]
    begin: float
    end: float

    def lives_at(self, time: float) -> bool:
        return self.begin <= time < self.end


def _lives(record: RunRecord) -> list[_Life]:
    """Place each request on the lowest lane that is free when it arrives."""
    cut = run_end(record.requests, list(record.steps.end[-1:]))
    lives: list[_Life] = []
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
        found = stretches(run, cut)
        end = found[-1].end if found else run.arrival
        lives.append(_Life(run, lane, found, run.arrival, end))
        heapq.heappush(busy, (end, lane))
    return lives


def _slices(life: _Life) -> Iterator[Event]:
    run = life.run
    if not life.stretches:
        why = {"request": run.request_id, "why": run.finish_detail}
        yield _instant(life.lane, run.finish or "nothing happened", run.arrival, why)
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
    yield _slice(_REQUESTS, life.lane + 1, f"request {run.request_id}", life.begin, life.end, args)
    for each in life.stretches:
        told = {"reason": each.reason, "beneficiary": each.other} if each.state == "preempted" else {}
        event = _slice(_REQUESTS, life.lane + 1, each.state, each.begin, each.end, told)
        yield event | {"cname": _COLOURS[each.state]}


def _instants(life: _Life) -> Iterator[Event]:
    for moment in life.run.moments:
        args = {"request": life.run.request_id, "reason": moment.reason, "beneficiary": moment.other}
        name = f"{moment.what}: {moment.reason}" if moment.reason else moment.what
        yield _instant(life.lane, name, moment.time, args)


def _instant(lane: int, name: str, time: float, args: dict[str, Any]) -> Event:
    return {"ph": "i", "s": "t", "pid": _REQUESTS, "tid": lane + 1, "name": name, "ts": _time(time), "args": args}


def _flows(lives: list[_Life]) -> Iterator[Event]:
    """Arrows from each preemption to its resumption, and to whom it was for. Behind all slices that they bind to."""
    by_id: dict[str, list[_Life]] = {}
    for life in lives:
        by_id.setdefault(life.run.request_id, []).append(life)
    number = 0
    for life in lives:
        for i, out in enumerate(life.stretches):
            if out.state != "preempted":
                continue
            back = life.stretches[i + 1] if i + 1 < len(life.stretches) else out
            if back.state != "preempted":
                number += 1
                yield _flow("s", "resume", number, life, out.begin)
                yield _flow("f", "resume", number, life, back.begin)
            for other in by_id.get(out.other, ()):
                if other is not life and other.lives_at(out.begin):
                    number += 1
                    yield _flow("s", "makes room for", number, life, out.begin)
                    yield _flow("f", "makes room for", number, other, out.begin)
                    break


def _flow(phase: str, name: str, number: int, life: _Life, time: float) -> Event:
    """``bp``: an arrow ends at the slice around it, not at the next one."""
    event = {"ph": phase, "cat": name, "name": name, "id": number, "ts": _time(time)}
    return event | {"pid": _REQUESTS, "tid": life.lane + 1} | ({"bp": "e"} if phase == "f" else {})
