"""Replays measured runs of a real engine with their own layer profiles, and compares mean latencies.

Needs the directory of traces (``QUIRE_TRACES``), and replays each run in its folder ``measured_vllm``. The simulator
has no knowledge of these runs: the profile, the settings and the engine's policies come from that directory.
"""

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from measured_runs import SETTINGS, measured_settings, measured_workload

from quire.replay.run.run_record import RequestRun, RunRecord
from quire.replay.simulate.whatif import prepare, run_workload

MOST_OFF = {"ttft": 0.05, "tpot": 0.02, "e2e": 0.03}
MOST_OFF_TOGETHER = {"ttft": 0.05, "tpot": 0.05, "e2e": 0.05}
"""For engines that share experts."""

MEASURED: dict[str, Callable[[dict[str, Any]], float]] = {
    "ttft": lambda r: r["first_token_ts"] - r["queued_ts"],
    "tpot": lambda r: (r["last_token_ts"] - r["first_token_ts"]) / (r["output_toks"] - 1),
    "e2e": lambda r: r["last_token_ts"] - r["queued_ts"],
}
REPLAYED: dict[str, Callable[[RequestRun], float]] = {
    "ttft": lambda r: r.first_token - r.arrival,
    "tpot": lambda r: (r.end - r.first_token) / (r.num_output_tokens - 1),
    "e2e": lambda r: r.end - r.arrival,
}


def _runs() -> list[str]:
    """Return the names of the runs that are there, and of those that should be."""
    traces = os.environ.get("QUIRE_TRACES")
    found = Path(traces).glob("measured_vllm/*/requests.jsonl.gz") if traces else []
    return sorted({*SETTINGS, *(path.parent.name for path in found)})


@pytest.fixture(scope="module", params=_runs())
def folder(request: pytest.FixtureRequest) -> Path:
    traces = os.environ.get("QUIRE_TRACES")
    if not traces:
        pytest.skip("QUIRE_TRACES is not set to the directory of traces")
    return Path(traces) / "measured_vllm" / str(request.param)


@pytest.fixture(scope="module")
def record(folder: Path) -> RunRecord:
    workload = measured_workload(folder)
    setup, cost = prepare(workload, measured_settings(folder), f"table:{folder}")
    assert setup.shown["like"] == "vllm-0.19.0" and "profile of " in cost.describe()
    return run_workload(workload, setup, cost)


@pytest.mark.parametrize("figure", MOST_OFF)
def test_means_are_near_the_measured_ones(folder: Path, record: RunRecord, figure: str) -> None:
    with gzip.open(folder / "requests.jsonl.gz", "rt", encoding="utf-8") as file:
        measured = [MEASURED[figure](json.loads(line)) for line in file]
    replayed = [REPLAYED[figure](run) for run in record.requests]
    assert len(replayed) == len(measured) == 300
    most_off = MOST_OFF_TOGETHER if "experts over" in record.cost else MOST_OFF
    assert sum(replayed) == pytest.approx(sum(measured), rel=most_off[figure])
