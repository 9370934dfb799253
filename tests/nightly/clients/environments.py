"""Environments of client programs: the newest releases, from the package registries, each client in its own folder.

Clients pin each other's dependencies, so they share neither an environment nor that of the tests. The folders are kept
in ``.clients``, so that a second run only looks for newer releases.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import conversations

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / ".clients"
PROGRAMS = Path(__file__).parent
SHARED = ROOT / "tests/support/launch"
INSTALL_S = 600
RUN_S = 300


class NotInstalled(Exception):
    """The packages could not be installed; with the reason."""


def python_environment(name: str, packages: tuple[str, ...]) -> Path:
    """Return the interpreter of an environment with the newest releases of the packages."""
    folder = FOLDER / name
    python = folder / "bin" / "python"
    if not python.exists():
        _run([sys.executable, "-m", "venv", "--without-pip", str(folder)])
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--quiet", "--disable-pip-version-check"]
    _run([*pip, "install", "--upgrade", *packages])
    return python


def node_environment(name: str, package: str) -> Path:
    """Return a folder with the newest release of a package for node."""
    folder = FOLDER / name
    folder.mkdir(parents=True, exist_ok=True)
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        raise NotInstalled("node and npm are not installed")
    _run(
        [npm, "install", "--loglevel", "error", "--no-audit", "--no-fund", "--prefix", str(folder), f"{package}@latest"]
    )
    return folder


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    except subprocess.TimeoutExpired:
        raise NotInstalled(f"not installed within {INSTALL_S} s") from None
    if done.returncode:
        lines = (line for line in done.stderr.splitlines() if line.startswith(("ERROR", "npm error")))
        raise NotInstalled(next(lines, f"{command[0]} failed"))


def run_python(python: Path, program: str, server: str) -> Any:
    """Run a program of this folder against a server and return its report (``checks.report``)."""
    return _report([str(python), "-P", str(PROGRAMS / program)], python.parent, server)


def run_node(folder: Path, program: str, server: str) -> Any:
    # Imports are resolved from the program's folder.
    shutil.copy(PROGRAMS / program, folder)
    return _report(["node", program], folder, server)


def _report(command: list[str], folder: Path, server: str) -> Any:
    words = {name: value for name, value in vars(conversations).items() if name.isupper()}
    folders = os.pathsep.join((str(PROGRAMS), str(SHARED)))
    variables = {"PYTHONPATH": folders, "QUIRE_SERVER": server, "CONVERSATIONS": json.dumps(words)}
    done = subprocess.run(
        command, env=own_variables(**variables), cwd=folder, capture_output=True, text=True, timeout=RUN_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def own_variables(**more: str) -> dict[str, str]:
    """Return variables without keys, addresses and proxies of this machine's user."""
    kept = ("PATH", "HOME", "LANG", "TMPDIR")
    return {name: os.environ[name] for name in kept if name in os.environ} | more
