"""Builds of the distribution: complete with and without symbolic links, refused if incomplete; versions."""

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import packages
import pytest

from quire.kernels.cpu.native.library import load_native
from quire.version import DISTRIBUTION, __version__, install_command

ROOT = Path(__file__).parent.parent
FOLDERS = packages.PACKAGES


def _linked(link: Path, name: str) -> None:
    link.symlink_to(f"../{name}")


def _as_text(link: Path, name: str) -> None:
    link.write_text(f"../{name}")


def _copy(to: Path, put_link: Callable[[Path, str], None]) -> Path:
    """Copy what a build reads."""
    ignore = shutil.ignore_patterns("__pycache__", *FOLDERS)
    shutil.copytree(ROOT / "quire", to / "quire", ignore=ignore)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
        put_link(to / "quire" / name, name)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, to / name)
    return to


def _build(root: Path, **env: str) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("setuptools", minversion="77")
    command = [sys.executable, "-P", "setup.py", "-q", "build_py", "--build-lib", "built"]
    return subprocess.run(
        command, cwd=root, env={**os.environ, **env}, capture_output=True, text=True, timeout=120, check=False
    )


def _expected_files() -> set[str]:
    kept = {".py", ".cpp", ".h", ".html", ".css", ".js"}
    files = {file.relative_to(ROOT) for name in FOLDERS for file in (ROOT / name).rglob("*") if file.suffix in kept}
    return {f"quire/{file}" for file in files} | {f"quire/{name}" for name in ("__init__.py", "py.typed", "commit.txt")}


@pytest.mark.full
@pytest.mark.parametrize("put_link", [_linked, _as_text])
def test_builds_are_complete_with_and_without_links(tmp_path: Path, put_link: Callable[[Path, str], None]) -> None:
    root = _copy(tmp_path, put_link)
    (root / "quire/commit.txt").write_text("0123456789abcdef0123456789abcdef01234567\n")  # as in an archive
    done = _build(root)
    assert done.returncode == 0, done.stderr
    built = {str(file.relative_to(root / "built")) for file in (root / "built").rglob("*") if file.is_file()}
    assert not _expected_files() - built
    assert {f"quire/launch/demo/model/{name}" for name in ("config.json", "tokenizer.json")} <= built
    shown = subprocess.run(
        [sys.executable, "-P", "-m", "quire.launch.cli", "--version"],
        env={"PYTHONPATH": str(root / "built")},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert shown.stdout.startswith(f"quire {__version__} (commit 0123456789ab), torch ")


@pytest.mark.full
def test_kernels_built_ahead_are_used_without_a_compiler(tmp_path: Path) -> None:
    native = load_native()
    if native is None or platform.machine() != "x86_64":
        pytest.skip("no compiler, or no x86-64")
    compiler = tmp_path / "compiler"  # copies a finished library
    compiler.write_text(f'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\ncp {native.path} "$2"\n')
    compiler.chmod(0o700)
    root = _copy(tmp_path / "source", _linked)
    done = _build(root, QUIRE_BUILD_AHEAD="1", CXX=str(compiler))
    assert done.returncode == 0, done.stderr
    code = "from quire.kernels.cpu.native.library import load_native; print(load_native().path)"
    env = {"PYTHONPATH": str(root / "built"), "PATH": str(tmp_path)}
    shown = subprocess.run([sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True, check=True)
    level = 4 if native.vector_floats == 16 else 3
    assert shown.stdout.strip() == str(root / f"built/quire/kernels/cpu/prebuilt/cpu-x86-64-v{level}.so")


def test_a_build_of_an_incomplete_tree_fails(tmp_path: Path) -> None:
    for name in ("quire", *FOLDERS[1:]):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    for name in FOLDERS:
        _as_text(tmp_path / "quire" / name, name)
    for name in ("setup.py", "quire/version.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    done = _build(tmp_path)
    assert done.returncode != 0
    assert f"the source tree is incomplete: folder {FOLDERS[0]}/ is missing" in done.stderr


def test_the_version_has_notes() -> None:
    command = [sys.executable, "-P", ROOT / "tools/release.py"]
    version, notes = (
        subprocess.run([*command, what], capture_output=True, text=True, check=True).stdout.strip()
        for what in ("version", "notes")
    )
    assert version == __version__ and len(notes.splitlines()) > 3


def test_version_names_commit_and_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "quire.launch.cli", "--version"], capture_output=True, text=True, check=True
    )
    pattern = r"quire \S+ \(commit ([0-9a-f]{7,40}(-dirty)?|unknown)\), torch \d+\.\d+\S*\n"
    assert re.fullmatch(pattern, done.stdout)


def test_installation_messages_name_the_distribution() -> None:
    assert install_command("trace") == f"pip install '{DISTRIBUTION}[trace]'"
    for package in FOLDERS:
        for file in (ROOT / package).rglob("*.py"):
            assert "pip install" not in file.read_text(), f"{file}: use quire.version.install_command"
