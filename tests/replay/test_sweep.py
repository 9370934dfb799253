"""Sweeps: all combinations in order, in other processes, and failed runs."""

from pathlib import Path

import pytest

from quire.protocol.errors import ConfigError
from quire.replay.formats.options import LoadOptions
from quire.replay.simulate.sweep import SweepTask, run_point, sweep

EXCERPT = Path(__file__).parents[1] / "data" / "mooncake_excerpt.jsonl"


def task(**settings: str) -> SweepTask:
    return SweepTask(EXCERPT, "mooncake", LoadOptions(limit=12), settings, "constant:10", {"concurrency": 2})


def test_point_merges_common_and_own_settings() -> None:
    row = run_point(task(max_num_seqs="3", num_usable_blocks="900"), {"block_size": "32"})
    assert row.error == "" and row.figures is not None
    assert row.figures["requests"] == 12
    settings = row.figures["settings"]
    assert (settings["max_num_seqs"], settings["block_size"], settings["num_usable_blocks"]) == (3, 32, 449)
    assert row.figures["title"].endswith("concurrency 2")


def test_failed_point_has_an_error() -> None:
    assert "did you mean block_size?" in run_point(task(), {"blok_size": "1"}).error
    missing = SweepTask(EXCERPT / "nothing", "mooncake", LoadOptions())
    assert "nothing" in run_point(missing, {"block_size": "16"}).error


def test_rejects_invalid_sweep_before_any_run() -> None:
    with pytest.raises(ConfigError, match="at most 4096"):
        sweep(task(), [("max_num_seqs", ["1"] * 100), ("block_size", ["16"] * 100)])
