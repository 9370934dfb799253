"""Requests with a common prompt prefix, whose attention is computed once for all: tokens equal transformers'."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import FAMILIES, greedy_tokens
from inprocess import InProcessEngine
from tiers import thinned

from quire.kernels.cpu.native.library import load_native
from quire.worker_proc.attention.backend import StepBatch

WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "synchronous, chunks of 40, deterministic": {
        "async_scheduling": False,
        "long_prefill_token_threshold": 40,
        "deterministic": True,
    },
}
NEW_TOKENS = 8


def _prompts() -> list[list[int]]:
    """Return prompts of two families with common prefixes, and one prompt alone."""
    rng = random.Random(3)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(97) for _ in range(count)]

    first, second = tokens(300), tokens(530)
    return [
        first + tokens(9),
        second + tokens(3),
        tokens(40),
        first + tokens(20),
        second + tokens(5),
        first + tokens(1),
    ]


class Engine(InProcessEngine):
    """Counts the rows that shared a prefix in each step; ``shares=False`` computes them row by row."""

    def __init__(self, folder: Path, shares: bool = True, **settings: Any) -> None:
        super().__init__(folder, max_model_len=640, **settings)
        self.sharing: list[int] = []
        backend = self.runner.forward.backend
        plan = backend.plan

        def counted(batch: StepBatch) -> Any:
            self.sharing.append(sum(len(prefix.rows) for prefix in batch.prefixes))
            return plan(batch)

        backend.plan = counted  # type: ignore[method-assign]
        if not shares:
            self.runner._inputs._prefixes = [None for _ in self.runner._inputs._prefixes]

    def tokens(self, prompts: list[list[int]], **sampling: Any) -> tuple[list[list[int]], list[list[bytes]]]:
        self.add("first", prompts[0], max_tokens=1)
        self.add("second", prompts[1], max_tokens=1)
        self.run()  # computes the blocks that the others share
        for index, prompt in enumerate(prompts):
            self.add(str(index), prompt, max_tokens=NEW_TOKENS, **sampling)
        answers = self.run()
        own = [answers[str(index)] for index in range(len(prompts))]
        return [answer.tokens for answer in own], [answer.logprobs for answer in own]


@pytest.mark.parametrize("family", thinned(FAMILIES, keep=1))
def test_greedy_tokens_equal_transformers(family: str, checkpoint_factory: Callable[..., tuple[Path, Any]]) -> None:
    folder, model = checkpoint_factory(family, max_position_embeddings=640)
    prompts = _prompts()
    wanted = [greedy_tokens(model, [prompt], NEW_TOKENS)[0] for prompt in prompts]
    for way, settings in WAYS.items():
        engine = Engine(folder, **settings)
        assert engine.tokens(prompts)[0] == wanted, way
        windowed = all(group.sliding_window for group in engine.runner.forward.groups)
        assert max(engine.sharing) == (0 if windowed else 5)


def test_log_probabilities_are_those_of_row_by_row(checkpoint_factory: Callable[..., tuple[Path, Any]]) -> None:
    if load_native() is None:
        pytest.skip("no C++ compiler")
    folder, _ = checkpoint_factory("llama", max_position_embeddings=640)
    sampling = {"temperature": 0.9, "seed": 5, "logprobs": 3}
    shared, alone = Engine(folder, dtype="bfloat16"), Engine(folder, shares=False, dtype="bfloat16")
    assert shared.tokens(_prompts(), **sampling) == alone.tokens(_prompts(), **sampling)
    assert max(shared.sharing) == 5 and max(alone.sharing) == 0
