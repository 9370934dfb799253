"""Rules for imports between packages and folders, and for sizes. Banned modules are in bans.py."""

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from itertools import accumulate, pairwise
from typing import Any

from sources import Source

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
HELPERS = ("frontend/images/processing.py",)
"""Modules that only helper processes import, which may be heavy."""

IMPURE = {"asyncio", "concurrent", "datetime", "io", "logging", "multiprocessing", "os", "pathlib", "random", "select"}
IMPURE |= {"signal", "socket", "subprocess", "tempfile", "threading", "time", "zmq"}
PURE = tuple(f"scheduler_proc/{folder}/" for folder in ("core", "features", "costs", "messages", "requests", "kv"))
"""Folders without a clock, socket, thread or file, which import none of those that use them."""
CALLERS = tuple(f"quire.scheduler_proc.{folder}" for folder in ("process", "structured", "trace"))
MOST_LINES_OF_A_FUNCTION = 80


def facts(source: Source) -> dict[str, Any]:
    if not source.is_product:
        return {}
    functions = [node for node in source.nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    spans = {f"{node.lineno}: {node.name}": (node.end_lineno or node.lineno) - node.lineno + 1 for node in functions}
    long = [place for place, lines in spans.items() if lines > MOST_LINES_OF_A_FUNCTION]
    return {"imports": list(_imports(source)), "long": long}


def _imports(source: Source) -> Iterator[str]:
    for node in source.nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def problems(facts: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for file, of in facts.items():
        yield from (f"{file}: imports {name}, {why}" for name in of["imports"] if (why := _fault(file, name)))
        yield from (f"{file}:{name} has more than {MOST_LINES_OF_A_FUNCTION} lines" for name in of["long"])
    graph = _graph(facts)
    yield from _cycle(graph, "modules")
    yield from _cycle(_folders(graph), "folders")


def _fault(file: str, name: str) -> str:
    """Return why ``file`` must not import ``name``, or an empty string."""
    package, root = file.partition("/")[0], name.split(".")[0]
    if not root:
        return "which is relative"
    if root == "quire" and "." in name and name.split(".")[1] not in ALLOWED[package]:
        return f"which is not a layer below {package}"
    if package in TORCH_FREE and root in HEAVY and file not in HELPERS:
        return "which only workers import"
    if file.startswith(PURE) and (root in IMPURE or name.startswith(CALLERS)):
        return "which scheduling code must not use"
    return ""


def _graph(facts: Mapping[str, Mapping[str, Any]]) -> dict[str, set[str]]:
    """Return the modules of this project that each of them imports."""
    modules = {file.removesuffix(".py").replace("/", ".").removesuffix(".__init__"): file for file in facts}
    graph = {
        module: {name.removeprefix("quire.") for name in facts[file]["imports"]} for module, file in modules.items()
    }
    return {module: imported & graph.keys() - {module} for module, imported in graph.items()}


def _joined(above: tuple[str, str], part: tuple[str, str]) -> tuple[str, str]:
    return f"{above[0]}.{part[0]}", f"{above[1]}.{part[1]}"


def _folders(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Return the imports between sibling folders at every depth. A module beside the folders counts as a folder."""
    edges: dict[str, set[str]] = {}
    for module, imported in graph.items():
        for name in imported:
            pairs = pairwise(accumulate(zip(module.split("."), name.split("."), strict=False), _joined))
            for (above, same), (at, to) in pairs:
                if above == same and at != to:
                    edges.setdefault(at, set()).add(to)
    return edges


def _cycle(graph: Mapping[str, set[str]], kind: str) -> Iterator[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        yield f"imports between {kind} have a cycle: {' -> '.join(reversed(error.args[1]))}"
