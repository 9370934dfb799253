"""Fixtures for every test. Modules beside the tests are loaded by path: importlib mode gives them no import name."""

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

# Threads of several test processes that share a few cores wait for each other at every barrier.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"quire_tests_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def checkpoint_factory(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Any]]:
    """``factory(family, **overrides)`` → (folder, transformers model), as in ``checkpoints.make_checkpoint``.

    The same arguments give the same folder, made once per session: tests that change it copy it first.
    """
    make = _load("checkpoints").make_checkpoint
    made: dict[str, tuple[Path, Any]] = {}

    def factory(family: str, **overrides: Any) -> tuple[Path, Any]:
        key = f"{family} {sorted(overrides.items())}"
        if key not in made:
            folder = tmp_path_factory.mktemp(family)
            made[key] = (folder, make(folder, family, **overrides))
        return made[key]

    return factory
