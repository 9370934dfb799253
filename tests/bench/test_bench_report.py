"""The output of benchmarks, and the named model shapes."""

import io
import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from quire.bench.measure.report import (
    RunReport,
    Table,
    distribution,
    distribution_row,
    format_value,
    machine_facts,
    rounded,
)
from quire.bench.measure.shapes import SHAPES, checkpoint_config, find_shape
from quire.protocol.errors import ConfigError
from quire.protocol.model.model_config import parse_model_config


@pytest.mark.parametrize(
    ("values", "figures"),
    [(range(100, 0, -1), (50.5, 50, 90, 99, 100)), ([7.0], (7.0,) * 5), ([1, 2], (1.5, 1, 2, 2, 2))],
)
def test_distribution_uses_nearest_rank(values: Sequence[float], figures: tuple[float, ...]) -> None:
    assert tuple(distribution(values)[name] for name in ("mean", "p50", "p90", "p99", "max")) == figures


def test_distribution_of_no_values() -> None:
    assert distribution([]) == {}
    assert distribution_row("x", {}) == ("x", [None] * 5)


class TestText:
    @pytest.mark.parametrize(
        ("value", "text"),
        [
            (None, "-"),
            ("word", "word"),
            (3, "3"),
            (12345, "12,345"),
            (1234.5, "1,234"),
            (123.45, "123.5"),
            (1.2345, "1.23"),
            (0.01234, "0.012"),
        ],
    )
    def test_digits(self, value: float | str | None, text: str) -> None:
        assert format_value(value) == text

    def test_columns_line_up(self) -> None:
        table = Table("title", ("a", "long name"), [("row", [1, 2]), ("a longer row", [10000, None])])
        assert table.text().splitlines() == [
            "title              a  long name",
            "row                1          2",
            "a longer row  10,000          -",
        ]

    def test_rounding_is_deep(self) -> None:
        assert rounded({"a": [1.23456, {"b": 2.0}], "n": 3}, 2) == {"a": [1.23, {"b": 2.0}], "n": 3}


class TestReport:
    def report(self) -> RunReport:
        return RunReport("x", {"n": 1}, {"speed": 2.5}, [Table("t", ("c",), [("r", [1])])], ["a note"])

    def test_last_line_is_the_json(self) -> None:
        out = io.StringIO()
        self.report().publish(None, out)
        *above, last = out.getvalue().splitlines()
        assert "a note" in above
        found = json.loads(last)
        assert (found["benchmark"], found["settings"], found["results"]) == ("x", {"n": 1}, {"speed": 2.5})

    def test_file_holds_the_same_line(self, tmp_path: Path) -> None:
        out = io.StringIO()
        self.report().publish(tmp_path / "r.json", out)
        assert (tmp_path / "r.json").read_text() == out.getvalue().splitlines()[-1] + "\n"

    def test_a_dash_prints_the_json_alone(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        out = io.StringIO()
        self.report().publish(Path("-"), out)
        (line,) = out.getvalue().splitlines()
        assert json.loads(line)["notes"] == ["a note"] and not list(tmp_path.iterdir())

    def test_file_that_cannot_be_written(self, tmp_path: Path) -> None:
        out = io.StringIO()
        with pytest.raises(ConfigError, match="--json"):
            self.report().publish(tmp_path / "missing" / "r.json", out)
        assert json.loads(out.getvalue().splitlines()[-1])["benchmark"] == "x"

    def test_machine_facts_have_no_paths(self) -> None:
        import platform

        facts = machine_facts()
        assert facts["cores"] >= 1 and facts["cpu"]
        assert facts["packages"]["quire"]
        assert str(Path.cwd()) not in json.dumps(facts)
        assert platform.node() == "" or platform.node() not in json.dumps(facts)


class TestShapes:
    @pytest.mark.parametrize("name", sorted(SHAPES))
    def test_config_json_parses_to_the_shape(self, name: str) -> None:
        """Experts of the folder are not quantised."""
        expected = SHAPES[name]
        if expected.moe is not None:
            expected = msgspec.structs.replace(expected, moe=msgspec.structs.replace(expected.moe, mxfp4=False))
        assert parse_model_config(checkpoint_config(name), name) == expected

    def test_closest_name_is_suggested(self) -> None:
        with pytest.raises(ConfigError, match="did you mean smollm2-135m"):
            find_shape("SmolLM2-135")

    def test_all_names_are_listed_if_none_is_close(self) -> None:
        with pytest.raises(ConfigError, match=r"known: tiny, smollm2-135m"):
            find_shape("zzz")
