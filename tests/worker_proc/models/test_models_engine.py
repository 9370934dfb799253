"""Families with full and sliding window layers in the real scheduler and runner.

They have several KV groups, blocks that are freed before a window, prefix cache hits, and a small block pool.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import greedy_tokens
from inprocess import InProcessEngine

from quire.worker_proc.attention import cpu
from quire.worker_proc.attention.supports import Supports

pytestmark = pytest.mark.full

FAMILIES = {"mistral": 1, "gemma2": 2, "gemma3": 4, "gpt_oss": 2, "qwen3_moe": 1}
"""Families and their numbers of KV groups."""

OTHER_FAMILIES = ("llama", "qwen2", "qwen3", "phi3", "granite", "olmo2", "smollm3", "gemma", "mixtral")
KERNEL_BLOCKS = "kernel blocks of 4"

MODES: dict[str, dict[str, Any]] = {
    "chunks of 7": {"long_prefill_token_threshold": 7, "block_size": 8},
    "tight pool, synchronous": {"block_size": 4, "num_blocks_override": 96, "async_scheduling": False},
    KERNEL_BLOCKS: {"block_size": 16},
}
LENGTHS = (3, 17, 40, 40, 40, 63)
NEW_TOKENS = 12


def _prompts() -> list[list[int]]:
    """Return prompts; those of one length have a common prefix."""
    rng = random.Random(5)
    start = [rng.randrange(97) for _ in range(32)]
    return [(start[: n // 2] + [rng.randrange(97) for _ in range(n)])[:n] for n in LENGTHS for _ in range(2)]


@pytest.mark.parametrize("family", [*FAMILIES, *OTHER_FAMILIES])
def test_tokens_equal_transformers(
    family: str, checkpoint_factory: Callable[..., tuple[Path, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, reference = checkpoint_factory(family)
    prompts = _prompts()
    wanted = [greedy_tokens(reference, [prompt], NEW_TOKENS)[0] for prompt in prompts]
    for mode, settings in MODES.items():
        if family in OTHER_FAMILIES and mode != KERNEL_BLOCKS:
            continue
        for path in ("NATIVE", "TORCH"):
            monkeypatch.setattr(cpu, path, Supports(block_sizes=(4,) if mode == KERNEL_BLOCKS else ()))
        engine = InProcessEngine(folder, max_model_len=96, **settings)
        assert len(engine.runner.tables.tables) == FAMILIES.get(family, 1)
        for index, prompt in enumerate(prompts):
            engine.add(str(index), prompt, max_tokens=NEW_TOKENS)
        answers = engine.run()
        assert [answers[str(index)].tokens for index in range(len(prompts))] == wanted, mode
        engine.add("again", prompts[-1], max_tokens=NEW_TOKENS)
        again = engine.run()["again"]
        assert again.tokens == wanted[-1] and again.num_cached_tokens > 0
