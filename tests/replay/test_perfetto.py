"""The Chrome trace is well formed: slices nest, arrows begin and end in slices, counters change."""

import gzip
import json
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from replay_runs import made_up_run, simulated_run

from quire.replay.report.perfetto import write_perfetto
from quire.replay.run.run_record import Moment, RequestRun, RunRecord

Events = list[dict[str, Any]]


def written(path: Path, record: RunRecord) -> Events:
    write_perfetto(path, record)
    events: Events = json.loads(path.read_text(encoding="ascii"))["traceEvents"]
    return events


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> Events:
    return written(tmp_path_factory.mktemp("perfetto") / "run.json", simulated_run())


def slices(events: Events) -> dict[tuple[int, int], list[tuple[float, float, str]]]:
    """Return (begin, end, name) by process and thread."""
    found: dict[tuple[int, int], list[tuple[float, float, str]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            found[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"], event["name"]))
    return found


def test_writes_a_slice_per_step(events: Events) -> None:
    steps = [event for event in events if event["ph"] == "X" and event["pid"] == 1]
    record = simulated_run()
    assert len(steps) == len(record.steps)
    assert [e["args"]["prefill tokens"] for e in steps] == record.steps.prefill_tokens.tolist()
    assert [e["args"]["decode tokens"] for e in steps] == record.steps.decode_tokens.tolist()


def test_slices_of_a_thread_nest(events: Events) -> None:
    for found in slices(events).values():
        open_ends: list[float] = []
        for begin, end, name in sorted(found, key=lambda each: (each[0], -each[1])):
            while open_ends and open_ends[-1] <= begin + 5e-4:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 5e-4, name
            open_ends.append(end)


def test_writes_a_slice_per_request(events: Events) -> None:
    names = [e["name"] for e in events if e["ph"] == "X" and e["name"].startswith("request ")]
    ran = [f"request {run.request_id}" for run in simulated_run().requests if run.finish != "rejected"]
    assert sorted(names) == sorted(ran)
    assert [e["args"]["request"] for e in events if e["ph"] == "i" and e["name"] == "rejected"] == ["too long"]


def test_arrows_begin_and_end_in_slices(events: Events) -> None:
    begins = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert begins and begins.keys() == ends.keys()
    found = slices(events)
    names = Counter(e["name"] for e in begins.values())
    preemptions = sum(run.num_preemptions for run in simulated_run().requests)
    assert names["resume"] == preemptions
    assert 0 < names["makes room for"] <= preemptions
    for number, begin in begins.items():
        end = ends[number]
        assert begin["ts"] <= end["ts"] and begin["name"] == end["name"] and end["bp"] == "e"
        assert begin["ts"] in [b for b, _, name in found[2, begin["tid"]] if name == "preempted"]
        assert any(b <= end["ts"] < e for b, e, _ in found[2, end["tid"]])
        assert (begin["tid"] == end["tid"]) == (begin["name"] == "resume")


def test_writes_counters_when_they_change(events: Events) -> None:
    for name in ("requests", "KV blocks", "batch tokens"):
        values = [e["args"] for e in events if e["ph"] == "C" and e["name"] == name]
        assert len(values) > 3
        assert all(one != other for one, other in pairwise(values))
    assert all(sum(e["args"].values()) == 120 for e in events if e["ph"] == "C" and e["name"] == "KV blocks")


def test_writes_reasons_as_instants(events: Events) -> None:
    found = Counter(e["name"] for e in events if e["ph"] == "i")
    moments = Counter(
        f"{m.what}: {m.reason}" if m.reason else m.what for run in simulated_run().requests for m in run.moments
    )
    assert found == moments + Counter(["rejected"])


def test_reuses_lanes(tmp_path: Path) -> None:
    runs = [RequestRun(f"{i}", float(i), 1, scheduled=i + 0.1, end=i + 1.0, finish="stop") for i in range(5)]
    runs.append(RequestRun("long", 2.5, 1, end=9.0, finish="abort"))
    found = written(tmp_path / "run.json", RunRecord(requests=runs))
    assert {e["tid"] for e in found if e["ph"] == "X"} == {1, 2}


def test_finished_beneficiary_gets_no_arrow(tmp_path: Path) -> None:
    out = RequestRun("out", 0.0, 1, scheduled=0.0, first_token=1.0, end=9.0, finish="stop", num_preemptions=2)
    gone = RequestRun("gone", 0.0, 1, scheduled=0.0, first_token=1.0, end=2.0, finish="stop")
    out.moments = [Moment(3.0, "preempt", "youngest", "gone"), Moment(4.0, "preempt", "youngest", "nobody")]
    found = written(tmp_path / "run.json", RunRecord(requests=[out, gone]))
    assert not [e for e in found if e["ph"] in "sf"]


def test_writes_equal_bytes_compressed_or_not(tmp_path: Path) -> None:
    record = made_up_run(50, 300)
    for name in ("a.json", "b.json", "a.json.gz", "b.json.gz"):
        write_perfetto(tmp_path / name, record)
    plain, packed = (tmp_path / "a.json").read_bytes(), (tmp_path / "a.json.gz").read_bytes()
    assert plain == (tmp_path / "b.json").read_bytes() == gzip.decompress(packed)
    assert packed == (tmp_path / "b.json.gz").read_bytes()


def test_writes_empty_run(tmp_path: Path) -> None:
    assert [e["ph"] for e in written(tmp_path / "run.json", RunRecord())] == ["M", "M", "M"]
