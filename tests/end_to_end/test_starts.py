"""Starts that are ended while a worker compiles its kernels, by a compiler that takes for ever."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from quire.launch.supervision.directory import make_directory
from quire.protocol.process.owned_folder import remove_folder

SERVE = [sys.executable, "-P", "-m", "quire.launch.cli", "serve", "--port", "0", "--num-gpu-blocks-override", "40"]
COMPILING = "compiling the CPU kernels"


def start(folder: Path) -> subprocess.Popen[str]:
    compiler = folder / "slow++"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] || sleep 600 & wait\n')
    compiler.chmod(0o700)
    (folder / "tmp").mkdir(exist_ok=True)
    places = {"CXX": str(compiler), "XDG_CACHE_HOME": str(folder), "TMPDIR": str(folder / "tmp")}
    return subprocess.Popen(SERVE, env={**os.environ, **places}, stderr=subprocess.PIPE, text=True)


def check_ended(server: subprocess.Popen[str], processes: list[psutil.Process], folder: Path) -> None:
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not alive
    assert not [
        each for each in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(each.info["cmdline"] or [])
    ]
    assert server.stderr is not None
    assert "Traceback" not in server.stderr.read()
    server.stderr.close()


@pytest.mark.parametrize(
    ("number", "status"),
    [pytest.param(signal.SIGTERM, 0, marks=pytest.mark.full), pytest.param(signal.SIGKILL, -9, marks=pytest.mark.slow)],
)
def test_a_signal_ends_a_start_that_compiles(number: int, status: int, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        server = start(Path(name))
        assert server.stderr is not None
        while COMPILING not in server.stderr.readline():
            pass
        processes = psutil.Process(server.pid).children(recursive=True)
        while not [
            each for each in psutil.process_iter(["cmdline"]) if f"{name}/slow++" in (each.info["cmdline"] or [])
        ]:
            pass
        server.send_signal(number)
        assert server.wait(10) == status
        check_ended(server, processes, Path(name))
        assert not list((Path(name) / "tmp").iterdir())


@pytest.mark.slow
def test_a_supervisor_killed_at_any_moment_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        for moment in range(20):
            server = start(Path(name))
            time.sleep(0.2 * moment)
            processes = psutil.Process(server.pid).children(recursive=True)
            server.kill()
            server.wait()
            check_ended(server, processes, Path(name))
        monkeypatch.setattr(tempfile, "tempdir", str(Path(name) / "tmp"))
        remove_folder(*make_directory())
        assert not list((Path(name) / "tmp").iterdir())
