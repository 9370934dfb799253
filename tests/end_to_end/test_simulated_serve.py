"""``quire serve --simulate``: the real front end and scheduler over a simulated worker."""

import json
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_processes import engine_processes, processes_of
from served import Served

from quire.launch import cli
from quire.launch.config.model_folder import DEMO_MODEL
from quire.protocol.model.model_config import load_model_config
from quire.replay.costs.fitted import fit, timed_steps
from quire.replay.costs.parse import parse_cost
from quire.replay.recorded.reader import TraceReader

pytestmark = pytest.mark.full

STEP_SECONDS = 0.002


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    pool = ["--num-gpu-blocks-override", "500", "--cpu-offload-bytes", "64MiB"]
    served = Served("--simulate", "constant:2", "--max-num-seqs", "32", "--no-standby-workers", *pool)
    yield served
    served.end()
    assert not engine_processes("quire.replay.simulate.worker_process")


def complete(server: Served, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}/v1/completions", json={"ignore_eos": True, **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def stream(server: Served, num_tokens: int, seed: int) -> tuple[str, int]:
    """Return the text and its number of chunks."""
    body = {"prompt": [5 + seed] * 20, "max_tokens": num_tokens, "seed": seed, "ignore_eos": True, "stream": True}
    texts = []
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                texts += [choice["text"] for choice in json.loads(line[6:])["choices"]]
    return "".join(texts), len(texts)


def test_logs_that_it_is_simulated(server: Served) -> None:
    assert server.log[0] == f"starting quire-demo on {server.url}"
    line = next(line for line in server.log if "simulated worker" in line)
    assert "tokens are random" in line and "2 ms per step" in line and "num_blocks=500" in line
    pid = server.process.pid
    assert len(processes_of(pid, "quire.replay.simulate.worker_process")) == 1
    assert not processes_of(pid, "quire.worker_proc.")


def test_concurrent_streams(server: Served) -> None:
    before = server.metrics()
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda seed: stream(server, 100, seed), range(8)))
    assert all(text and num_chunks > 20 for text, num_chunks in found)
    assert len({text for text, _ in found}) == 8
    again, _ = stream(server, 100, 3)
    assert again == found[3][0], "tokens depend on the seed only"
    after = server.wait_until_idle()
    assert after["quire:generation_tokens_total"] - before["quire:generation_tokens_total"] == 900


def test_a_step_takes_the_simulated_time(server: Served) -> None:
    began = time.monotonic()
    complete(server, prompt=[5, 6, 7], max_tokens=200)
    assert time.monotonic() - began >= 200 * STEP_SECONDS


def test_host_memory_keeps_what_the_pool_evicts(server: Served) -> None:
    """Ten prompts of 75 blocks, in a pool of 500. The first are loaded; others may be computed on a busy machine."""
    prompts, began = [[5 + number] * 1200 for number in range(10)], time.monotonic()
    answers = [complete(server, prompt=each, max_tokens=2, return_timeline=True) for each in [*prompts, *prompts]]
    passed, usages = time.monotonic() - began, [answer["usage"] for answer in answers]
    assert max(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages[10:]) == 1184
    metrics = server.metrics()
    assert metrics["quire:tier_num_loaded_blocks_total"] >= 74
    assert metrics["quire:tier_num_failed_blocks_total"] == 0
    timelines = [answer["choices"][0]["timeline"] for answer in answers]
    for timeline in timelines:
        kinds, times = [event["event"] for event in timeline], [event["seconds"] for event in timeline]
        assert times == sorted(times) and times[0] == 0 < times[-1]
        others = [kind for kind in kinds if kind != "loaded"]
        assert others == ["queued", "scheduled", "first_token", "ended"] or "joins_load" in str(timeline)
    assert sum(timeline[-1]["seconds"] for timeline in timelines) < passed
    loads = [event for timeline in timelines for event in timeline if event["event"] == "loaded"]
    assert {load["reason"] for load in loads} == {"host"} and max(load["tokens"] for load in loads) == 1184


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["magic:3"], "roofline:CONFIG,CHIP"),
        (["constant:2", "--logits-processors", "mine:Own"], "--logits-processors"),
        (["constant:2", "--ssd-cache-dir", "cache", "--ssd-cache-bytes", "1GiB"], "--ssd-cache-dir"),
        (["constant:2", "--kv-cache-memory-bytes", "1"], "not enough memory"),
    ],
)
def test_invalid_settings_are_refused_before_any_process_starts(
    flags: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "--port", "0", "--simulate", *flags])
    shown = capsys.readouterr().err
    assert ended.value.code == 78 and text in shown and shown.count("\n") == 1, shown


def test_simulates_a_model_without_weights_and_fits_its_trace(tmp_path: Path) -> None:
    """With only a config and a tokenizer. The scheduler sees one worker for any number of ranks."""
    for file in DEMO_MODEL.iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    trace = tmp_path / "trace"
    pool = ["--num-gpu-blocks-override", "500", "--trace", str(trace)]
    served = Served(str(tmp_path), "--simulate", "roofline:h200", "--tensor-parallel-size", "2", *pool)
    for num_tokens in (100, 400, 1000):
        usage = complete(served, prompt=[5] * num_tokens, max_tokens=50)["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (num_tokens, 50)
    assert served.stop(signal.SIGINT) == 0
    steps = timed_steps(TraceReader(trace))
    machine = parse_cost("roofline:h200", tensor_parallel_size=2, model=load_model_config(tmp_path))
    assert len(steps) >= 150 and all(step.seconds >= 0.999 * machine.seconds(step.shape) for step in steps)
    assert fit(trace).seconds(steps[-1].shape) > 0
