"""The newest releases of clients against ``quire serve``: second turns, loops of three calls, streams, objects.

The model is a script checkpoint. Each client's program (``tests/nightly/clients``) runs in an environment of its own;
a client that cannot be installed is skipped. docs/clients.md has a row for each client, which must say what passed.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conversations import scripts
from environments import NotInstalled, node_environment, python_environment, run_node, run_python
from script_checkpoint import make_script_checkpoint
from served import Served

pytestmark = pytest.mark.slow

PAGE = Path(__file__).resolve().parents[3] / "docs/clients.md"
CLIENTS: dict[str, tuple[str, ...]] = {
    "openai": ("openai",),
    "anthropic": ("anthropic",),
    "litellm": ("litellm", "mcp"),  # it imports mcp as soon as a request has tools, but does not require it
    "langchain": ("langchain", "langchain-openai", "langchain-anthropic", "langgraph"),
    "instructor": ("instructor", "anthropic"),
    "pydantic_ai": ("pydantic-ai-slim[openai,anthropic]",),
    "openai_agents": ("openai-agents",),
    "llama_index": ("llama-index-core", "llama-index-llms-openai-like"),
    "huggingface_hub": ("huggingface_hub",),
    "ollama": ("ollama",),
}
COLUMNS = ("second_turn", "tool_loop", "stream", "structured")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("script")
    make_script_checkpoint(folder, scripts(), max_model_len=65536)
    thinking = ("--reasoning-parser", "markers", "--reasoning-start-str", "<think>", "--reasoning-end-str", "</think>")
    served = Served(str(folder), "--served-model-name", "script", "--pooling", "last", *thinking)
    yield served
    assert served.stop() == 0
    assert not any("Traceback" in line for line in served.log), "".join(served.log)


@pytest.mark.parametrize("name", CLIENTS)
def test_python(server: Served, name: str) -> None:
    try:
        python = python_environment(name, CLIENTS[name])
    except NotInstalled as error:
        pytest.skip(f"{name} is not available: {error}")
    check(run_python(python, f"use_{name}.py", server.url))


@pytest.mark.parametrize("package", ["openai", "ollama"])
def test_node(server: Served, package: str) -> None:
    try:
        folder = node_environment(f"{package}_node", package)
    except NotInstalled as error:
        pytest.skip(f"{package} for node is not available: {error}")
    check(run_node(folder, f"use_{package}.mjs", server.url))


def check(report: Any) -> None:
    """Assert that all checks of a client passed, and that its row of the page names them."""
    versions, results = report["versions"], report["results"]
    print(versions, *results)
    failed = "\n".join(f"{name}: {error}" for name, error in results.items() if error)
    assert not failed, failed
    rows = re.findall(r"^\| (.+?) \|(.+)\|$", PAGE.read_text(), re.MULTILINE)
    first = next(iter(versions))
    said = next(cells for name, cells in rows if name.split("](")[0].strip("[` ") == first)
    cells = [cell.strip() for cell in said.split("|")[1:]]
    for column, cell in zip(COLUMNS, cells, strict=False):
        apis = dict.fromkeys(name.split("_")[0] for name in results if name.endswith(column))
        assert cell == (", ".join(apis) or "-"), column
