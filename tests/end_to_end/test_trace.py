"""The trace of a live server replays exactly."""

import random
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_processes import engine_processes
from served import Served
from waits import wait_for

from quire.replay.formats.options import LoadOptions
from quire.replay.formats.quire import load
from quire.replay.recorded.exact import replay_lines
from quire.replay.recorded.reader import TraceReader
from quire.replay.recorded.replay_trace import replay_trace
from quire.replay.run.run_record import RunRecord
from quire.scheduler_proc.trace.files import part_path

pytestmark = pytest.mark.full

FLAGS = ["--max-num-seqs", "4", "--max-model-len", "256", "--block-size", "16", "--num-gpu-blocks-override", "22"]
"""A pool without room for four long answers, so that requests are preempted."""
NUM_CLIENTS = 3
DUMPS = "quire-dump-*.jsonl"


class Client(threading.Thread):
    """Sends requests one after the other until it has received ``num_tokens``; disconnects from some."""

    def __init__(self, url: str, seed: int, num_tokens: int) -> None:
        super().__init__(name=f"client {seed}")
        self._rng = random.Random(seed)
        self._http = httpx.Client(base_url=url, timeout=60)
        self._num_tokens = num_tokens
        self.num_aborted = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with self._http:
                while self._num_tokens > 0:
                    self._num_tokens -= self._ask()
        except BaseException as error:
            self.error = error

    def _ask(self) -> int:
        """Request two answers, so that more wait than can run; return the number of tokens requested."""
        rng = self._rng
        count = rng.randrange(40, 180)
        body: dict[str, Any] = {
            "prompt": (list(range(5, 37)) if rng.random() < 0.5 else []) + [rng.randrange(5, 900) for _ in range(20)],
            "max_tokens": count,
            "n": 2,
            "temperature": 1.0,
            "ignore_eos": True,
            "priority": rng.randrange(3),
        }
        if rng.random() < 0.3:
            return self._give_up(body, rng.randrange(1, 20))
        response = self._http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        assert response.json()["usage"]["completion_tokens"] == 2 * count
        return 2 * count

    def _give_up(self, body: dict[str, Any], num_chunks: int) -> int:
        with self._http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            for number, _ in enumerate(response.iter_lines()):
                if number >= 2 * num_chunks:
                    break
        self.num_aborted += 1
        return 2 * num_chunks


def record_run(path: Path, num_tokens: int, *flags: str) -> int:
    """Record a run of ``num_tokens`` tokens, and dump it; return how many requests were aborted."""
    served = Served("--trace", str(path), *FLAGS, *flags)
    clients = [Client(served.url, seed, num_tokens // NUM_CLIENTS) for seed in range(NUM_CLIENTS)]
    try:
        for client in clients:
            client.start()
        for client in clients:
            client.join(500)
        assert served.wait_until_idle()["quire:num_trace_lines_lost_total"] == 0
        (scheduler,) = engine_processes("quire.scheduler_proc")
        scheduler.send_signal(signal.SIGUSR2)
        wait_for(lambda: any(b'"kind":"end"' in dump.read_bytes() for dump in path.parent.glob(DUMPS)), 30)
    finally:
        assert served.stop(signal.SIGTERM) == 0
    for client in clients:
        if client.error is not None:
            raise client.error
    return sum(client.num_aborted for client in clients)


def check_run(record: RunRecord, num_aborted: int) -> None:
    assert record.decisions_equal is True, record.first_difference
    assert not record.notes
    assert sum(run.num_preemptions for run in record.requests) > 0
    assert len({run.priority for run in record.requests}) == 3
    finishes = [run.finish for run in record.requests]
    assert set(finishes) == {"length", "abort"} and num_aborted < finishes.count("abort") + 2 <= 2 * num_aborted + 2
    assert record.virtual_s > 0 and sum(run.num_cached_tokens for run in record.requests) > 0


def test_a_live_run_replays_exactly(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    # A client that leaves must be noticed before its answer ends, also on a busy machine.
    num_aborted = record_run(path, 1500, "--scheduling-policy", "priority", "--simulate", "constant:5")
    record = replay_trace(path)
    check_run(record, num_aborted)
    assert len(record.steps) > 200
    (dump,) = path.parent.glob(DUMPS)
    assert replay_lines(TraceReader(dump)) is None


def test_the_trace_continues_after_the_death_of_the_scheduler(tmp_path: Path) -> None:
    """Three schedulers in turn: what the first two recorded is kept, and a request is one request in the record."""
    path = tmp_path / "trace.jsonl"
    served = Served("--trace", str(path), "--simulate", "constant:20", *FLAGS)
    bodies = [{"prompt": [9 + number] * 20, "max_tokens": 120, "ignore_eos": True} for number in range(4)]

    def ask(body: dict[str, Any]) -> httpx.Response:
        return httpx.post(f"{served.url}/v1/completions", json=body, timeout=60)

    try:
        with ThreadPoolExecutor(4) as threads:
            answers = [threads.submit(ask, body) for body in bodies]
            for part in range(2):
                file = part_path(path, part)
                wait_for(lambda file=file: file.exists() and b"step_decision" in file.read_bytes())
                (scheduler,) = engine_processes("quire.scheduler_proc")
                scheduler.kill()
            assert [answer.result().json()["usage"]["completion_tokens"] for answer in answers] == [120] * 4
        assert ask(bodies[0]).status_code == 200
    finally:
        assert served.stop(signal.SIGTERM) == 0
    record = replay_trace(path)
    assert record.decisions_equal is True, record.first_difference
    assert [run.num_output_tokens for run in record.requests] == [120] * 5
    assert sum("the scheduler died" in note for note in record.notes) == 2
    assert record.preemptions_by_reason["new_epoch"] > 0
    calls = load(path, LoadOptions()).calls
    # An arrival of the last 0.25 s before a death is lost; then the output up to there counts as a part of the prompt.
    assert [call.num_prompt_tokens + call.num_output_tokens for call in calls] == [140] * 5


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_ten_thousand_steps_of_the_demo_model_replay_exactly(tmp_path: Path, policy: str) -> None:
    """Prints the replay's speed (``-s``), which docs/log.md records."""
    path = tmp_path / "trace.jsonl"
    num_aborted = record_run(path, 45_000, "--scheduling-policy", policy)
    record = replay_trace(path)
    check_run(record, num_aborted)
    assert len(record.steps) >= 10_000
    speed = record.virtual_s / record.wall_s
    print(f"{len(record.steps)} steps, {record.virtual_s:.1f} s, replayed {speed:.1f} times as fast", file=sys.stderr)
