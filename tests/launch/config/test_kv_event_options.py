"""The flags of cache events: refused before any process starts, or carried into the configuration."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from curve_files import make_keys

from quire.launch.config.engine_config import make_engine_config
from quire.launch.config.options import EngineOptions
from quire.protocol.errors import ConfigError


@pytest.fixture(scope="module")
def folder(checkpoint_factory: Callable[..., tuple[Path, Any]]) -> Path:
    return checkpoint_factory("qwen3")[0]


def test_all_reach_the_configuration(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = make_keys(tmp_path / "keys")
    monkeypatch.chdir(tmp_path)
    events, replay = f"ipc://{tmp_path}/events", "tcp://127.0.0.1:5558"
    options = EngineOptions(kv_events_endpoint=events, kv_events_replay_endpoint=replay, kv_events_curve_dir=keys.name)
    config = make_engine_config(options, folder=folder)
    assert (config.kv_events_endpoint, config.kv_events_replay_endpoint) == (events, replay)
    assert config.kv_events_curve_dir == str(keys), "the scheduler's process is told no relative place"
    assert make_engine_config(EngineOptions(), folder=folder).kv_events_endpoint == ""


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"kv_events_endpoint": "tcp://*:5557"}, "--kv-events-endpoint must be"),
        ({"kv_events_replay_endpoint": "tcp://127.0.0.1:5557"}, "needs --kv-events-endpoint"),
        ({"kv_events_endpoint": "tcp://127.0.0.1:5557"}, "TCP needs keys, which --kv-events-curve-dir names"),
        ({"kv_events_curve_dir": "/nowhere"}, "--kv-events-curve-dir is for tcp:// endpoints"),
        ({"kv_events_endpoint": "tcp://127.0.0.1:5557", "kv_events_curve_dir": "/nowhere"}, "there is no /nowhere"),
    ],
)
def test_what_cannot_be_is_refused(folder: Path, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make_engine_config(EngineOptions(**settings), folder=folder)


def test_events_of_no_cache_are_refused(folder: Path, tmp_path: Path) -> None:
    options = EngineOptions(kv_events_endpoint=f"ipc://{tmp_path}/events", enable_prefix_caching=False)
    with pytest.raises(ConfigError, match="--enable-prefix-caching"):
        make_engine_config(options, folder=folder)
