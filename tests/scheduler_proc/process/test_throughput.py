"""The throughput line of the log."""

import logging
from pathlib import Path
from typing import Any

import pytest
import zmq
from loop_under_test import LoopUnderTest
from scheduler_driver import Driver, make_config, make_request

from quire.protocol.wire.front_end_messages import StepOutputs
from quire.scheduler_proc.process import throughput
from quire.scheduler_proc.process.throughput import ThroughputLog

PROMPT = [3, 1, 4, 1, 5]


def records(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [record.data for record in caplog.records if getattr(record, "event", "") == "throughput"]  # type: ignore[attr-defined]


def test_rates_are_those_of_the_interval(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "quire.scheduler")
    driver = Driver()
    line = ThroughputLog(100.0)
    assert line.due == 110.0
    line.report(None, 110.0)  # still loading
    line.report(driver.scheduler, 120.0)
    assert not records(caplog) and line.due == 130.0
    driver.add("a", PROMPT, max_tokens=20, ignore_eos=True)
    driver.run()
    driver.add("b", PROMPT, max_tokens=20, ignore_eos=True)
    line.report(driver.scheduler, 130.0)
    (data,) = records(caplog)
    assert data["prompt_tokens_per_s"] == 1.0 and data["output_tokens_per_s"] == 2.0
    assert (data["running"], data["waiting"], data["preemptions"]) == (0, 1, 0)
    assert data["kv_use"] == 0.0 and "draft_acceptance" not in data
    line.report(driver.scheduler, 140.0)  # a request waits: that is work
    assert records(caplog)[1]["output_tokens_per_s"] == 0.0
    driver.run()
    line.report(driver.scheduler, 150.0)
    line.report(driver.scheduler, 160.0)
    assert len(records(caplog)) == 3


def test_no_line_at_level_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "quire.scheduler")
    driver = Driver()
    driver.add("a", PROMPT)
    ThroughputLog(0.0).report(driver.scheduler, 10.0)
    assert not records(caplog)


def test_the_loop_reports_while_it_steps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "quire.scheduler")

    def has_ended(message: object) -> bool:
        loop.now += throughput.INTERVAL_S
        return isinstance(message, StepOutputs) and bool(message.ended)

    with zmq.Context() as context:
        loop = LoopUnderTest(context, tmp_path, make_config())
        loop.handshake()
        loop.client.send(make_request("a", PROMPT, max_tokens=30, ignore_eos=True))
        loop.until(has_ended)
        loop.stop()
    assert any(data["running"] == 1 for data in records(caplog))
