"""Fixtures for every test. What tests share lies in ``support/``, which pytest puts on the path."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from checkpoints import make_checkpoint

# Threads of several test processes that share a few cores wait for each other at every barrier.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples every time where a failure should be the change's; new ones on every run elsewhere.
hypothesis.settings.register_profile("ci", derandomize=True, deadline=None)
hypothesis.settings.register_profile("here", deadline=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "here")


@pytest.fixture(scope="session")
def checkpoint_factory(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Any]]:
    """``factory(family, **overrides)`` → (folder, transformers model), as in ``checkpoints.make_checkpoint``.

    The same arguments give the same folder, made once per session: tests that change it copy it first.
    """
    made: dict[str, tuple[Path, Any]] = {}

    def factory(family: str, **overrides: Any) -> tuple[Path, Any]:
        key = f"{family} {sorted(overrides.items())}"
        if key not in made:
            folder = tmp_path_factory.mktemp(family)
            made[key] = (folder, make_checkpoint(folder, family, **overrides))
        return made[key]

    return factory
