"""Out of memory in a step: the result reports it, steps get smaller, and all requests finish with the same tokens."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from inprocess import InProcessEngine

from quire.worker_proc.attention.backend import StepBatch
from quire.worker_proc.attention.cpu import CpuBackend

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12, 13, 14], [15] * 20, [16, 17]]


class ShortOfMemory(CpuBackend):
    """CPU backend that is out of memory for steps of more than ``max_tokens`` tokens, and for ``failing_plans``."""

    def __init__(self, max_tokens: int, failing_plans: set[int]) -> None:
        super().__init__()
        self._most = max_tokens
        self._failing = failing_plans
        self.plans = 0
        self.failed = 0

    def plan(self, batch: StepBatch) -> Any:
        self.plans += 1
        if int(batch.query_lens_cpu.sum()) > self._most or self.plans in self._failing:
            self.failed += 1
            raise torch.OutOfMemoryError("tried to allocate 2.00 GiB,\n of which 1.00 GiB is free")
        return super().plan(batch)


def _engine(folder: Path, **settings: object) -> InProcessEngine:
    engine = InProcessEngine(folder, max_num_seqs=4, max_num_batched_tokens=64, **settings)
    for index, prompt in enumerate(PROMPTS):
        engine.add(f"r{index}", prompt, max_tokens=12)
    return engine


@pytest.mark.full
@pytest.mark.parametrize("asynchronous", [False, True])
def test_steps_get_smaller_and_tokens_stay_the_same(asynchronous: bool, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    folder = tmp_path
    want = {name: answer.tokens for name, answer in _engine(folder).run().items()}
    engine = _engine(folder, async_scheduling=asynchronous)
    backend = ShortOfMemory(max_tokens=18, failing_plans={6, 9})
    engine.runner.forward = dataclasses.replace(engine.runner.forward, backend=backend)
    answers = engine.run()
    assert {name: answer.tokens for name, answer in answers.items()} == want
    assert backend.failed >= 3
    assert engine.scheduler.config.max_num_batched_tokens < 64
