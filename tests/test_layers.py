"""The layers are imports, and this walks them: who may import whom. (What nobody may use: test_bans.py.)"""

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from itertools import accumulate, pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("protocol", "scheduler_proc", "worker_proc", "kernels", "launch")
ALLOWED = {
    "protocol": {"protocol"},
    "scheduler_proc": {"protocol", "scheduler_proc"},
    "kernels": {"kernels"},
    "worker_proc": {"protocol", "kernels", "worker_proc"},
    "launch": {"protocol", "scheduler_proc", "launch", "version"},
}
TORCH_FREE = ("protocol", "scheduler_proc", "launch")
HEAVY = {"torch", "transformers", "triton"}


def _files(*packages: str) -> Iterator[Path]:
    for package in packages:
        yield from sorted((ROOT / package).rglob("*.py"))


def _imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{file}: relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _graph() -> dict[str, set[str]]:
    """Each of our modules, and those that it imports."""
    files = {".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in _files(*PACKAGES)}
    files = {module.removesuffix(".__init__"): file for module, file in files.items()}
    graph = {module: {name.removeprefix("quire.") for name in _imports(file)} for module, file in files.items()}
    return {module: imported & graph.keys() - {module} for module, imported in graph.items()}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_layer_imports_only_the_layers_below(package: str) -> None:
    for file in _files(package):
        for name in _imports(file):
            if name.startswith("quire."):
                assert name.split(".")[1] in ALLOWED[package], f"{file.relative_to(ROOT)} imports {name}"


def test_no_import_circle() -> None:
    tuple(TopologicalSorter(_graph()).static_order())  # raises CycleError, which names one


def _joined(above: tuple[str, str], part: tuple[str, str]) -> tuple[str, str]:
    return f"{above[0]}.{part[0]}", f"{above[1]}.{part[1]}"


def test_between_the_folders_of_a_package_the_arrows_run_one_way() -> None:
    """A folder that another imports from imports nothing from that, not even by way of others, at any depth.

    A module beside the folders counts as one.
    """
    arrows: dict[str, set[str]] = {}
    for module, imported in _graph().items():
        for name in imported:
            pairs = pairwise(accumulate(zip(module.split("."), name.split("."), strict=False), _joined))
            for (above, same), (at, to) in pairs:
                if above == same and at != to:
                    arrows.setdefault(at, set()).add(to)
    tuple(TopologicalSorter(arrows).static_order())


def test_no_folder_has_more_than_20_modules() -> None:
    files = [file for file in _files(*PACKAGES) if file.name != "__init__.py"]
    folders = Counter(str(file.parent.relative_to(ROOT)) for file in files)
    assert not {folder: count for folder, count in folders.items() if count > 20}


IMPURE = {"asyncio", "concurrent", "datetime", "io", "logging", "multiprocessing", "os", "pathlib", "random", "select"}
IMPURE |= {"signal", "socket", "subprocess", "tempfile", "threading", "time", "zmq"}


def test_what_decides_is_pure() -> None:
    """Requests, blocks and decisions know no clock, socket, thread or file, nor what records and runs them."""
    ours = tuple(f"quire.scheduler_proc.{folder}" for folder in ("process", "structured", "trace"))
    for file in _files("scheduler_proc/core", "scheduler_proc/requests", "scheduler_proc/kv"):
        found = [name for name in _imports(file) if name.split(".")[0] in IMPURE or name.startswith(ours)]
        assert not found, f"{file.relative_to(ROOT)} imports {found}"


@pytest.mark.parametrize("package", TORCH_FREE)
def test_torch_stays_in_the_worker(package: str) -> None:
    for file in _files(package):
        assert not HEAVY & {name.split(".")[0] for name in _imports(file)}, file


TOOLS = tuple(f"quire.launch.{name}" for name in ("bench", "demo", "measure", "replay"))


def test_nothing_that_serves_imports_a_tool() -> None:
    """The command line, which starts them, is the only exception."""
    for file in _files("launch"):
        place = file.relative_to(ROOT)
        if place.parts[1] not in ("bench", "measure", "replay", "cli.py"):
            assert not [name for name in _imports(file) if name.startswith(TOOLS)], place


def test_a_front_end_imports_nothing_of_the_scheduler() -> None:
    """They share messages only: a front end runs in a process of its own."""
    for file in _files("launch/frontend", "launch/http", "launch/text", "launch/offline"):
        assert not [name for name in _imports(file) if name.startswith("quire.scheduler_proc")], file


@pytest.mark.parametrize(
    "module",
    ["quire.scheduler_proc.__main__", "quire.launch.cli", "quire.launch.http.__main__", "quire.launch.offline.llm"],
)
def test_it_runs_where_torch_is_not_installed(module: str) -> None:
    code = f"import sys; sys.modules.update(torch=None, transformers=None); import {module}"
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=60)


def test_help_needs_no_heavy_library() -> None:
    """``quire --help`` answers within 0.3 s because of what it does not import."""
    code = (
        "import sys, quire.launch.cli as c\n"
        "try: c.main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'numpy', 'zmq', 'starlette', 'uvicorn', 'tokenizers', 'jinja2'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "serve" in done.stdout


def test_each_package_has_its_page() -> None:
    for package in PACKAGES:
        assert (ROOT / package / "README.md").is_file(), package
