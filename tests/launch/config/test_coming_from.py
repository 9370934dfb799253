"""docs/coming_from.md and the suggestions for unknown flags: what they name exists, and both agree."""

import argparse
import re
from functools import cache
from pathlib import Path

import pytest
from exported_metrics import exported_labels

from quire.launch.cli import _make_parser, main
from quire.launch.config.foreign_names import FOREIGN_NAMES, NO_EQUIVALENT, suggest

PAGE = (Path(__file__).parents[3] / "docs/coming_from.md").read_text()
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")


@cache
def serve_parser() -> argparse.ArgumentParser:
    return _make_parser("serve")[1]


@cache
def flags() -> frozenset[str]:
    return frozenset(flag for action in serve_parser()._actions for flag in action.option_strings)


def section(title: str) -> str:
    return PAGE.split(f"## {title}\n")[1].split("\n## ")[0]


def rows(title: str) -> list[list[str]]:
    """Return the cells of the section's table, without its head."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


FLAG_ROWS = [row for title in ("Flags of vLLM", "Flags of llama.cpp's server") for row in rows(title)]


def test_flags_with_the_same_name_exist() -> None:
    listed = section("Flags of vLLM").split("These differ")[0]
    assert len(FLAG.findall(listed)) >= 30
    assert set(FLAG.findall(listed)) <= flags()


@pytest.mark.parametrize("row", FLAG_ROWS, ids=lambda row: row[0].strip("`"))
def test_rows_agree_with_the_suggestions(row: list[str]) -> None:
    theirs, ours = row[0].strip("`"), row[1].strip("`")
    assert set(FLAG.findall(" ".join(row[1:]))) <= flags()
    if theirs in flags():
        assert ours == theirs
        return
    suggested = suggest(theirs.lstrip("-").replace("-", "_"), flags())
    if ours == "none":
        assert suggested and "did you mean" not in suggested
    else:
        assert suggested.startswith(f"; did you mean {ours}"), suggested


def test_other_flags_of_the_page_exist() -> None:
    for title in ("Metrics", "Behaviour", "What Quire does not support"):
        assert set(FLAG.findall(section(title))) <= flags(), title


def test_metrics_of_the_page_exist() -> None:
    named = set(re.findall(r"quire:\w+", section("Metrics")))
    assert len(named) >= 6
    assert named <= exported_labels("quire").keys()


def test_suggestions_name_flags_that_exist() -> None:
    for name, text in [*FOREIGN_NAMES.items(), *NO_EQUIVALENT.items()]:
        assert set(FLAG.findall(text)) <= flags(), name
    assert not FOREIGN_NAMES.keys() & NO_EQUIVALENT.keys()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "m"], "unknown flag --model; did you mean MODEL (the first argument)?"),
        (["--ctx-size=8192"], "unknown flag --ctx-size; did you mean --max-model-len?"),
        (["--load-in-4bit"], "unknown flag --load-in-4bit; did you mean --quantization int4?"),
        (["--enable-auto-tool-choice"], "unknown flag --enable-auto-tool-choice; tools need no flag"),
        (["--data-parallel-rank", "0"], "unknown flag --data-parallel-rank; not needed: one server starts all engines"),
        (["-ngl", "99"], "unknown flag -ngl; a model is on one kind of device"),
    ],
)
def test_unknown_flags_get_the_suggestion(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", *words])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and message in error and error.count("\n") == 1, error
