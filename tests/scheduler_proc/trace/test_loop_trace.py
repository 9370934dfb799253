"""The scheduler's loop with a trace: a live recording replays exactly, and a failing engine leaves a dump."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from fake_adapters import adapter_ref
from loop_under_test import LoopUnderTest
from scheduler_driver import change, make_config, make_layout, make_request

from quire.protocol.errors import ConfigError
from quire.protocol.process.child import Command
from quire.protocol.wire.adapter_messages import UnloadAdapter
from quire.protocol.wire.front_end_messages import Abort, Statistics, StepOutputs
from quire.protocol.wire.link_messages import Welcome
from quire.protocol.wire.worker_messages import ModelRunnerOutput
from quire.replay.recorded.exact import replay_lines
from quire.replay.recorded.reader import TraceReader
from quire.scheduler_proc.trace.event_log import TraceHeader
from quire.scheduler_proc.trace.journal import Journal
from quire.scheduler_proc.trace.lines import AnyLine, Arrival, End, Event, Header, Result, StepDecision, WorkerEpoch

PROMPT = [3, 1, 4, 1, 5]
Start = Callable[..., LoopUnderTest]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts one loop with the given settings; the loop is stopped after the test."""
    started: list[LoopUnderTest] = []
    with zmq.Context() as context:

        def start(**settings: Any) -> LoopUnderTest:
            config = make_config(async_scheduling=True, **settings)
            started.append(LoopUnderTest(context, tmp_path, config))
            started[0].handshake()
            return started[0]

        yield start
        for loop in started:
            loop.close()


def end_of(loop: LoopUnderTest, count: int) -> None:
    """Work until ``count`` requests of the first front end have ended."""
    ended: list[Any] = []
    loop.until(
        lambda message: isinstance(message, StepOutputs) and (ended.extend(message.ended) or len(ended) >= count)  # type: ignore[func-returns-value]
    )


def lines_in(path: Path) -> list[AnyLine]:
    return [entry.line for entry in TraceReader(path)]


def stop(loop: LoopUnderTest) -> None:
    loop.child.put(Command("stop"))
    loop.join()


def test_a_live_run_replays(start: Start, tmp_path: Path) -> None:
    """With a client that disconnects, an abort, a step out of memory, and an invalid result."""
    loop = start(trace=str(tmp_path / "t.jsonl"), max_num_batched_tokens=16)
    wrong = {4: "too large", 9: "damaged"}

    def spoil(result: ModelRunnerOutput) -> ModelRunnerOutput:
        match wrong.pop(result.step, ""):
            case "too large":
                return ModelRunnerOutput(result.step, failure="out of memory")
            case "damaged":
                return change(result, handles=np.array([77], np.int32))
        return result

    loop.spoil = spoil
    other = loop.another_client()
    loop.until(lambda message: isinstance(message, Welcome), other)
    other.send(make_request("gone", PROMPT, max_tokens=50, priority=3))
    for index in range(6):
        loop.client.send(make_request(f"r{index}", [index, *PROMPT], max_tokens=20 + index, arrival=float(index)))
    loop.client.send(make_request("r0", PROMPT, max_tokens=1))
    loop.client.send(make_request("bad", [], max_tokens=1))
    loop.client.send(Abort(["r3"]))
    other.send(Welcome(1, ""))  # a message that front ends must not send: it is disconnected
    end_of(loop, 6)
    stop(loop)
    assert replay_lines(TraceReader(tmp_path / "t.jsonl"), check=True) is None
    lines = lines_in(tmp_path / "t.jsonl")
    assert sum(isinstance(line, Arrival) for line in lines) == 7
    assert sorted(line.budget_halved for line in lines if isinstance(line, WorkerEpoch)) == [False, True] and not wrong
    assert isinstance(lines[0], Header) and isinstance(lines[-1], End)
    times = [line.now for line in lines if isinstance(line, Arrival | StepDecision | Result | Event)]
    assert times == sorted(times) and abs(times[0] - time.monotonic()) < 100


@pytest.mark.full
def test_a_compressed_trace_in_parts_replays(start: Start, tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    loop = start(trace=str(tmp_path / "t.jsonl.zst"), trace_max_bytes=500, trace_prompts=True)
    for index in range(8):
        loop.client.send(make_request(f"r{index}", [index, *PROMPT], max_tokens=60))
    end_of(loop, 8)
    stop(loop)
    assert replay_lines(TraceReader(tmp_path / "t.jsonl.zst")) is None
    arrivals = [line for line in lines_in(tmp_path / "t.jsonl.zst") if isinstance(line, Arrival)]
    assert [line.request.prompt_token_ids.tolist() for line in arrivals] == [[index, *PROMPT] for index in range(8)]


@pytest.mark.full
def test_a_failing_engine_leaves_a_dump(start: Start, tmp_path: Path) -> None:
    loop = start(crash_dump_dir=str(tmp_path / "dumps"))
    loop.client.send(make_request("fine", PROMPT, max_tokens=5))
    end_of(loop, 1)
    loop.spoil = lambda result: change(result, handles=np.array([77], np.int32), tokens=np.array([1], np.int32))
    loop.client.send(make_request("a", PROMPT, max_tokens=9))
    end_of(loop, 1)
    loop.child.put(Command("stop", text="the workers died too often"))
    loop.join()
    (dump,) = (tmp_path / "dumps").iterdir()
    assert replay_lines(TraceReader(dump), check=True) is None
    lines = lines_in(dump)
    assert [line.new_workers for line in lines if isinstance(line, WorkerEpoch)] == [True] * 3
    assert isinstance(lines[-1], End) and lines[-1].reason == "the workers died too often"


@pytest.mark.full
def test_a_dump_can_be_requested_while_running(start: Start, tmp_path: Path) -> None:
    loop = start(crash_dump_dir=str(tmp_path / "dumps"))
    loop.client.send(make_request("a", PROMPT, max_tokens=5))
    end_of(loop, 1)
    loop._loop.dump()
    loop.client.send(make_request("b", PROMPT, max_tokens=5))
    end_of(loop, 1)
    stop(loop)
    (dump,) = (tmp_path / "dumps").iterdir()
    assert replay_lines(TraceReader(dump)) is None


@pytest.mark.full
@pytest.mark.parametrize("folder", ["", "dumps"])
def test_without_a_trace_nothing_is_written(start: Start, tmp_path: Path, folder: str) -> None:
    loop = start(crash_dump_dir=str(tmp_path / folder) if folder else "")
    loop.client.send(make_request("a", PROMPT, max_tokens=5))
    end_of(loop, 1)
    stop(loop)
    assert not (tmp_path / "dumps").exists() and loop.log.complete


def test_an_unwritable_trace_fails_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--trace .*cannot be written"):
        Journal(make_config(trace=str(tmp_path / "no" / "t.jsonl")), time.monotonic)


def test_a_restarted_scheduler_continues_without_an_unwritable_trace(tmp_path: Path) -> None:
    config = make_config(trace=str(tmp_path / "no" / "t.jsonl"))
    journal = Journal(config, time.monotonic, is_restart=True)
    header = TraceHeader(config, make_layout(config), 10)
    journal.begin(header)
    journal.consumed(0, [b"frame"], Abort(["nobody"]))
    journal.close()
    assert not (tmp_path / "no").exists()


def test_trace_with_adapters_replays_and_has_no_folders(start: Start, tmp_path: Path) -> None:
    """Two contents under one name, a load that fails, an unload, and new workers that load again."""
    path = tmp_path / "run.jsonl"
    loop = start(trace=str(path), enable_lora=True, max_loras=1, max_cpu_loras=2)
    first, second, bad = adapter_ref("name", "1"), adapter_ref("name", "2"), adapter_ref("bad")
    loop.fake.adapters.folders[bad.path] = first.digest
    for number, adapter in enumerate((first, second, bad, None)):
        loop.client.send(make_request(str(number), PROMPT, max_tokens=9, adapter=adapter))
    end_of(loop, 3)
    loop.client.send(UnloadAdapter(first.name, first.digest, query=5))
    loop.until(lambda message: isinstance(message, Statistics) and message.query == 5 and message.done)
    loop.renew_worker()
    loop.wait_for_report("ready")
    loop.client.send(make_request("again", PROMPT, max_tokens=3, adapter=second))
    end_of(loop, 1)
    stop(loop)
    assert replay_lines(TraceReader(path), check=True) is None
    lines = lines_in(path)
    assert [line.request.adapter.name for line in lines if isinstance(line, Arrival) and line.request.adapter] == [
        *("name", "name", "bad", "name")
    ]
    assert b"/adapters/" not in path.read_bytes()
