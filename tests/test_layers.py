"""Rules for imports between packages and folders, and for sizes. Banned modules are in test_bans.py."""

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
from packages import PACKAGES

ROOT = Path(__file__).parent.parent
SERVING = {"protocol", "scheduler_proc", "worker_proc", "router_proc", "kernels", "frontend", "launch", "version"}
ALLOWED = {
    "protocol": {"protocol", "version"},
    "scheduler_proc": {"protocol", "scheduler_proc", "version"},
    "kernels": {"kernels", "version"},
    "worker_proc": {"protocol", "kernels", "worker_proc", "version"},
    "router_proc": {"protocol", "router_proc", "version"},
    "frontend": {"protocol", "frontend", "version"},
    "launch": {"protocol", "frontend", "launch", "version"},
    "replay": {"protocol", "scheduler_proc", "router_proc", "frontend", "launch", "bench", "replay", "version"},
    "bench": SERVING | {"bench"},
}
TORCH_FREE = ("protocol", "scheduler_proc", "router_proc", "frontend", "launch", "replay")
HEAVY = {"torch", "transformers", "triton"}


def _files(*packages: str) -> Iterator[Path]:
    for package in packages:
        yield from sorted((ROOT / package).rglob("*.py"))


@cache
def _imports(file: Path) -> tuple[str, ...]:
    return tuple(_find_imports(file))


def _find_imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{file}: relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def _graph() -> dict[str, set[str]]:
    """Return the modules of this project that each of them imports."""
    files = {".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in _files(*PACKAGES)}
    files = {module.removesuffix(".__init__"): file for module, file in files.items()}
    graph = {module: {name.removeprefix("quire.") for name in _imports(file)} for module, file in files.items()}
    return {module: imported & graph.keys() - {module} for module, imported in graph.items()}


@pytest.mark.parametrize("package", PACKAGES)
def test_layer_imports_only_lower_layers(package: str) -> None:
    for file in _files(package):
        for name in _imports(file):
            if name.startswith("quire."):
                assert name.split(".")[1] in ALLOWED[package], f"{file.relative_to(ROOT)} imports {name}"


def test_no_import_cycle() -> None:
    tuple(TopologicalSorter(_graph()).static_order())  # raises CycleError with a cycle


def _joined(above: tuple[str, str], part: tuple[str, str]) -> tuple[str, str]:
    return f"{above[0]}.{part[0]}", f"{above[1]}.{part[1]}"


def test_imports_between_folders_run_one_way() -> None:
    """At every depth, imports between sibling folders have no cycle. A module beside the folders counts as a folder."""
    edges: dict[str, set[str]] = {}
    for module, imported in _graph().items():
        for name in imported:
            pairs = pairwise(accumulate(zip(module.split("."), name.split("."), strict=False), _joined))
            for (above, same), (at, to) in pairs:
                if above == same and at != to:
                    edges.setdefault(at, set()).add(to)
    tuple(TopologicalSorter(edges).static_order())


def test_no_folder_has_more_than_20_modules() -> None:
    files = [file for file in _files(*PACKAGES) if file.name != "__init__.py"]
    folders = Counter(str(file.parent.relative_to(ROOT)) for file in files)
    assert not {folder: count for folder, count in folders.items() if count > 20}


def test_no_file_has_more_than_400_lines_and_no_function_more_than_80() -> None:
    for file in _files(*PACKAGES):
        source = file.read_text(encoding="utf-8")
        assert source.count("\n") <= 400, f"{file}: {source.count(chr(10))} lines"
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                assert node.end_lineno - node.lineno < 80, f"{file}:{node.lineno}: {node.name} is too long"


IMPURE = {"asyncio", "concurrent", "datetime", "io", "logging", "multiprocessing", "os", "pathlib", "random", "select"}
IMPURE |= {"signal", "socket", "subprocess", "tempfile", "threading", "time", "zmq"}


def test_scheduling_code_is_pure() -> None:
    """They use no clock, socket, thread or file, and import none of the folders that use them."""
    callers = tuple(f"quire.scheduler_proc.{folder}" for folder in ("process", "structured", "trace"))
    for file in _files(
        *(f"scheduler_proc/{folder}" for folder in ("core", "adapters", "costs", "requests", "kv", "beams"))
    ):
        found = [name for name in _imports(file) if name.split(".")[0] in IMPURE or name.startswith(callers)]
        assert not found, f"{file.relative_to(ROOT)} imports {found}"


@pytest.mark.parametrize("package", TORCH_FREE)
def test_only_workers_import_torch(package: str) -> None:
    for file in _files(package):
        assert not HEAVY & {name.split(".")[0] for name in _imports(file)}, file


@pytest.mark.parametrize(
    "module",
    ["quire.scheduler_proc.__main__", "quire.launch.cli", "quire.frontend.http.__main__", "quire.launch.offline.llm"],
)
def test_imports_without_torch(module: str) -> None:
    code = f"import sys; sys.modules.update(torch=None, transformers=None); import {module}"
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("words", [["--help"], ["serve", "--help=all"], ["completion", "bash"]])
def test_help_imports_no_heavy_library(words: list[str]) -> None:
    """``quire --help`` takes less than 0.3 s only without these imports."""
    code = (
        "import sys, quire.launch.cli as c\n"
        f"try: c.main({words})\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'numpy', 'zmq', 'starlette', 'uvicorn', 'tokenizers', 'jinja2',"
        " 'yaml', 'asyncio', 'psutil', 'httpx', 'huggingface_hub'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "serve" in done.stdout


def test_each_package_has_a_readme() -> None:
    for package in PACKAGES:
        assert (ROOT / package / "README.md").is_file(), package
