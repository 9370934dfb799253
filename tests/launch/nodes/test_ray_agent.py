"""The actor of a Ray cluster, without Ray: it starts an agent on this machine."""

import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from quire.launch.nodes import ray_agent
from quire.launch.nodes.addresses import ReservedPort
from quire.launch.nodes.keys import write_pair

LONG = "x" * 100 + "\n"
PROGRAM = f"""
import sys
sys.stderr.write("quire runs workers for heads that connect to it\\n" + {LONG!r} * 2000)
sys.stdin.read()
"""


class Started:
    """An actor's agent; ``program`` replaces it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.program: str | None = None
        self._popen = subprocess.Popen
        self.port = ReservedPort("127.0.0.1")
        write_pair(folder / "head.key_secret", folder / "head.key")
        self._head_key = (folder / "head.key").read_text()
        util: Any = ModuleType("ray.util")
        util.get_node_ip_address = lambda: "127.0.0.1"
        monkeypatch.setitem(sys.modules, "ray.util", util)
        monkeypatch.setattr(ray_agent, "ReservedPort", lambda address: self.port)
        monkeypatch.setattr(subprocess, "Popen", self._start)

    def _start(self, command: list[str], **options: Any) -> "subprocess.Popen[str]":
        command = command if self.program is None else [sys.executable, "-c", self.program]
        self.process: subprocess.Popen[str] = self._popen(command, **options)
        return self.process

    def start(self) -> tuple[str, str]:
        return ray_agent.RayAgent().start(self._head_key, 1)

    def end(self) -> int:
        """Do what the end of the actor does, and return the exit status."""
        assert self.process.stdin is not None and self.process.stderr is not None
        self.process.stdin.close()
        for thread in threading.enumerate():
            if thread.name == "agent log":
                thread.join()
        self.process.stderr.close()
        return self.process.wait()


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    started = Started(monkeypatch, tmp_path)
    yield started
    started.port.close()


@pytest.mark.full
def test_no_key_file_is_left_and_the_agent_ends_with_its_input(
    started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    address, key = started.start()
    assert address == f"tcp://127.0.0.1:{started.port.number}" and len(key) == 40
    assert not list(folder.iterdir())
    assert started.process.poll() is None
    assert started.end() == 0


def test_all_lines_of_the_agent_are_in_the_log_of_the_actor(
    started: Started, capsys: pytest.CaptureFixture[str]
) -> None:
    started.program = PROGRAM
    started.start()
    assert started.end() == 0
    assert capsys.readouterr().err.count(LONG) == 2000


def test_an_agent_that_does_not_start_is_one_line(started: Started) -> None:
    started.program = "import sys; sys.exit('quire: error: no such flag')"
    with pytest.raises(RuntimeError, match=r"^quire: error: no such flag$"):
        started.start()
    started.end()
