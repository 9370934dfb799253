"""The log of a whole server: every process uses the format, and names of metrics have the prefix."""

import json
import signal

import httpx
import pytest
from engine_processes import engine_processes
from served import Served
from waits import wait_for


@pytest.mark.full
def test_every_process_writes_json_lines() -> None:
    flags = ("--log-format", "json", "--log-level", "info", "--metrics-prefix", "vllm", "--api-server-count", "2")
    flags += ("--chat-template", "{{ messages[-1].content }}")
    server = Served("--simulate", "constant:1", "--num-gpu-blocks-override", "200", *flags)
    try:
        body = {"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}
        answer = httpx.post(f"{server.url}/v1/completions", json=body)
        metrics = httpx.get(f"{server.url}/metrics").text
        (scheduler,) = engine_processes("quire.scheduler_proc")
        scheduler.kill()  # the supervisor logs that
        for text in ("restarting the scheduler", "leaves out"):
            wait_for(lambda text=text: text in "".join(server.log), 10)
    finally:
        assert server.stop(signal.SIGTERM) == 0
    records = [json.loads(line) for line in server.log]
    assert records[0]["message"] == f"starting quire-demo on {server.url}"
    assert {record["component"] for record in records} >= {"quire.http", "quire.supervisor", "quire.worker"}
    # What the chat template loses of requests, once for both front ends.
    lost = [record["message"] for record in records if record["level"] == "WARNING" and "template" in record["message"]]
    assert "leaves out system messages" in lost[0] and len(lost) == len(set(lost))
    request, response = (
        next(record for record in records if record["message"] == event) for event in ("request", "response")
    )
    assert request["id"] == response["id"] == answer.headers["x-request-id"]
    assert (response["status"], response["output_tokens"], response["finish"]) == (200, 4, "length")
    assert request["pid"] == response["pid"] != next(r for r in records if r["component"] == "quire.worker")["pid"]
    assert 'vllm:request_success_total{finished_reason="length",model_name="quire-demo"} 1.0' in metrics
    assert "quire:" not in metrics and 'vllm:cache_config_info{block_size="16",' in metrics
    assert "vllm:iteration_tokens_total_count{" in metrics


@pytest.mark.full
def test_a_start_at_level_warning_is_quiet_until_it_is_ready() -> None:
    server = Served("--simulate", "constant:1", "--num-gpu-blocks-override", "200", "--log-level", "warning")
    assert server.stop() == 0
    assert not [line for line in server.log if line.startswith("starting")]
