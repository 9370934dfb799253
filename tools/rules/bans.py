"""No code in the tree can execute untrusted bytes, and only one module receives from sockets.

The search is syntactic: imports (also renamed ones), calls and arguments. tests/tools/test_rules.py has cases.
"""

import ast
from collections.abc import Iterator
from typing import Any, NamedTuple

from sources import PACKAGES, Source

FOLDERS = (*PACKAGES, "tests", "tools", ".ci")
RECEIVES = "protocol/wire/zmq_channel.py"

MODULES = {
    "pickle", "cPickle", "_pickle", "pickletools", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle",
    "multiprocessing", "commands", "pty", "runpy", "code", "codeop",
}  # fmt: skip
"""Modules that deserialize objects or execute text. (Connections and queues of multiprocessing use pickle.)"""

NAMES = {
    "eval", "exec", "compile", "__import__", "execfile",
    "builtins.eval", "builtins.exec", "builtins.compile", "builtins.__import__",
    "torch.load", "torch.jit.load", "torch.package", "torch.hub.load", "torch.export.load", "torch.serialization.load",
    "yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "yaml.unsafe_load_all", "yaml.full_load_all",
    "os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "asyncio.create_subprocess_shell",
    "tempfile.mktemp", "concurrent.futures.ProcessPoolExecutor", "logging.config.listen",
    "torch.distributed.all_gather_object", "torch.distributed.gather_object", "torch.distributed.broadcast_object_list",
    "torch.distributed.scatter_object_list", "torch.distributed.send_object_list", "torch.distributed.recv_object_list",
}  # fmt: skip
METHODS = {"recv_pyobj", "send_pyobj", "recv_serialized", "send_serialized", "read_pickle", "to_pickle"}
NUMPY_LOADS = {"numpy.load", "numpy.lib.npyio.load"}
ARGUMENTS = {"shell": False, "allow_pickle": False, "trust_remote_code": False, "weights_only": True}
"""Keyword arguments that must have this value in every call."""


class Allowed(NamedTuple):
    """An exception. ``place``: file and function, as ``file:function``."""

    place: str
    name: str
    reason: str


EXCEPTIONS = [
    Allowed("replay/simulate/sweep.py:", "multiprocessing", "pipes to processes that it started itself"),
    Allowed(
        "replay/simulate/sweep.py:",
        "concurrent.futures.ProcessPoolExecutor",
        "processes that it started itself; they run simulations, not requests",
    ),
    Allowed(
        "scheduler_proc/structured/mask_process.py:",
        ".recv",
        "file descriptors over an inherited socket; messages are typed",
    ),
    Allowed("tests/kernels/compile_ahead.py:", "runpy", "executes only files of its own folder, by path"),
    Allowed("tests/worker_proc/parallel/test_parallel.py:", "multiprocessing", "ranks that only share memory"),
]


class Offence(NamedTuple):
    line: int
    function: str
    name: str


class _Search(ast.NodeVisitor):
    """Finds offences in one module, and resolves names through all of its imports."""

    def __init__(self, tree: ast.Module, nodes: list[ast.AST]) -> None:
        self.found: list[Offence] = []
        self._function = ""
        self._meaning: dict[str, str] = {}
        for node in nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    head = alias.name if alias.asname else alias.name.split(".")[0]
                    self._meaning[alias.asname or head] = head
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    self._meaning[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        self.visit(tree)

    def _report(self, node: ast.AST, name: str) -> None:
        self.found.append(Offence(getattr(node, "lineno", 0), self._function, name))

    def _name(self, node: ast.AST) -> str:
        """Return the full dotted name, or an empty string if ``node`` is not a name."""
        if isinstance(node, ast.Name):
            return self._meaning.get(node.id, node.id)
        if isinstance(node, ast.Attribute) and (base := self._name(node.value)):
            return f"{base}.{node.attr}"
        return ""

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        outer, self._function = self._function, node.name
        self.generic_visit(node)
        self._function = outer

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._module(node, alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        self._module(node, module)
        for alias in node.names:
            self._module(node, f"{module}.{alias.name}")
            if f"{module}.{alias.name}" in NAMES or alias.name == "*":
                self._report(node, f"{module}.{alias.name}")

    def _module(self, node: ast.AST, name: str) -> None:
        parts = name.split(".")
        if parts[0] in MODULES or (parts[0] == "torch" and parts[-1] == "multiprocessing"):
            self._report(node, name)

    def visit_Name(self, node: ast.Name) -> None:
        if self._name(node) in NAMES:
            self._report(node, self._name(node))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = self._name(node)
        if name in NAMES or node.attr in METHODS:
            self._report(node, name or node.attr)
        elif node.attr.startswith("recv"):
            self._report(node, ".recv")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = self._name(node.func)
        keywords = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
        for argument, wanted in ARGUMENTS.items():
            given = keywords.get(argument)
            if given is not None and not (isinstance(given, ast.Constant) and given.value is wanted):
                self._report(node, f"{argument}=")
        if name in NUMPY_LOADS and "allow_pickle" not in keywords:
            self._report(node, name)
        if name in ("importlib.import_module", "getattr", "builtins.getattr"):
            for text in (a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)):
                self._module(node, text)
                if text in METHODS or text in ("eval", "exec"):
                    self._report(node, text)
        self.generic_visit(node)


def offences(source: Source) -> list[Offence]:
    return _Search(source.tree, source.nodes).found


def facts(source: Source) -> list[Offence]:
    return offences(source) if source.is_python and source.package in FOLDERS else []


def problems(facts: dict[str, list[list[Any]]]) -> Iterator[str]:
    found = {place: [Offence(*offence) for offence in here] for place, here in facts.items()}
    for place, here in found.items():
        yield from (f"{place}:{each.line}: {each.name} is banned" for each in here if not _is_allowed(place, each))
    if not any(offence.name == ".recv" for offence in found.get(RECEIVES, ())):
        yield f"{RECEIVES}: receives nothing"  # then the search is broken, or another module should be named here
    for allowed in EXCEPTIONS:
        file = allowed.place.partition(":")[0]
        if not any(allowed.name == offence.name for offence in found.get(file, ())):
            yield f"tools/rules/bans.py: no code uses the exception for {allowed.name} in {allowed.place}"


def _is_allowed(place: str, offence: Offence) -> bool:
    if offence.name == ".recv" and (place == RECEIVES or place.startswith("tests/")):
        return True  # tests act as peers of all kinds; deserializing objects is a separate offence
    where = f"{place}:{offence.function}"
    return any(where.startswith(allowed.place) and offence.name == allowed.name for allowed in EXCEPTIONS)
