"""Settings of LoRA adapters: what turns them on, what needs them, and adapters that are checked at the start."""

from pathlib import Path
from typing import Any

import pytest
from adapters import make_adapter
from configs import MODEL, config_of

from quire.frontend.serve_options import ServeOptions
from quire.launch.config.adapter_modules import read_modules
from quire.launch.config.adapter_options import with_adapters
from quire.launch.config.options import EngineOptions
from quire.protocol.errors import ConfigError


@pytest.mark.parametrize("given", [{"max_loras": 4}, {"max_cpu_loras": 100}, {"max_lora_rank": 16}])
def test_sizes_need_adapters(given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} needs --enable-lora"):
        config_of(**given)
    assert getattr(config_of(enable_lora=True, **given), name) == given[name]


def test_host_memory_holds_more_adapters_than_a_step() -> None:
    with pytest.raises(ConfigError, match=r"--max-cpu-loras must be at least 65 \(--max-loras \+ 1\), not 64"):
        config_of(enable_lora=True, max_loras=64)
    assert config_of(enable_lora=True, max_loras=64, max_cpu_loras=65).max_cpu_loras == 65


@pytest.mark.parametrize("given", [{"max_loras": 0}, {"max_loras": 1025}, {"max_lora_rank": 0}, {"max_cpu_loras": 1}])
def test_sizes_have_ranges(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="must be from"):
        config_of(enable_lora=True, **given)


def test_adapters_of_a_server_turn_them_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "all").mkdir()
    engine, server = with_adapters(EngineOptions(), ServeOptions())
    assert not engine.enable_lora
    engine, server = with_adapters(EngineOptions(), ServeOptions(lora_dir="all"))
    assert (engine.enable_lora, server.lora_dir) == (True, str(tmp_path / "all"))
    modules = ["a=b/c", "d=/e=f", '{"name": "org/x", "path": "y", "base_model_name": "z"}', '{"path":"/p","name":"n"}']
    engine, server = with_adapters(EngineOptions(), ServeOptions(lora_modules=modules))
    assert engine.enable_lora
    assert server.lora_modules == [f"a={tmp_path}/b/c", "d=/e=f", f"org/x={tmp_path}/y", "n=/p"]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"lora_modules": ["a"]}, "--lora-modules must be NAME=FOLDER or .*, not 'a'"),
        ({"lora_modules": ["=x"]}, "--lora-modules must be NAME=FOLDER or .*, not '=x'"),
        *(
            ({"lora_modules": [each]}, 'or {"name": NAME without =, "path": FOLDER}, not')
            for each in ('{"name": "a"}', '{"name": "a=b", "path": "c"}', '{"name": "a", "paths": "b=c"}', '{"a=b"')
        ),
        ({"lora_dir": "/nowhere"}, "--lora-dir /nowhere is not a folder"),
    ],
)
def test_refused_forms(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        with_adapters(EngineOptions(), ServeOptions(**given))


def test_modules_are_read_at_the_start(tmp_path: Path) -> None:
    config = config_of(enable_lora=True, max_lora_rank=8)
    good, high = make_adapter(tmp_path / "a", MODEL), make_adapter(tmp_path / "high", MODEL, rank=16)
    found = read_modules([f"one={good}", f"two={good}"], config, ["tiny"])
    assert [(each.name, each.path, each.rank) for each in found] == [("one", str(good), 4), ("two", str(good), 4)]
    assert len({each.digest for each in found}) == 1
    for modules, text in (
        ([f"a={tmp_path}/none"], f"{tmp_path}/none is not a folder"),
        ([f"a={tmp_path}"], "adapter_config.json not found"),
        ([f"a={high}"], r"from 1 to 8 \(got 16\)"),
        ([f"a={good}", f"a={good}"], "'a' is the name of an adapter already"),
        ([f"tiny={good}"], "'tiny' is the name of the served model already"),
        ([f".x={good}"], "the name of an adapter must have"),
    ):
        with pytest.raises(ConfigError, match=text):
            read_modules(modules, config, ["tiny"])
