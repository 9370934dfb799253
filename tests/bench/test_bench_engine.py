"""``quire bench engine``: prompts, arithmetic, and peers that fail, without an engine; and one whole run."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire.bench.adapters import write_adapters
from quire.bench.engine import Contestant, busy_processes, default_threads, make_prompts, run
from quire.bench.measure.shapes import find_shape
from quire.bench.peer_files import PeerFiles
from quire.bench.peers import Peer, PeerChoice, PeerFailed, find_driver, parse_peer
from quire.launch.cli import parse
from quire.launch.config.options import EngineOptions
from quire.protocol.errors import ConfigError
from quire.protocol.model.adapter import read_adapter


def arguments(**changed: object) -> argparse.Namespace:
    flags = ["--shape", "tiny", "--num-requests", "2", "--input-len", "4", "--output-len", "4", "--threads", "1"]
    return argparse.Namespace(**(vars(parse(["bench", "engine", *flags])) | changed))


def test_same_seed_repeats_prompts_and_others_differ() -> None:
    first = make_prompts(0, 3, 50, 100)
    assert first == make_prompts(0, 3, 50, 100) != make_prompts(1, 3, 50, 100)
    assert [len(p) for p in first] == [50] * 3
    assert all(3 <= token < 100 for prompt in first for token in prompt)


def test_rates_come_from_the_median_round() -> None:
    ours = Contestant("quire", lambda prompts, n: None, ready_s=1.0, seconds=[4.0, 2.0, 3.0], prefill_s=1.0)
    found = ours.results(num_tokens=600, prompt_tokens=50, num_requests=10)
    assert found["tokens_per_s"] == 200.0
    assert found["prefill_tokens_per_s"] == 50.0
    assert found["decode_tokens_per_s"] == 590 / 2.0


def test_rates_beside_busy_processes_are_compared_with_the_other_rounds() -> None:
    ours = Contestant("quire", lambda prompts, n: None, 1.0, seconds=[2.0, 3.0, 9.0], busy_seconds=[4.0, 5.0, 6.0])
    found = ours.results(num_tokens=600, prompt_tokens=50, num_requests=10)
    assert (found["busy_tokens_per_s"], found["busy_by_quiet"]) == (120.0, 0.6)


def test_busy_processes_compute_until_the_round_ends() -> None:
    with pytest.raises(PeerFailed), busy_processes(2) as started:
        assert [process.poll() for process in started] == [None, None]
        raise PeerFailed
    assert [process.returncode for process in started] == [-9, -9]


def test_single_output_tokens_have_no_decode_rate() -> None:
    ours = Contestant("quire", lambda prompts, n: None, ready_s=1.0, seconds=[2.0], prefill_s=2.0)
    assert "decode_tokens_per_s" not in ours.results(num_tokens=10, prompt_tokens=50, num_requests=10)


def test_error_is_the_result() -> None:
    assert Contestant("peer", lambda prompts, n: None, 0.0, error="no").results(1, 1, 1) == {"error": "no"}


def test_default_threads_follow_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert default_threads() == 7
    monkeypatch.setenv("OMP_NUM_THREADS", "4,2")
    assert default_threads() >= 1


class TestPeers:
    def script(self, tmp_path: Path, body: str) -> str:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return str(path)

    def peer(self, tmp_path: Path, body: str) -> Peer:
        return Peer(self.script(tmp_path, body), tmp_path / "driver.py", tmp_path, "vllm", "auto", 1, (1, 8))

    def test_rounds(self, tmp_path: Path) -> None:
        peer = self.peer(
            tmp_path, 'echo \'{"ready_s": 1.5, "dtype": "float32"}\'; read line; echo \'{"seconds": 1}\'; read x'
        )
        assert peer.wait_ready() == (1.5, {"dtype": "float32"})
        peer.generate([[3]], 1)
        peer.close()

    @pytest.mark.parametrize(
        ("body", "reason"),
        [
            ("exit 3", "exited with status 3 without an error message"),
            ("echo one >&2; echo two >&2; exit 1", "^two$"),
            ('echo \'{"error": "RuntimeError: a   b"}\'', "^RuntimeError: a b$"),
        ],
    )
    def test_failure_has_the_peers_message(self, tmp_path: Path, body: str, reason: str) -> None:
        peer = self.peer(tmp_path, body)
        with pytest.raises(PeerFailed, match=reason):
            peer.wait_ready()
        peer.close()

    def test_missing_interpreter(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"--peer vllm=.*none: No such file"):
            Peer(str(tmp_path / "none"), tmp_path / "driver.py", tmp_path, "vllm", "auto", 1, (1, 8))

    def test_missing_driver(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"--peer-driver .*none.py: file not found"):
            find_driver(tmp_path / "none.py", "engine.py")
        with pytest.raises(ConfigError, match=r"--peer requires --peer-driver FILE: tools/peers/none.py"):
            find_driver(None, "none.py")
        assert find_driver(None, "engine.py").name == "engine.py"

    def files(self, tmp_path: Path, body: str, model: Path | None = None) -> PeerFiles:
        python = self.script(tmp_path, body)
        peers = [PeerChoice("transformers-static", "", python), PeerChoice("llamacpp", "bf16", python)]
        return PeerFiles(tmp_path / "files", model, "tiny", 0, peers, python, None)

    def test_each_file_is_written_once(self, tmp_path: Path) -> None:
        arguments = tmp_path / "arguments"
        files = self.files(tmp_path, f'shift 2; echo $1 >> {arguments}; mkdir -p "$3"; echo "{{}}"')
        for given in ("llamacpp:q8_0", "openvino:int8", "openvino:int8", "transformers-static"):
            path = files.of_peer(parse_peer(given))
            assert path.parent == tmp_path / "files"
        assert files.gguf("q8_0").name == "tiny-q8_0.gguf"
        assert arguments.read_text().split() == ["write", "gguf", "openvino"]

    def test_gguf_file_is_loaded_by_llamacpp_alone(self, tmp_path: Path) -> None:
        model = tmp_path / "model.gguf"
        model.touch()
        files = self.files(tmp_path, "exit 1", model)
        assert files.of_peer(parse_peer("llamacpp")) == model
        with pytest.raises(ConfigError, match="is not converted to q8_0"):
            files.of_peer(parse_peer("llamacpp:q8_0"))
        with pytest.raises(ConfigError, match="--peer openvino:bf16 cannot load a GGUF file"):
            files.of_peer(parse_peer("openvino"))

    def test_checkpoint_that_cannot_be_written(self, tmp_path: Path) -> None:
        files = self.files(tmp_path, "echo 'ModuleNotFoundError: transformers' >&2; exit 1")
        with pytest.raises(ConfigError, match="cannot write tiny: ModuleNotFoundError"):
            files.checkpoint()


@pytest.mark.parametrize(
    ("changed", "options", "reason"),
    [
        ({"num_requests": 0}, {}, "--num-requests must be at least 1"),
        ({"rounds": 0}, {}, "--rounds must be at least 1"),
        ({"threads": 0}, {}, "--threads must be from 1"),
        ({}, {"model": "somewhere"}, "MODEL and --shape cannot be combined"),
        ({"peer": ["vlm=python"]}, {}, "--peer vlm: unknown peer; did you mean vllm"),
        ({"peer": ["llamacpp:q4"]}, {}, "--peer llamacpp:q4: weights must be bf16, q8_0, q4_0"),
        ({"peer": ["vllm:bf16"]}, {}, "--peer vllm:bf16: weights must be those of the checkpoint"),
        ({"busy": -1}, {}, "--busy must be at least 0"),
        ({"adapters": -1}, {}, "--adapters must be at least 0"),
        ({"adapters": 1, "adapter_rank": 1025}, {}, r"--adapter-rank must be from 1 to 1024 \(got 1025\)"),
        ({"shape": "tinny"}, {}, "did you mean tiny"),
        ({"input_len": 4096}, {}, "context of 2048 \\(got 4100\\)"),
        ({"shape": None, "peer": ["transformers-static"]}, {"load_format": "dummy"}, "which loads weights"),
        ({"shape": None, "gguf": "q8_0"}, {"load_format": "dummy"}, "with --gguf, which loads weights"),
    ],
)
def test_flags_out_of_range(
    changed: dict[str, object], options: dict[str, str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with pytest.raises(ConfigError, match=reason):
        run(arguments(**changed), EngineOptions(**options))  # type: ignore[arg-type]


@pytest.mark.slow
def test_rounds_of_both_engines_alone_and_beside_a_busy_process(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "quire.launch.cli", "bench", "engine", "--shape", "tiny", "--json", "-"]
    sizes = ["--threads", "1", "--num-requests", "2", "--rounds", "1", "--input-len", "8", "--output-len", "4"]
    peer = ["--peer", "transformers-static", "--peer-files", str(tmp_path), "--busy", "1"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run([*command, *sizes, *peer], capture_output=True, text=True, check=True, env=environment)
    results = json.loads(done.stdout)["results"]
    for name in ("quire", "transformers-static"):
        assert len(results[name]["tokens_per_s_rounds"]) == len(results[name]["busy_tokens_per_s_rounds"]) == 1
        assert results[name]["busy_by_quiet"] > 0
    assert results["quire"]["cached_tokens"] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny"]


def test_adapters_of_a_benchmark_can_be_used(tmp_path: Path) -> None:
    model = find_shape("tiny")
    read = [read_adapter(Path(each.lora_path), model, 4) for each in write_adapters(tmp_path, model, 2, 4, seed=0)]
    assert [(each.rank, len(each.parts)) for each in read] == [(4, 4 * 7)] * 2
    assert read[0].digest != read[1].digest


@pytest.mark.full
def test_rounds_with_and_without_adapters() -> None:
    command = [sys.executable, "-P", "-m", "quire.launch.cli", "bench", "engine", "--shape", "tiny", "--json", "-"]
    sizes = ["--threads", "1", "--num-requests", "3", "--rounds", "1", "--input-len", "8", "--output-len", "4"]
    done = subprocess.run([*command, *sizes, "--adapters", "2"], capture_output=True, text=True, check=True)
    results = json.loads(done.stdout)["results"]
    assert results["quire with adapters"]["adapters"] == 2
    assert results["quire with adapters"]["tokens_per_s"] > 0
    assert results["quire"]["cached_tokens"] == 0
