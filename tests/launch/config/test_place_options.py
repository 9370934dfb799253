"""Flags with paths and addresses, for cache events, traces and crash dumps: made absolute, or refused at start."""

from pathlib import Path
from typing import Any

import pytest
from configs import config_of
from curve_files import make_keys

from quire.launch.config.trace_options import crash_dump_dir
from quire.protocol.errors import ConfigError
from quire.version import __version__


def test_cache_event_addresses_reach_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = make_keys(tmp_path / "keys")
    monkeypatch.chdir(tmp_path)
    events, replay = f"ipc://{tmp_path}/events", "tcp://127.0.0.1:5558"
    config = config_of(kv_events_endpoint=events, kv_events_replay_endpoint=replay, kv_events_curve_dir=keys.name)
    assert (config.kv_events_endpoint, config.kv_events_replay_endpoint) == (events, replay)
    assert config.kv_events_curve_dir == str(keys), "the scheduler process must get absolute paths"
    assert config_of().kv_events_endpoint == ""


def test_cache_events_may_have_the_format_of_vllm_and_no_keys() -> None:
    given = {"kv_events_format": "vllm", "kv_events_topic": "kv@pod@model", "kv_events_without_keys": True}
    config = config_of(
        kv_events_endpoint="tcp://10.0.0.1:5557", kv_events_replay_endpoint="tcp://10.0.0.1:5657", **given
    )
    assert (config.kv_events_format, config.kv_events_topic) == ("vllm", "kv@pod@model")
    assert config_of().kv_events_format == "quire"


def test_trace_and_dump_paths_reach_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = {"trace": "t.jsonl", "trace-prompts": True, "trace_max_bytes": 2**20, "crash-dump-dir": "dumps"}
    config = config_of(**given)
    assert (config.trace, config.trace_prompts, config.trace_max_bytes) == (str(tmp_path / "t.jsonl"), True, 2**20)
    assert config.crash_dump_dir == str(tmp_path / "dumps") and config.version == __version__
    assert not list(tmp_path.iterdir())
    assert config_of().trace == ""


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"kv_events_endpoint": "tcp://*:5557"}, "--kv-events-endpoint must be"),
        ({"kv_events_replay_endpoint": "tcp://127.0.0.1:5557"}, "needs --kv-events-endpoint"),
        ({"kv_events_endpoint": "tcp://127.0.0.1:5557"}, "TCP needs CURVE keys.*set --kv-events-curve-dir"),
        ({"kv_events_curve_dir": "/nowhere"}, "--kv-events-curve-dir needs a tcp"),
        ({"kv_events_endpoint": "tcp://127.0.0.1:5557", "kv_events_curve_dir": "/nowhere"}, "/nowhere not found"),
        ({"kv_events_format": "vllm"}, "--kv-events-format vllm needs --kv-events-endpoint"),
        ({"kv_events_topic": "kv"}, "--kv-events-topic 'kv' needs --kv-events-format vllm"),
        ({"kv_events_without_keys": True}, "--kv-events-without-keys needs a tcp:// endpoint"),
        ({"trace": "/no/such/folder/t.jsonl"}, "--trace /no/such/folder/t.jsonl cannot be written: /no/such/folder"),
        ({"trace": "t", "trace_max_bytes": 100}, "--trace-max-bytes must be 0 .* or at least 65536, not 100"),
        ({"trace": "t", "trace_max_bytes": -1}, "--trace-max-bytes must be"),
    ],
)
def test_invalid_places_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        config_of(**settings)


def test_events_without_prefix_caching_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--enable-prefix-caching"):
        config_of(kv_events_endpoint=f"ipc://{tmp_path}/events", enable_prefix_caching=False)


def test_crash_dump_dir_defaults_to_the_state_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/somewhere")
    assert crash_dump_dir(None) == "/somewhere/quire/crash-dumps"
    assert crash_dump_dir("") == ""
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert crash_dump_dir(None) == "/home/me/.local/state/quire/crash-dumps"
