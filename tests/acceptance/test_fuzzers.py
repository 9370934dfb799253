"""Short runs of the fuzzers: they find no failure and report what they did."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.full

HERE = Path(__file__).parent


def fuzzed(program: str) -> dict[str, Any]:
    command = [sys.executable, "-P", str(HERE / program), "--seconds", "2", "--seed", "7"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["failures"] == 0
    return found


def test_messages_in_all_directions() -> None:
    directions = fuzzed("fuzz_wire.py")["directions"]
    assert len(directions) == 4
    for name, tally in directions.items():
        assert tally["messages"] > 20 and tally["decoded"] and tally["refused: decode"], name


def test_checkpoints() -> None:
    found = fuzzed("fuzz_safetensors.py")
    assert found["refused"] > 20 and found["opened"]


@pytest.mark.slow
def test_requests() -> None:
    command = [sys.executable, "-P", str(HERE / "fuzz_http.py"), "--seconds", "20", "--seed", "5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    last = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0 and last["failure"] == "", last
    assert last["requests"] > 100
