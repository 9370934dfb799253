"""Settings of ``quire serve`` and their ranges, as flags and in a config file: refused before a process starts."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.launch.cli import main

OUTSIDE = [
    ("port", "-1", "from 0 to 65535, not -1"),
    ("port", "65536", "from 0 to 65535, not 65536"),
    ("shutdown-timeout", "86401", "from 0 to 86400, not 86401"),
    ("health-timeout", "0", "from 0.1 to 86400, not 0"),
    ("health-timeout", "nan", "from 0.1 to 86400, not nan"),
    ("api-server-count", "0", "from 1 to 64, not 0"),
    ("api-server-count", "65", "from 1 to 64, not 65"),
    ("max-num-queued-reqs-per-key", "-1", "from 0 to 2147483647, not -1"),
    ("max-num-queued-reqs", "-1", "from 0 to 1048576"),
    ("max-num-queued-reqs", "1048577", "from 0 to 1048576"),
    ("max-prefill-share", "0", "from 0.01 to 1.0"),
    ("max-prefill-share", "1.01", "from 0.01 to 1.0"),
    ("max-prefill-share", "nan", "from 0.01 to 1.0"),
    ("watermark", "-0.1", "from 0 to 0.5"),
    ("watermark", "0.6", "from 0 to 0.5"),
    ("watermark", "inf", "from 0 to 0.5"),
    ("kv-pressure-high", "0", "from 0.01 to 1.0"),
    ("kv-pressure-low", "1.1", "from 0.01 to 1.0"),
]


@pytest.fixture(autouse=True)
def log_level() -> Iterator[None]:
    """Restore the level of the log, which the command sets."""
    before = logging.getLogger("quire").level
    yield
    logging.getLogger("quire").setLevel(before)


@pytest.mark.parametrize("prefix", ["", "7b", "a-b", "a:b", "é", "a" * 65, 'x"} 1'])
def test_a_prefix_that_is_no_metric_name_is_refused(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    error = refusal(capsys, f"--metrics-prefix={prefix}")
    assert (
        "--metrics-prefix must be 1 to 64 letters, digits and underscores" in error and f"(got {prefix!a:.60}" in error
    )


def test_keys_of_nodes_need_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--node-keys is of use only with --nodes" in refusal(capsys, "--node-keys", "keys")


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["serve", *words])
    assert ended.value.code == 78
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    return error


@pytest.mark.parametrize(("name", "value", "span"), OUTSIDE)
def test_a_value_out_of_range_is_refused_with_the_range(
    name: str, value: str, span: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(f"{name}: {'.' * (value in ('nan', 'inf'))}{value}\n")
    for words in ([f"--{name}={value}"], ["--config", str(file)]):
        assert f"--{name} must be {span}" in refusal(capsys, *words)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("api_server_cuont: 2", "unknown key 'api_server_cuont'; did you mean api_server_count?"),
        ("mem_fraction_static: 0.5", "unknown key 'mem_fraction_static'; did you mean --gpu-memory-utilization?"),
        ("port: high", "port must be an integer (got 'high')"),
        ("- port", "must be a YAML mapping"),
    ],
)
def test_a_file_with_unknown_keys_or_types_is_refused(
    line: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(f"{line}\n")
    error = refusal(capsys, "--config", str(file))
    assert f"{file}: " in error and message in error


def test_help_has_metavars_choices_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help=all"])
    text = " ".join(capsys.readouterr().out.split())
    for part in (
        *("--gpu-memory-utilization FRACTION", "fraction of GPU memory to use (0.9)"),
        *("--kv-cache-memory-bytes BYTES", "--trace FILE", "--scheduling-policy {fcfs,priority,program,continuum}"),
        *("--no-enable-prefix-caching", "reuse cached KV blocks of equal prefixes (on)", "--priority-range LOW:HIGH"),
    ):
        assert part in text, part


@pytest.mark.parametrize("words", [("--kv-pressure-high=0.9",), ("--kv-pressure-high=0.8", "--kv-pressure-low=0.9")])
def test_the_lower_limit_of_pressure_is_not_above_the_upper_one(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    error = refusal(capsys, *words)
    assert "--kv-pressure-low must be at most --kv-pressure-high" in error and "from 0.01 to 1.0" in error
