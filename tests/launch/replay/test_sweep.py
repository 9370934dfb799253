"""Sweeps: all combinations in order, in other processes, and what becomes of runs that fail."""

from pathlib import Path

import pytest

from quire.launch.replay.formats.options import LoadOptions
from quire.launch.replay.simulate.sweep import SweepTask, run_point, sweep
from quire.protocol.errors import ConfigError

EXCERPT = Path(__file__).parents[2] / "data" / "mooncake_excerpt.jsonl"


def task(**settings: str) -> SweepTask:
    return SweepTask(EXCERPT, "mooncake", LoadOptions(limit=12), settings, "constant:10", {"concurrency": 2})


def test_one_point_takes_the_common_settings_and_its_own() -> None:
    row = run_point(task(max_num_seqs="3", num_usable_blocks="900"), {"block_size": "128"})
    assert row.error == "" and row.figures is not None
    assert row.figures["requests"] == 12
    told = row.figures["settings"]
    assert (told["max_num_seqs"], told["block_size"], told["num_usable_blocks"]) == (3, 128, 900)
    assert row.figures["title"].endswith("2 at a time")


def test_a_failed_point_says_why() -> None:
    assert "did you mean block_size?" in run_point(task(), {"blok_size": "1"}).error
    missing = SweepTask(EXCERPT / "nothing", "mooncake", LoadOptions())
    assert "nothing" in run_point(missing, {"block_size": "16"}).error


def test_what_can_not_be_swept_is_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match="at most 4096"):
        sweep(task(), [("max_num_seqs", ["1"] * 100), ("block_size", ["16"] * 100)])
