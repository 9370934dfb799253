"""The settings of host memory and disk behind the prefix cache, and their checks before any process starts."""

from pathlib import Path

import msgspec
import pytest
from configs import MODEL, config_of

from quire.launch.config.engine_config import make_engine_config, with_api_keys
from quire.launch.config.options import parse_options
from quire.protocol.errors import ConfigError
from quire.protocol.process import host_limits


def test_default_is_zero() -> None:
    assert config_of().cpu_offload_bytes == 0


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_sizes_with_a_suffix(device: str) -> None:
    config = config_of(cpu_offload_bytes="1MiB", ssd_cache_bytes="1GiB", ssd_cache_dir="/cache", device=device)
    assert (config.cpu_offload_bytes, config.ssd_cache_bytes) == (2**20, 2**30)


def test_a_folder_on_disk_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = config_of(ssd_cache_dir="cache", ssd_cache_bytes="2GiB", device="cpu")
    assert (config.ssd_cache_dir, config.ssd_cache_bytes) == (str(tmp_path / "cache"), 2**31)


HOST = {"cpu_offload_bytes": 2**20}
DISK = {"ssd_cache_dir": "/cache", "ssd_cache_bytes": 2**30}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cpu_offload_bytes": -1}, "--cpu-offload-bytes must be from 0 to"),
        (HOST | {"enable_prefix_caching": False}, "--cpu-offload-bytes needs --enable-prefix-caching"),
        (DISK | {"ssd_cache_bytes": 0}, "--ssd-cache-dir needs --ssd-cache-bytes"),
        (DISK | {"ssd_cache_dir": ""}, "--ssd-cache-bytes needs --ssd-cache-dir"),
        (DISK | {"ssd_cache_bytes": -1}, "--ssd-cache-bytes must be from 0 to"),
        (DISK | {"enable_prefix_caching": False}, "--ssd-cache-bytes needs --enable-prefix-caching"),
    ],
)
def test_unusable_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(device="cpu", **settings)


def test_isolated_keys_have_a_folder_of_their_own() -> None:
    """Block hashes name tenants by number, so other keys, or another order, must not find their contents."""
    config = config_of(ssd_cache_dir="/cache", ssd_cache_bytes=2**30, device="cpu")
    keys = [[], ["a"], ["a", "b"], ["b", "a"], ["a", "c"], ["a", "b"]]
    none, one, *several, again = [with_api_keys(config, each).ssd_cache_dir for each in keys]
    assert none == one == "/cache" and again == several[0]
    assert len(set(several)) == 3 and all(folder.startswith("/cache/keys-") for folder in several)
    assert (
        with_api_keys(msgspec.structs.replace(config, isolate_prefix_cache_by_key=False), keys[2]).ssd_cache_dir
        == "/cache"
    )


def test_more_memory_than_is_free_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_limits, "available_bytes", lambda: 1000)
    assert config_of(cpu_offload_bytes=1000, device="cpu").cpu_offload_bytes == 1000
    with pytest.raises(ConfigError, match=r"at most 1000, the host memory that is free \(got 1001\)"):
        config_of(cpu_offload_bytes=1001, device="cpu")


def test_a_simulated_engine_does_not_change_the_costs_of_a_real_one() -> None:
    assert config_of().learned_costs_dir.endswith("quire/costs")
    assert make_engine_config(parse_options({}, "LLM"), MODEL, simulated=True).learned_costs_dir == ""
