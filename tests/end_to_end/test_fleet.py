"""``quire serve --data-parallel-size 2``: requests on both engines, deaths of engines and router, orders."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest
from engine_processes import engine_processes
from served import Served
from waits import wait_for

from quire.launch import cli

pytestmark = pytest.mark.full
ADMIN = {"authorization": "Bearer admin"}
WAIT_S = 60.0


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    pool = ("--max-num-seqs", "8", "--num-gpu-blocks-override", "500", "--no-standby-workers")
    others = {process.pid for process in engine_processes()}
    served = Served("--data-parallel-size", "2", "--deterministic", "--admin-api-key", "admin", *pool)
    yield served
    served.end()
    assert {process.pid for process in engine_processes()} <= others  # a helper of another test may have ended


def body(prompt: str, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 60, "temperature": 0, "ignore_eos": True, **more}


def complete(server: Served, prompt: str, **more: Any) -> str:
    answer = httpx.post(f"{server.url}/v1/completions", json=body(prompt, **more), timeout=WAIT_S)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


class Stream(threading.Thread):
    """A request whose tokens are read as they come; ``text`` is what has arrived."""

    def __init__(self, server: Served, prompt: str, **more: Any) -> None:
        super().__init__()
        self.text, self.error = "", ""
        self._url, self._body = f"{server.url}/v1/completions", body(prompt, stream=True, **more)
        self.start()

    def run(self) -> None:
        with httpx.stream("POST", self._url, json=self._body, timeout=WAIT_S) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line[6:])
                    self.error += str(chunk.get("error", ""))
                    self.text += "".join(choice["text"] for choice in chunk.get("choices", ()))


def engines(server: Served) -> dict[int, dict[str, Any]]:
    found = httpx.get(f"{server.url}/admin/engines", headers=ADMIN, timeout=WAIT_S).json()["engines"]
    return {each["engine"]: each for each in found}


def serve_both(server: Served) -> bool:
    return all(each["state"] == "serving" for each in engines(server).values())


def test_requests_run_on_both_engines(server: Served) -> None:
    streams = [Stream(server, f"Once upon a time {n}", max_tokens=400) for n in range(4)]
    for stream in streams:
        stream.join()
    assert all(stream.text and not stream.error for stream in streams)
    wait_for(lambda: all(figure(server, f'choices_total{{engine="{number}"') for number in engines(server)))
    assert "2 engines" in server.log[-1] and sum("engine 0: KV cache" in line for line in server.log) == 1


def test_a_prompt_goes_to_the_engine_that_has_cached_it(server: Served) -> None:
    """From the engines' events by the router's index to its choices. The figures are written once a second."""
    prompt = "Once upon a time there was a robot that liked to count. " * 8
    complete(server, prompt)
    wait_for(lambda: figure(server, "router_indexed_blocks") > 0)
    before = figure(server, 'reason="cached"')
    for _ in range(3):
        complete(server, prompt)
    wait_for(lambda: figure(server, 'reason="cached"') == before + 3)


def figure(server: Served, part: str) -> float:
    """Return the sum of the metrics of the router in whose line ``part`` is."""
    lines = httpx.get(f"{server.url}/metrics", timeout=WAIT_S).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("quire:router_") and part in line)


@pytest.mark.parametrize("module", ["quire.launch.fleet", "quire.router_proc"])
def test_a_death_changes_no_stream(server: Served, module: str) -> None:
    prompts = [f"The story of the {n} robots" for n in range(4)]
    expected = [complete(server, prompt, max_tokens=300) for prompt in prompts]
    wait_for(lambda: serve_both(server))
    starts = {number: each["starts"] for number, each in engines(server).items()}
    streams = [Stream(server, prompt, max_tokens=300) for prompt in prompts]
    wait_for(lambda: all(stream.text for stream in streams))
    victim = engine_processes(module)[0]
    os.kill(victim.pid, signal.SIGKILL)
    while any(stream.is_alive() for stream in streams):
        assert httpx.get(f"{server.url}/health", timeout=WAIT_S).status_code == 200
        time.sleep(0.02)
    assert [(stream.text, stream.error) for stream in streams] == [(text, "") for text in expected]
    wait_for(lambda: serve_both(server) and len(engine_processes("quire.router_proc")) == 1)
    if module == "quire.launch.fleet":
        assert sum(each["starts"] for each in engines(server).values()) == sum(starts.values()) + 1
    wait_for(lambda: victim.pid not in [process.pid for process in psutil.process_iter()])


def test_an_engine_is_drained_and_resumed(server: Served, capsys: pytest.CaptureFixture[str]) -> None:
    wait_for(lambda: serve_both(server))
    words = ["--url", server.url, "--admin-api-key", "admin"]
    cli.main(["engines", "drain", "0", *words])
    assert engines(server)[0]["state"] == "drained"
    with pytest.raises(SystemExit):
        cli.main(["engines", "drain", "1", *words])
    assert "no other engine is serving" in capsys.readouterr().err
    assert complete(server, "Once upon a time")
    cli.main(["engines", "resume", "0", *words])
    assert serve_both(server)
