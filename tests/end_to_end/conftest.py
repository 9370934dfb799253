"""The server that the end-to-end tests of the demo model share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from adapters import make_adapter
from engine_processes import SHARED
from served import Served

from quire.launch.config.model_folder import DEMO_MODEL
from quire.protocol.model.model_config import load_model_config


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters of the demo model: one, two and three differ in rank, projections and values; bad cannot be used."""
    folder, model = tmp_path_factory.mktemp("adapters"), load_model_config(DEMO_MODEL)
    make_adapter(folder / "one", model, seed=1, size=1.0)
    make_adapter(folder / "two", model, seed=2, size=1.0, rank=7, alpha=3.5, projections=("q_proj", "down_proj"))
    make_adapter(folder / "three", model, seed=3, size=1.0, rank=16, projections=("v_proj", "o_proj", "up_proj"))
    make_adapter(folder / "bad", model, settings={"use_dora": True})
    return folder


@pytest.fixture(scope="session")
def demo_server(adapters: Path) -> Iterator[Served]:
    """The demo model, two front ends, four adapters, and two adapters in a step.

    A test may kill its processes, but not the first one.
    """
    flags = ("--dtype", "float32", "--deterministic", "--num-gpu-blocks-override", "2000", "--api-server-count", "2")
    loras = ("--lora-modules", f"one={adapters / 'one'}", "--lora-dir", str(adapters), "--max-loras", "2")
    server = Served(*flags, *loras, "--max-cpu-loras", "3", "--admin-api-key", "admin")
    SHARED.add(server.process.pid)
    yield server
    SHARED.discard(server.process.pid)
    server.end()


@pytest.fixture(autouse=True)
def _idle(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check after each test that the shared server has no requests and no blocks in use."""
    yield
    if "demo_server" in request.fixturenames:
        request.getfixturevalue("demo_server").wait_until_idle()
