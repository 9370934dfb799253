"""A short run of ``run.py engines``."""

import json
from pathlib import Path

import pytest
from harness import main


@pytest.mark.slow
def test_engines_die_under_streams(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    short = ("--kills", "5", "--router-kills", "2", "--restarts", "1", "--streams", "24", "--engines", "3")
    main(["engines", *short, "--json", str(report)])
    results = json.loads(report.read_text())["results"]
    assert (results["failed"], results["changed"], results["problems"]) == (0, 0, 0)
    assert results["completed"] > 0 and results["engine_starts"] > 3
