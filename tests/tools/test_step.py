"""What the Makefile prints while packages are installed, and where it points if the server cannot start."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.full
def test_a_step_prints_its_name_then_what_pip_does_and_ends_with_its_status(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    pip = 'echo "2026-11-28T10:00:00,000   Collecting torch==2" >> "$PIP_LOG"; read line < "$0"; exit 3'
    step = subprocess.Popen(
        ["sh", ROOT / "tools/step.sh", tmp_path / "log", "Installing torch", "sh", "-c", pip, gate],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "STEP_SECONDS": "1"},
    )
    assert step.stdout is not None
    with step.stdout as output:
        assert output.readline() == "Installing torch\n"
        lines = [next(line for line in output if "Collecting" in line), output.readline()]
        assert re.fullmatch(r"  \d+ s: Collecting torch==2\n  \d+ s\n", "".join(lines))
        gate.write_text("\n")
        assert step.wait(60) == 3


def test_a_taken_port_names_the_variables_of_make(tmp_path: Path) -> None:
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text().replace("serve: install", "serve:"))
    program = tmp_path / ".venv/bin/quire"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\nexit 78\n")
    program.chmod(0o755)
    done = subprocess.run(["make", "-s", "serve", "PORT=1"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "make serve PORT=" in done.stderr
