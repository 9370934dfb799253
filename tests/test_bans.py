"""No code in the tree can execute untrusted bytes, and only one module receives from sockets.

The search is syntactic: imports (also renamed ones), calls and arguments. Tests verify that it finds known cases.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import packages
import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = (*packages.PACKAGES, "tests", "tools", ".ci")
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

    def __init__(self, tree: ast.Module) -> None:
        self.found: list[Offence] = []
        self._function = ""
        self._meaning: dict[str, str] = {}
        for node in ast.walk(tree):
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


def offences(source: str) -> list[Offence]:
    return _Search(ast.parse(source)).found


def _files() -> Iterator[Path]:
    for folder in FOLDERS:
        yield from sorted((ROOT / folder).rglob("*.py"))


def _is_allowed(place: str, offence: Offence) -> bool:
    if offence.name == ".recv" and (place == RECEIVES or place.startswith("tests/")):
        return True  # tests act as peers of all kinds; deserializing objects is a separate offence
    where = f"{place}:{offence.function}"
    return any(where.startswith(allowed.place) and offence.name == allowed.name for allowed in EXCEPTIONS)


@pytest.fixture(scope="module")
def found() -> dict[str, list[Offence]]:
    """Offences of the whole tree, by file."""
    return {str(file.relative_to(ROOT)): offences(file.read_text(encoding="utf-8")) for file in _files()}


def test_tree_contains_nothing_banned(found: dict[str, list[Offence]]) -> None:
    assert {place.partition("/")[0] for place in found} >= {"protocol", "launch", "tests"}, "the search skipped files"
    lines = [
        f"{place}:{offence.line}: {offence.name}"
        for place, here in found.items()
        for offence in here
        if not _is_allowed(place, offence)
    ]
    assert not lines, "\n".join(lines)


def test_every_allowed_exception_is_used(found: dict[str, list[Offence]]) -> None:
    for allowed in EXCEPTIONS:
        file = allowed.place.partition(":")[0]
        assert any(allowed.name == offence.name for offence in found[file]), f"unused: {allowed.place}"


def test_one_module_receives_from_sockets(found: dict[str, list[Offence]]) -> None:
    assert any(offence.name == ".recv" for offence in found[RECEIVES])


BAD = {
    "pickle": "import pickle",
    "pickle under another name": "import pickle as json",
    "from pickle": "from pickle import loads",
    "C pickle": "import _pickle",
    "inside a function": "def f():\n    import cloudpickle\n",
    "dill": "import dill.source",
    "marshal": "from marshal import load as read",
    "shelve": "import json, shelve",
    "joblib": "from joblib import Parallel",
    "by its name as a string": "import importlib\nimportlib.import_module('pickle')",
    "import_module itself": "from importlib import import_module as get\nget('marshal')",
    "dunder import": "__import__('os')",
    "multiprocessing": "from multiprocessing import Pipe",
    "torch.multiprocessing": "import torch.multiprocessing as mp",
    "process pool": "from concurrent.futures import ProcessPoolExecutor",
    "process pool by its module": "import concurrent.futures\nconcurrent.futures.ProcessPoolExecutor()",
    "torch.load": "import torch\ntorch.load(path)",
    "torch under another name": "import torch as t\nt.load(path, weights_only=True)",
    "load from torch": "from torch import load",
    "stored and called later": "import torch\nread = torch.load",
    "torch.jit": "import torch\ntorch.jit.load(path)",
    "weights_only": "read(path, weights_only=False)",
    "objects over ranks": "import torch.distributed as dist\ndist.all_gather_object(a, b)",
    "yaml.load": "import yaml\nyaml.load(text, Loader=yaml.SafeLoader)",
    "yaml.unsafe_load": "from yaml import unsafe_load",
    "eval": "eval(text)",
    "eval stored": "run = eval",
    "exec": "exec(text)",
    "builtins": "import builtins\nbuiltins.exec(text)",
    "compile": "compile(text, 'a', 'exec')",
    "recv_pyobj": "socket.recv_pyobj()",
    "send_pyobj": "self.socket.send_pyobj(x)",
    "by getattr": "getattr(socket, 'recv_pyobj')()",
    "recv": "def f(socket):\n    return socket.recv()",
    "recv_multipart": "frames = self._sockets[0].recv_multipart(1)",
    "recv stored": "take = socket.recv_json",
    "numpy.load": "import numpy as np\nnp.load(path)",
    "load from numpy": "from numpy import load\nload(path)",
    "numpy.load with pickle": "import numpy\nnumpy.load(path, allow_pickle=True)",
    "allow_pickle by a variable": "import numpy\nnumpy.load(path, allow_pickle=trusted)",
    "shell": "import subprocess\nsubprocess.run(text, shell=True)",
    "shell by a variable": "run(text, shell=wanted)",
    "os.system": "import os\nos.system(text)",
    "system": "from os import system as call",
    "os.popen": "import os\nos.popen(text)",
    "getoutput": "import subprocess\nsubprocess.getoutput(text)",
    "asyncio's shell": "import asyncio\nasyncio.create_subprocess_shell(text)",
    "mktemp": "import tempfile\ntempfile.mktemp()",
    "mktemp from tempfile": "from tempfile import mktemp",
    "star import": "from os import *",
    "code of a checkpoint": "AutoModel.from_pretrained(path, trust_remote_code=True)",
    "runpy": "import runpy",
}


@pytest.mark.parametrize("source", BAD.values(), ids=BAD)
def test_search_finds_banned_code(source: str) -> None:
    assert offences(source)


GOOD = {
    "a model's mode": "model.eval()",
    "a regular expression": "import re\nre.compile(text)",
    "a list of arguments": "import subprocess\nsubprocess.run(['a'], shell=False)",
    "safe yaml": "import yaml\nyaml.safe_load(text)",
    "numpy without pickle": "import numpy as np\nnp.load(path, allow_pickle=False)",
    "mktemp of pytest": "factory.mktemp('a')",
    "json": "import json\njson.load(file)",
    "banned words in a string": "text = 'import pickle; eval(x)'",
    "an optional package": "import importlib\nimportlib.import_module('zstandard')",
}


@pytest.mark.parametrize("source", GOOD.values(), ids=GOOD)
def test_search_accepts_allowed_code(source: str) -> None:
    assert not offences(source)
