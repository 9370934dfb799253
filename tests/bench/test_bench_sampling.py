"""``quire bench sampling``: every section runs and reports its figures, whose values depend on the machine."""

import json
from pathlib import Path
from typing import Any

import pytest

from quire.launch.cli import main

SMALL = ["--rows", "4", "--vocab-size", "512", "--repeats", "2"]


def bench(tmp_path: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    told = tmp_path / "found.json"
    main(["bench", "sampling", "--json", str(told), *flags])
    line = capsys.readouterr().out.splitlines()[-1]
    assert json.loads(line) == json.loads(told.read_text())
    results: dict[str, Any] = json.loads(line)["results"]
    return results


@pytest.mark.full
def test_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = bench(tmp_path, capsys, "--sections", "worker,masks,fall", *SMALL)
    assert list(found) == ["worker", "masks", "fall"]
    assert set(found["worker"]["unused_us"]) == {"1", "16", "64", "4"}
    for figure in ("plain_cpu_ms", "everything_cpu_ms", "ngram_us", "suffix_us"):
        assert found["worker"][figure] >= 0
    assert found["masks"]["vocab_size"] == 1024 and found["masks"]["fill_us_per_row"] > 0
    assert 0 < found["fall"]["cheap_drafts"] <= 32 and 0 < found["fall"]["dear_drafts"] <= 32


def test_unknown_section_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "sampling", "--sections", "masks,nothing"])
    assert "unknown section 'nothing' (known: worker, masks, fall, repeating)" in capsys.readouterr().err


@pytest.mark.slow
def test_repeating_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = bench(tmp_path, capsys, "--sections", "repeating", "--output-len", "128", "--rounds", "1")["repeating"][
        "demo"
    ]
    assert found["steps_drafted"] * 2 <= found["steps_plain"]
