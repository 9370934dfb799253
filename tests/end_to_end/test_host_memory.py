"""Real processes with host memory behind the prefix cache: loaded prefixes are right, and outlive the workers."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_processes import engine_processes
from own_costs import OwnCosts
from tiers import thinned

from quire import LLM, SamplingParams
from quire.protocol.errors import QuireError

pytestmark = pytest.mark.full

RNG = random.Random(7)
PROMPTS = [[RNG.randrange(3, 90) for _ in range(64)] for _ in range(6)]
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


def answers(llm: LLM, prompts: Sequence[Sequence[int]]) -> tuple[list[list[int]], int]:
    """Return the tokens of the prompts, generated one by one, and the number of cached tokens of all."""
    outputs = [llm.generate([list(prompt)], GREEDY, use_tqdm=False)[0] for prompt in prompts]
    return [list(output.outputs[0].token_ids) for output in outputs], sum(o.num_cached_tokens for o in outputs)


def computed(llm: LLM) -> int:
    """Return the tokens that were in host memory, and were computed on a busy machine: loads seemed slow, or were."""
    counts = llm.statistics()
    return 56 * (counts["load_choices_compute"] + counts["host_num_late"])


@pytest.mark.parametrize(
    ("device", "ranks"), [*thinned([("cpu", 1), ("cpu", 2)], keep=1), pytest.param("cuda", 1, marks=pytest.mark.gpu)]
)
def test_prefixes_are_loaded_and_survive_the_worker(
    device: str,
    ranks: int,
    checkpoint_factory: Callable[..., tuple[Path, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pool has room for two of the six prompts."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    folder, _ = checkpoint_factory("llama")
    OwnCosts(tmp_path, monkeypatch)
    settings: dict[str, Any] = {"dtype": "float32", "max_model_len": 96, "block_size": 8, "num_gpu_blocks_override": 20}
    with LLM(folder, **settings, device=device, cpu_offload_bytes=2**24, tensor_parallel_size=ranks) as llm:
        first, num_cached = answers(llm, PROMPTS)
        assert num_cached == 0
        again, num_cached = answers(llm, PROMPTS)
        assert num_cached + computed(llm) >= 3 * 56
        for process in engine_processes("quire.worker_proc"):
            process.kill()
        before = computed(llm)
        third, num_cached = answers(llm, PROMPTS)
        assert num_cached + computed(llm) - before >= 2 * 56, "what was only on the device is lost"
        assert first == again == third
        counts = llm.statistics()
        assert counts["host_num_failed"] == 0 < counts["host_num_loaded"]


@pytest.mark.full
def test_memory_without_room_for_a_page_ends_the_start() -> None:
    with pytest.raises(QuireError, match=r"--cpu-offload-bytes must be at least \d+, a page of all ranks \(got 100\)"):
        LLM(cpu_offload_bytes=100)
