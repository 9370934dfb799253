"""``quire serve --trace``: the trace of a real engine under real clients replays exactly."""

import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_processes import engine_processes
from served import Served

from quire.replay.recorded.exact import replay_lines
from quire.replay.recorded.reader import TraceReader
from quire.scheduler_proc.trace.lines import Arrival, End, StepDecision

pytestmark = pytest.mark.full


def client(served: Served, number: int) -> None:
    """Request a few answers one after the other, and disconnect from some."""
    for turn in range(4):
        prompt = [5 + number] * 40 + [6 + turn] * (30 * turn)
        body = {"prompt": prompt, "max_tokens": 90, "ignore_eos": True, "priority": number, "stream": turn == 2}
        with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=60) as answer:
            assert answer.status_code == 200
            if turn == 2:
                next(answer.iter_lines())
            else:
                answer.read()


def dumped(folder: Path) -> Path:
    """Wait for the dump's last line and return its path."""
    deadline = time.monotonic() + 30
    while True:
        found = list(folder.glob("quire-dump-*.jsonl"))
        if found and b'"kind":"end"' in found[0].read_bytes():
            return found[0]
        assert time.monotonic() < deadline, found
        time.sleep(0.02)


def test_a_served_run_and_a_dump_of_it_replay(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    flags: list[Any] = ["--num-gpu-blocks-override", "40", "--scheduling-policy", "priority", "--trace", str(trace)]
    served = Served("--simulate", "constant:0.5", *flags)
    with ThreadPoolExecutor(6) as threads:
        list(threads.map(lambda number: client(served, number), range(6)))
    served.wait_until_idle()
    (scheduler,) = engine_processes("quire.scheduler_proc")
    scheduler.send_signal(signal.SIGUSR2)
    dump = dumped(tmp_path)
    assert served.metrics()["quire:num_trace_lines_lost_total"] == 0
    assert served.stop() == 0
    kinds = Counter(type(read.line) for read in TraceReader(trace))
    assert kinds[Arrival] == 24 and kinds[End] == 1 and kinds[StepDecision] > 300
    preempted = [r for t in TraceReader(trace) if isinstance(t.line, StepDecision) for r in t.line.reasons]
    assert any(reason.what == "preempt" for reason in preempted)
    assert replay_lines(TraceReader(trace), check=True) is None
    assert replay_lines(TraceReader(dump)) is None
