"""Two ranks with real processes and sockets: the same tokens as one rank, and recovery from a rank's death."""

import os
import signal
from pathlib import Path

import pytest
from adapters import make_adapter
from checkpoints import make_checkpoint
from engine_processes import engine_processes

from quire import LLM, LoRARequest, SamplingParams
from quire.protocol.model.model_config import load_model_config

pytestmark = pytest.mark.full

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12, 13, 14], [15] * 20, [16, 17]]


def _tokens(folder: Path, **settings: object) -> list[list[int]]:
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    drawn = SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=12, ignore_eos=True)
    with LLM(folder, dtype="float32", **settings) as llm:  # type: ignore[arg-type]
        outputs = llm.generate(PROMPTS, greedy) + llm.generate(PROMPTS, drawn)
    return [output.outputs[0].token_ids for output in outputs]


def test_two_ranks_give_the_same_tokens_as_one(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    assert _tokens(tmp_path, tensor_parallel_size=2, long_prefill_token_threshold=7) == _tokens(tmp_path)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_two_ranks_with_adapters_give_the_same_tokens_as_one(family: str, tmp_path: Path) -> None:
    """Four adapters take turns in steps of at most two."""
    make_checkpoint(tmp_path / "model", family)
    model = load_model_config(tmp_path / "model")
    folders = [make_adapter(tmp_path / f"{n}", model, rank=n, seed=n, size=1.0) for n in range(1, 5)]
    adapters = [LoRARequest(folder.name, n, folder) for n, folder in enumerate(folders, 1)]
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    found = []
    for size in (1, 2):
        settings = {"tensor_parallel_size": size, "enable_lora": True, "max_loras": 2}
        with LLM(tmp_path / "model", dtype="float32", **settings) as llm:  # type: ignore[arg-type]
            outputs = llm.generate(PROMPTS, greedy, lora_request=adapters) + llm.generate(PROMPTS, greedy)
        found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1] and all(a != b for a, b in zip(found[0][:4], found[0][4:], strict=True))


def test_death_of_a_rank_replaces_the_group_and_costs_no_token(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    greedy = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
    with LLM(tmp_path, tensor_parallel_size=2, dtype="float32") as llm:
        before = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, greedy)]
        group = {process.pid for process in engine_processes("quire.worker_proc")}
        os.kill(max(group), signal.SIGKILL)
        assert [output.outputs[0].token_ids for output in llm.generate(PROMPTS, greedy)] == before
        assert not group & {process.pid for process in engine_processes("quire.worker_proc")}
    assert not engine_processes("quire.worker_proc")
