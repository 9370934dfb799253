"""The actor of a Ray cluster, without Ray: it starts an agent on this machine."""

import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from quire.launch.nodes import ray_agent
from quire.launch.nodes.addresses import ReservedPort
from quire.launch.nodes.keys import write_pair


@pytest.mark.full
def test_no_key_file_is_left_and_the_agent_ends_with_its_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_pair(tmp_path / "head.key_secret", tmp_path / "head.key")
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    util: Any = ModuleType("ray.util")
    util.get_node_ip_address = lambda: "127.0.0.1"
    monkeypatch.setitem(sys.modules, "ray.util", util)
    started: list[subprocess.Popen[str]] = []
    popen = subprocess.Popen

    def start(*args: Any, **options: Any) -> "subprocess.Popen[str]":
        started.append(popen(*args, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    port = ReservedPort("127.0.0.1")
    monkeypatch.setattr(ray_agent, "ReservedPort", lambda address: port)

    address, key = ray_agent.RayAgent().start((tmp_path / "head.key").read_text(), 1)
    assert address == f"tcp://127.0.0.1:{port.number}" and len(key) == 40
    assert not list(folder.iterdir())
    (process,) = started
    assert process.poll() is None
    with process:
        pass
    assert process.returncode == 0
    port.close()
