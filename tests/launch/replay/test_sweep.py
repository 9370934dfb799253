"""Sweeps: all combinations in order, in other processes, and what becomes of runs that fail."""

from pathlib import Path

import pytest

from quire.launch.replay.formats.options import LoadOptions
from quire.launch.replay.simulate.sweep import SweepTask, run_point, sweep
from quire.protocol.errors import ConfigError

EXCERPT = Path(__file__).parents[2] / "data" / "mooncake_excerpt.jsonl"


def task(**settings: str) -> SweepTask:
    return SweepTask(EXCERPT, "mooncake", LoadOptions(limit=12), settings, "constant:10", {"concurrency": 2})


@pytest.mark.slow
def test_all_combinations_come_back_in_order_and_failures_in_their_places() -> None:
    heard: list[tuple[int, int]] = []
    axes = [("block_size", ["512", "9999", "64"]), ("max_num_seqs", ["4", "2"])]
    rows = sweep(task(num_usable_blocks="4000"), axes, 2, lambda *told: heard.append(told))
    values = [(row.values["block_size"], row.values["max_num_seqs"]) for row in rows]
    assert values == [("512", "4"), ("512", "2"), ("9999", "4"), ("9999", "2"), ("64", "4"), ("64", "2")]
    assert heard == [(n, 6) for n in range(1, 7)]
    for row in rows:
        if row.values["block_size"] == "9999":
            assert row.figures is None and "--block-size must be from 1 to 1024" in row.error
            continue
        alone = run_point(task(num_usable_blocks="4000"), row.values)
        assert row.figures is not None and alone.figures is not None
        assert row.figures["settings"]["block_size"] == int(row.values["block_size"])
        for told in (row.figures, alone.figures):
            del told["wall_s"], told["speedup"]
        assert row == alone


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
