"""A small run of each harness and fuzzer on real servers, so that a long run does not fail at its first step."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import hostile
import pytest
from harness import main
from own_server import is_clean
from served import Served

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent


def found_by(tmp_path: Path, words: str) -> dict[str, Any]:
    file = tmp_path / "found.json"
    main([*words.split(), "--json", str(file)])
    found: dict[str, Any] = json.loads(file.read_text())["results"]
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_faults(tmp_path: Path, ranks: int) -> None:
    words = f"faults --count 6 --streams 12 --deterministic --tensor-parallel-size {ranks}"
    found = found_by(tmp_path, words)
    assert found["problems"] == found["failed"] == found["changed"] == 0 < found["completed"]
    assert "gone_ms" in found["supervisor"]


def test_engines(tmp_path: Path) -> None:
    words = "engines --kills 5 --router-kills 2 --restarts 1 --streams 24 --engines 3"
    found = found_by(tmp_path, words)
    assert found["problems"] == found["failed"] == found["changed"] == 0 < found["completed"]
    assert found["engine_starts"] > 3


def test_streams(tmp_path: Path) -> None:
    found = found_by(tmp_path, "streams --num-streams 32 --output-len 16 --side-len 300 --side-interval 0.1")
    assert (found["lost"], found["side_lost"], found["output_tokens"]) == (0, 0, 32 * 16)
    assert found["side_requests"] > 0 and is_clean(found["after"])


def test_cost(tmp_path: Path) -> None:
    found = found_by(tmp_path, "cost --num-streams 8,16 --output-len 200 --rounds 1")
    assert all(each["us_per_token"] > 0 for each in found["streams"].values())


def test_images(tmp_path: Path) -> None:
    found = found_by(tmp_path, "images --simulate constant:5 --rounds 1")
    assert found["errors"] == {} and found["images_answered"] > 0
    assert 0 < found["most_rows_in_encoder_cache"] <= found["rows_of_encoder_cache"]


def test_soak(tmp_path: Path) -> None:
    served = Served("--num-gpu-blocks-override", "2048")
    try:  # growth is measured of a server that the harness started, and so few requests always grow
        found = found_by(tmp_path, f"soak --num-requests 300 --warm-up 100 --concurrency 16 --url {served.url}")
    finally:
        assert served.stop() == 0
    assert found["faults"] == {} and sum(found["kinds"].values()) == 300
    assert is_clean(found["after"])


def test_hostile(tmp_path: Path) -> None:
    rounds = found_by(tmp_path, "hostile --attacks slow_reader,grammars --num-requests 24")["rounds"]
    assert set(rounds) == {hostile.CALM, "slow_reader", "grammars"}
    assert all(found["steps"] > hostile.OUTPUT_LEN and not found["faults"] for found in rounds.values())
    assert rounds["slow_reader"]["hostile"]["never read"] > 0 and rounds["grammars"]["hostile"]


def test_adapters(tmp_path: Path) -> None:
    assert found_by(tmp_path, "adapters --count 28 --num-requests 60 --concurrency 4 --max-cpu-loras 12 --rounds 1")


@pytest.mark.parametrize("kind", ["wire", "safetensors", "http"])
def test_fuzzers(kind: str) -> None:
    command = [sys.executable, "-P", str(HERE / f"fuzz_{kind}.py"), "--seconds", "5", "--seed", "7"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    found = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0, done.stderr
    assert not found.get("failures") and not found.get("failure")
    if kind == "wire":
        assert all(tally["decoded"] and tally["refused: decode"] for tally in found["directions"].values())
    else:
        assert found.get("refused", 0) > 20 and found["opened"] if kind == "safetensors" else found["requests"] > 20


def test_fuzzed_images() -> None:
    command = [sys.executable, "-P", str(HERE / "fuzz_images.py"), "--count", "200", "--seed", "7"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["files"] == 200 > found["read"] > 20 and found["urls"] >= 200
