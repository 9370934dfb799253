"""``quire bench wire``: sizes of messages; the Scheduler accepts the results of the synthetic worker."""

import argparse
import json

import pytest

from quire.bench.wire import measure_decode, measure_new_prompts, run
from quire.protocol.errors import ConfigError


def test_sizes_of_a_step_of_256_steady_decodes() -> None:
    found = measure_decode(num_requests=256, steps=64)
    assert found["SchedulerOutput"]["bytes"]["max"] <= 1024
    assert found["ModelRunnerOutput"]["bytes"]["max"] <= 256 * 4 + 64


@pytest.mark.full
def test_size_follows_changes_and_not_the_batch() -> None:
    """Only new blocks are sent: those of a sixteenth of the requests per step."""
    few, many = (measure_decode(num_requests=n, steps=32)["SchedulerOutput"]["bytes"]["mean"] for n in (16, 256))
    assert few < 64
    assert (many - few) / 240 < 1.0  # bytes per request


def test_new_prompts_are_little_larger_than_their_tokens() -> None:
    tokens = 8 * 2048
    assert tokens * 4 <= measure_new_prompts()["bytes"]["mean"] <= tokens * 4 + 8192


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
