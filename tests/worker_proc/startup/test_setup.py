"""The device and the threads of a worker."""

from pathlib import Path

import msgspec
import psutil
import pytest
import torch

from quire.protocol.config import EngineConfig, RankPlace
from quire.protocol.errors import ConfigError
from quire.protocol.model.model_config import ModelConfig
from quire.protocol.process import host_limits
from quire.worker_proc.startup.setup import ONE_THREAD_BELOW_BYTES, pick_device, set_threads

MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=128,
    num_layers=4,
    num_heads=8,
    num_kv_heads=2,
    head_dim=8,
)
CONFIG = EngineConfig(
    model=MODEL, model_path="", max_model_len=256, device="cuda", tensor_parallel_size=2, data_parallel_size=2
)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Three GPUs; the list has those that were set as the current device."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    return chosen


def test_a_rank_has_the_gpu_of_its_place(gpus: list[int]) -> None:
    second = msgspec.structs.replace(CONFIG, ranks=[RankPlace(device=2), RankPlace(device=3)])
    assert pick_device(CONFIG, 1) == torch.device("cuda", 1)
    assert pick_device(second, 0) == torch.device("cuda", 2)
    assert gpus == [1, 2]
    with pytest.raises(ConfigError, match="--data-parallel-size 2 needs GPU 3, and torch finds 3 GPUs"):
        pick_device(second, 1)


@pytest.mark.parametrize(("weights", "ranks", "threads"), [(0, 1, 1), (1, 1, 8), (1, 4, 2), (1, 16, 1)])
def test_ranks_of_all_engines_divide_the_cores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, weights: int, ranks: int, threads: int
) -> None:
    chosen: list[int] = []
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (tmp_path / "cpu.max").write_text("800000 100000")
    (tmp_path / "own").write_text("0::/")
    monkeypatch.setattr(host_limits, "SELF", tmp_path / "own")
    monkeypatch.setattr(host_limits, "MOUNT", tmp_path)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 12)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(16))
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    set_threads(weights * ONE_THREAD_BELOW_BYTES, ranks)
    assert chosen == [threads]
