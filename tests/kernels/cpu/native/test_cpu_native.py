"""The native CPU library: built once, loaded beside torch without a second OpenMP runtime, and optional."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire.kernels.cpu.native.library import SOURCES, Native, find_native, load_native


def _python(code: str, **env: str) -> str:
    """Return the output of ``code`` in a separate process."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=300, env=os.environ | env
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


LOAD = "from quire.kernels.cpu.native.library import load_native; n = load_native(); print(n and n.path)"


@pytest.mark.full
def test_library_uses_torchs_thread_count_and_one_openmp_runtime(native: Native) -> None:
    code = (
        "import ctypes, torch, pathlib\n"
        "from quire.kernels.cpu.native.library import load_native\n"
        "threads = load_native().function('quire_threads', returns=ctypes.c_int)\n"
        "torch.randn(512, 512) @ torch.randn(512, 512)\n"
        "for count in (2, 1, 3):\n"
        "    torch.set_num_threads(count)\n"
        "    assert threads() == count, (threads(), count)\n"
        "maps = pathlib.Path('/proc/self/maps').read_text().split()\n"
        "print(len({word for word in maps if '/lib' in word and 'omp' in word.rsplit('/', 1)[1]}))\n"
    )
    assert _python(code, OMP_NUM_THREADS="2") == "1"


STAND_IN = """#!/bin/sh
[ "$1" = --version ] && exit 0
echo . >> {count}
while [ "$1" != -o ]; do shift; done
cp {library} "$2"
"""
"""A compiler that copies a finished library."""


@pytest.mark.full
@pytest.mark.parametrize("compiler", ["stand-in", pytest.param("real", marks=pytest.mark.slow)])
def test_library_is_built_once(native: Native, tmp_path: Path, compiler: str) -> None:
    """Two processes that start together share one build, in a folder that only its owner can write to."""
    env = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "CXXFLAGS": "-O0"}
    count = tmp_path / "count"
    if compiler == "stand-in":
        env["CXX"] = str(tmp_path / "compiler")
        (tmp_path / "compiler").write_text(STAND_IN.format(count=count, library=native.path))
        (tmp_path / "compiler").chmod(0o700)
    command = [sys.executable, "-P", "-c", LOAD]
    both = [
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(2)
    ]
    lines = [line for process in both for line in process.communicate(timeout=300)[0].splitlines()]
    messages = [line for line in lines if line.startswith("compiling")]
    paths = set(lines) - set(messages)
    assert len(messages) == 1
    assert len(paths) == 1 and Path(paths.pop()).parent == tmp_path / "quire"
    assert [file.suffix for file in sorted((tmp_path / "quire").iterdir())] == [".so", ".lock"]
    assert (tmp_path / "quire").stat().st_mode & 0o077 == 0
    if compiler == "stand-in":
        num_sources = len(list(SOURCES.glob("*/*.cpp")))
        assert len(count.read_text().splitlines()) == num_sources + 1, "each source once, and the link"


def _reason(monkeypatch: pytest.MonkeyPatch, **env: str) -> str:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    found = find_native()
    assert isinstance(found, str) and load_native() is None
    return found


def test_library_can_be_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "QUIRE_CPU_NATIVE is 0" in _reason(monkeypatch, QUIRE_CPU_NATIVE="0")


def test_missing_compiler_is_a_reason_and_not_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "compiler not found" in _reason(monkeypatch, CXX="no-such-compiler")
    assert "quotation" in _reason(monkeypatch, CXX="'")
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no C++ compiler" in _reason(monkeypatch, XDG_CACHE_HOME=str(tmp_path))


def test_failing_compiler_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "x.cpp:1: error: not today" >&2; exit 1\n')
    broken.chmod(0o700)
    assert "not today" in _reason(monkeypatch, CXX=str(broken), XDG_CACHE_HOME=str(tmp_path))


def test_cache_folder_writable_by_others_is_rejected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "quire").mkdir()
    (tmp_path / "quire").chmod(0o777)
    assert "writable by other users" in _reason(monkeypatch, XDG_CACHE_HOME=str(tmp_path))
