"""Loading of plugins: each way in which one can be unusable has its own error."""

import os
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from types import SimpleNamespace

import pytest

from quire.protocol.errors import ConfigError, InvalidRequest
from quire.protocol.request import plugins
from quire.protocol.request.plugins import ENTRY_POINT_GROUP, check_params, load_logits_processors
from quire.protocol.request.sampling_params import SamplingParams

PREFERS = "processor_plugins:Prefers"
Write = Callable[[str, str], None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Return a function that creates a module importable only in this test."""
    monkeypatch.syspath_prepend(tmp_path)

    def write_module(name: str, text: str) -> None:
        monkeypatch.delitem(sys.modules, name, raising=False)
        (tmp_path / f"{name}.py").write_text(text)

    return write_module


def install(monkeypatch: pytest.MonkeyPatch, **points: str) -> None:
    found = EntryPoints([EntryPoint(name, value, ENTRY_POINT_GROUP) for name, value in points.items()])
    monkeypatch.setattr(plugins, "entry_points", lambda group: found.select(group=group))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("processor_plugins", "must have the form module:Class"),
        (":Prefers", "must have the form module:Class"),
        ("processor_plugins:", "must have the form module:Class"),
        ("no_such_plugin:Prefers", "module no_such_plugin not found"),
        ("processor_plugins.deeper:Prefers", "module processor_plugins.deeper not found"),
        ("processor_plugins:Missing", "module processor_plugins has no Missing"),
        ("processor_plugins:Prefers.Missing", "module processor_plugins has no Prefers.Missing"),
        ("processor_plugins:NOT_A_CLASS", "NOT_A_CLASS is not a class"),
        ("processor_plugins:NotAProcessor", "NotAProcessor is not a subclass of LogitsProcessor"),
    ],
)
def test_error_names_the_plugin_and_the_reason(name: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_logits_processors([PREFERS, name])
    assert str(caught.value).startswith(f"logits processor {name}") and why in str(caught.value)


def test_failed_import_is_reported_in_one_line(write: Write) -> None:
    write("raising_plugin", "raise RuntimeError('no\\nluck')")
    with pytest.raises(ConfigError, match=r"raising_plugin:X: import raised RuntimeError: no luck$"):
        load_logits_processors(["raising_plugin:X"])


def test_missing_dependency_of_a_plugin_is_named(write: Write) -> None:
    write("missing_plugin", "import no_such_library")
    with pytest.raises(ConfigError, match="missing_plugin:X: module no_such_library not found"):
        load_logits_processors(["missing_plugin:X"])


def test_installed_plugins_come_first_without_duplicates(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, second="processor_plugins:Prefers", first="processor_plugins:Halve")
    names = [cls.__name__ for cls in load_logits_processors(["processor_plugins:AddText", PREFERS])]
    assert names == ["Halve", "Prefers", "AddText"]


def test_installed_plugins_can_be_excluded(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, second="processor_plugins:Prefers", first="processor_plugins:Halve")
    assert [cls.__name__ for cls in load_logits_processors([], ["first"])] == ["Prefers"]
    with pytest.raises(ConfigError, match=r"exclude: third is not installed \(installed: first, second\)"):
        load_logits_processors([], ["third"])


def test_installed_plugin_is_named_by_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, own="processor_plugins:Missing")
    with pytest.raises(ConfigError, match=r"logits processor own \(processor_plugins:Missing\): module"):
        load_logits_processors([])


def test_nested_class_is_loaded(write: Write) -> None:
    write("nested_plugin", "import processor_plugins\nclass Outer:\n    Inner = processor_plugins.Halve\n")
    assert [cls.__name__ for cls in load_logits_processors(["nested_plugin:Outer.Inner"])] == ["Halve"]


@pytest.mark.parametrize("devices", ["0,1", None])
def test_import_sees_no_device(write: Write, monkeypatch: pytest.MonkeyPatch, devices: str | None) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if devices is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
    write(
        "looking_plugin", "import os\nfrom processor_plugins import Halve\nSEEN = os.environ['CUDA_VISIBLE_DEVICES']\n"
    )
    load_logits_processors(["looking_plugin:Halve"])
    assert sys.modules["looking_plugin"].SEEN == ""
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == devices


def test_devices_are_restored_after_a_failed_import(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    write("late_plugin", "1 / 0")
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        load_logits_processors(["late_plugin:X"])
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"


@pytest.mark.parametrize(("before", "refused"), [(False, True), (True, False)])
def test_import_must_not_initialize_cuda(
    write: Write, monkeypatch: pytest.MonkeyPatch, before: bool, refused: bool
) -> None:
    used = [before]
    torch = SimpleNamespace(
        cuda=SimpleNamespace(is_initialized=lambda: used[0], init=lambda: used.__setitem__(0, True))
    )
    write("greedy_plugin", "import torch\ntorch.cuda.init()\nfrom processor_plugins import Halve\n")
    load_logits_processors(["processor_plugins:Halve"])  # with the torch that it needs
    monkeypatch.setitem(sys.modules, "torch", torch)
    if refused:
        with pytest.raises(ConfigError, match="greedy_plugin:Halve: it uses CUDA during import"):
            load_logits_processors(["greedy_plugin:Halve"])
    else:
        load_logits_processors(["greedy_plugin:Halve"])


def validate(prefers: object) -> None:
    check_params(load_logits_processors([PREFERS]), SamplingParams(extra_args={"prefers": prefers}))  # type: ignore[dict-item]


def test_request_is_rejected_with_the_plugins_text() -> None:
    validate(3)
    with pytest.raises(InvalidRequest, match="prefers must be a token id, not 'x'") as caught:
        validate("x")
    assert caught.value.param == "extra_args"


def test_failing_validation_rejects_the_request() -> None:
    with pytest.raises(
        InvalidRequest, match="logits processor Prefers failed to validate the request: TypeError"
    ) as caught:
        validate(True)
    assert caught.value.param == "extra_args"
