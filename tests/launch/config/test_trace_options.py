"""The flags of traces and crash dumps: refused before any process starts, or carried as absolute places."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.launch.config.engine_config import make_engine_config
from quire.launch.config.options import EngineOptions, parse_options
from quire.launch.config.trace_options import crash_dump_dir
from quire.protocol.errors import ConfigError
from quire.version import __version__


@pytest.fixture(scope="module")
def folder(checkpoint_factory: Callable[..., tuple[Path, Any]]) -> Path:
    return checkpoint_factory("qwen3")[0]


def test_they_reach_the_configuration(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = {"trace": "t.jsonl", "trace-prompts": True, "trace_max_bytes": 2**20, "crash-dump-dir": "dumps"}
    config = make_engine_config(parse_options(given, "test"), folder=folder)
    assert (config.trace, config.trace_prompts, config.trace_max_bytes) == (str(tmp_path / "t.jsonl"), True, 2**20)
    assert config.crash_dump_dir == str(tmp_path / "dumps") and config.version == __version__
    assert not list(tmp_path.iterdir())
    assert make_engine_config(EngineOptions(), folder=folder).trace == ""


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"trace": "/no/such/folder/t.jsonl"}, "--trace /no/such/folder/t.jsonl cannot be written: /no/such/folder"),
        ({"trace": "t", "trace_max_bytes": 100}, "--trace-max-bytes must be 0 .* or at least 65536, not 100"),
        ({"trace": "t", "trace_max_bytes": -1}, "--trace-max-bytes must be"),
    ],
)
def test_what_cannot_be_is_refused(folder: Path, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make_engine_config(EngineOptions(**settings), folder=folder)


def test_dumps_go_where_such_things_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/somewhere")
    assert crash_dump_dir(None) == "/somewhere/quire/crash-dumps"
    assert crash_dump_dir("") == ""
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert crash_dump_dir(None) == "/home/me/.local/state/quire/crash-dumps"
