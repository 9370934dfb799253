"""What a step costs on the wire, and that the Scheduler believes the synthetic worker behind the figures."""

import argparse
import json

import numpy as np
import pytest

from quire.launch.bench.wire import WireEngine, measure_decode, measure_new_prompts, run
from quire.protocol.errors import ConfigError
from quire.protocol.wire.front_end_messages import StepOutputs


def test_a_step_of_256_steady_decodes_fits_one_kibibyte() -> None:
    found = measure_decode(num_requests=256, steps=64)
    assert found["SchedulerOutput"]["bytes"]["mean"] <= 1024
    assert found["SchedulerOutput"]["bytes"]["max"] <= 1024


@pytest.mark.full
def test_cost_follows_change_and_not_the_batch() -> None:
    """Only newly given blocks are named: a sixteenth of the requests per step."""
    few, many = (measure_decode(num_requests=n, steps=32)["SchedulerOutput"]["bytes"]["mean"] for n in (16, 256))
    assert few < 64
    assert (many - few) / 240 < 1.0  # bytes per request


def test_a_result_is_little_more_than_its_tokens() -> None:
    found = measure_decode(num_requests=256, steps=32)
    assert found["ModelRunnerOutput"]["bytes"]["max"] <= 256 * 4 + 64


def test_every_message_was_recorded() -> None:
    found = measure_decode(num_requests=4, steps=8)
    assert set(found) == {"SchedulerOutput", "ModelRunnerOutput", "StepOutputs"}
    for kinds in found.values():
        assert all(kinds[name]["mean"] > 0 for name in ("bytes", "encode_us", "decode_us"))


def test_new_prompts_are_little_more_than_their_tokens() -> None:
    tokens = 8 * 2048
    assert tokens * 4 <= measure_new_prompts()["bytes"]["mean"] <= tokens * 4 + 8192


def test_requests_of_the_synthetic_worker_run_to_their_ends() -> None:
    """Chunks of 16 tokens, more requests than rows, a pipeline of two: every token arrives, and nothing is left."""
    engine = WireEngine(max_num_seqs=4, max_model_len=64, num_batched_tokens=16)
    for index in range(9):
        engine.add(index, np.arange(3, 3 + 5 * (index + 1), dtype=np.int32), max_tokens=10)
    counted: dict[int, int] = {}
    ended = 0
    while ended < 9:
        for message in engine.step(record=False):
            assert isinstance(message, StepOutputs)
            for handle in [] if message.handles is None else message.handles.tolist():
                counted[handle] = counted.get(handle, 0) + 1
            ended += len(message.ended)
            assert all(end.num_output_tokens == 10 for end in message.ended)
        engine.scheduler.check()
    assert sum(counted.values()) == 90
    statistics = engine.scheduler.statistics()
    assert statistics.num_free_blocks == statistics.num_usable_blocks


@pytest.mark.parametrize(("name", "value"), [("num_requests", 0), ("num_requests", 4097), ("steps", 0)])
def test_flags_out_of_range(name: str, value: int) -> None:
    args = argparse.Namespace(**({"num_requests": 4, "steps": 4, "json": None} | {name: value}))
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} must be from"):
        run(args)


def test_report(capsys: pytest.CaptureFixture[str]) -> None:
    run(argparse.Namespace(num_requests=4, steps=4, json=None))
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["settings"]["num_requests"] == 4
    assert found["results"]["decode"]["SchedulerOutput"]["bytes"]["mean"] > 0
