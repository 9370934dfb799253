"""The rules about the repository find breaches, and pass plain code. `make lint` runs them on the tree."""

from types import ModuleType
from typing import Any

import bans
import layers
import prose
import pytest
import reachable
import rules
import sources
from sources import Source

BANNED = """
import pickle
import pickle as json
from pickle import loads
def f(): import cloudpickle
import json, shelve
import importlib; importlib.import_module('pickle')
from importlib import import_module as get; get('marshal')
__import__('os')
from multiprocessing import Pipe
import torch.multiprocessing as mp
import concurrent.futures; concurrent.futures.ProcessPoolExecutor()
import torch as t; t.load(path, weights_only=True)
from torch import load
import torch; read = torch.load
read(path, weights_only=False)
import torch.distributed as dist; dist.all_gather_object(a, b)
import yaml; yaml.load(text, Loader=yaml.SafeLoader)
run = eval
import builtins; builtins.exec(text)
self.socket.send_pyobj(x)
getattr(socket, 'recv_pyobj')()
frames = self._sockets[0].recv_multipart(1)
from numpy import load; load(path)
import numpy; numpy.load(path, allow_pickle=trusted)
run(text, shell=wanted)
from os import system as call
import asyncio; asyncio.create_subprocess_shell(text)
from os import *
AutoModel.from_pretrained(path, trust_remote_code=True)
"""
ALLOWED = """
model.eval()
import re; re.compile(text)
import subprocess; subprocess.run(['a'], shell=False)
import yaml; yaml.safe_load(text)
import numpy as np; np.load(path, allow_pickle=False)
factory.mktemp('a')
import json; json.load(file)
text = 'import pickle; eval(x)'
import importlib; importlib.import_module('zstandard')
"""


def found(rule: ModuleType, name: str, text: str) -> Any:
    return rule.facts(Source(name, text))


@pytest.mark.parametrize("code", BANNED.split("\n")[1:-1])
def test_banned_code_is_found(code: str) -> None:
    assert found(bans, "launch/new.py", code)


@pytest.mark.parametrize("code", ALLOWED.split("\n")[1:-1])
def test_plain_code_is_not_banned(code: str) -> None:
    assert not found(bans, "launch/new.py", code)


def test_a_turn_is_found_on_its_line_across_a_line_break() -> None:
    text = '"""Fine.\n\nThe request is put\nout.\n"""\n\n# Nobody\n\nx = "it is `who`"\n'
    assert [(line, turn) for line, turn, _ in found(prose, "launch/new.py", text)] == [(3, "put out"), (7, "nobody")]
    assert not found(prose, "launch/new.py", '"""Return the victim to preempt for a batch slot, or None."""')


@pytest.mark.parametrize(
    ("files", "breach"),
    [
        ({"protocol/a.py": "import quire.launch.cli"}, "imports quire.launch.cli"),
        ({"launch/a.py": "from torch import nn"}, "imports torch"),
        ({"launch/a.py": "from . import cli"}, "which is relative"),
        ({"scheduler_proc/core/a.py": "import time"}, "imports time"),
        ({"launch/a.py": "import quire.launch.b", "launch/b.py": "import quire.launch.a"}, "modules have a cycle"),
        (
            {
                "launch/x/a.py": "import quire.launch.y.a",
                "launch/y/a.py": "",
                "launch/y/b.py": "import quire.launch.x.b",
                "launch/x/b.py": "",
            },
            "folders have a cycle",
        ),
        ({"launch/a.py": "def f():\n" + "    1\n" * 80}, "f has more than 80 lines"),
    ],
)
def test_breaches_of_layers_are_found(files: dict[str, str], breach: str) -> None:
    facts = {name: found(layers, name, text) for name, text in files.items()}
    assert any(breach in problem for problem in layers.problems(facts))


def test_unreachable_code_is_found() -> None:
    added = {
        "kernels/cache/lost.py": "def lost_kernel(): helper()\ndef helper(): ...\ndef kept_kernel(a, knob=0): ...",
        "worker_proc/uses.py": "from quire.kernels.cache.lost import kept_kernel\nkept_kernel(1)",
        "protocol/wire/lost.py": "class Sent(Message):\n    lost_field: int\nSent(lost_field=1)",
        "scheduler_proc/kv/coordinator.py": "MANAGERS = {'lost_kind': int}",
        reachable.REASONS: "class WaitReason:\n    LOST = 'lost'\n    USED = 'used'\nWaitReason.LOST",
        "scheduler_proc/core/uses.py": "WaitReason.USED",
        "replay/read.py": "line.kept_field; tier.restore()",
        "scheduler_proc/trace/lines.py": "class Line(S):\n    kept_field: int\n    other_field: int\nLine(1, 2)",
        "scheduler_proc/kv/tier.py": "class Tier:\n    def restore(self): ...\n    def forget(self): ...",
        "protocol/kinds.py": "class Kind(StrEnum):\n    A = 'a'\n    B = 'b'\nKind.A",
        "protocol/block_hash.py": "class Hasher:\n    def link(self, salt='', lost=()): ...\nHasher().link('a')",
    }
    lost = {"lost_kernel", "kept_kernel(knob)", "Sent.lost_field", "lost_kind", "WaitReason.LOST", "link(lost)"}
    lost |= {"Line.other_field", "Tier.forget", "Kind.B"}
    assert reachable.unreachable({name: found(reachable, name, text) for name, text in added.items()}) == lost


def test_facts_of_an_unchanged_file_come_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "all_names", lambda: ["setup.py", "quire/version.py"])
    first = rules.read_tree({})
    stale = {"setup.py": (first["setup.py"][0], {"bans": []}), "quire/version.py": ("another", {"bans": []})}
    assert rules.read_tree(stale) == {"setup.py": stale["setup.py"], "quire/version.py": first["quire/version.py"]}


def test_the_tree_is_read_whole() -> None:
    names = set(sources.all_names())
    assert {"Makefile", ".ci/run", "launch/cli.py", "tests/tools/test_rules.py", "docs/tour.md"} <= names
    assert not any(name.startswith((".venv", "quire/launch")) for name in names)
