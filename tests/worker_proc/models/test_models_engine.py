"""Families with full and sliding window layers in the real scheduler and runner.

They have several KV groups, blocks that are freed before a window, prefix cache hits, and a small block pool.
"""

import random
import unittest.mock
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
from checkpoints import greedy_tokens
from inprocess import InProcessEngine

from quire.kernels.cache.pointer_table import TableSet
from quire.kernels.cache.slot_mapping import slot_mappings_reference
from quire.kernels.cpu.native.library import load_native
from quire.worker_proc.attention import cpu, cpu_expanded
from quire.worker_proc.attention.supports import Supports
from quire.worker_proc.execute import device_inputs
from quire.worker_proc.models import latent_attention

pytestmark = pytest.mark.full

FAMILIES = {"mistral": 1, "gemma2": 2, "gemma3": 4, "gpt_oss": 2, "qwen3_moe": 1}
"""Families and their numbers of KV groups."""

OTHER_GROUPS = {"dots1": 3, "vaultgemma": 2, "ministral": 4, "cwm": 4, "olmo3": 4, "exaone4": 4, "llama4": 4}
OTHER_FAMILIES = sorted(checkpoints.FAMILIES.keys() - FAMILIES.keys() - {"gemma3_vision", "llama4_vision"})
KERNEL_BLOCKS, DEVICE_SLOTS = "kernel blocks of 4", "slots as a GPU computes them"

MODES: dict[str, dict[str, Any]] = {
    "chunks of 7": {"long_prefill_token_threshold": 7, "block_size": 8},
    "tight pool, synchronous": {"block_size": 4, "num_blocks_override": 96, "async_scheduling": False},
    KERNEL_BLOCKS: {"block_size": 16},
    DEVICE_SLOTS: {"long_prefill_token_threshold": 7, "block_size": 4},
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
    mapped: list[torch.Tensor] = []

    def map_slots(
        starts: torch.Tensor, positions: torch.Tensor, tables: TableSet, rows: torch.Tensor, out: torch.Tensor
    ) -> None:
        mapped.append(out.copy_(slot_mappings_reference(starts, positions, tables, rows)))

    monkeypatch.setattr(device_inputs, "compute_slot_mappings", map_slots)
    prompts = _prompts()
    wanted = [greedy_tokens(reference, [prompt], NEW_TOKENS)[0] for prompt in prompts]
    for mode, settings in MODES.items():
        if family in OTHER_FAMILIES and mode not in (KERNEL_BLOCKS, DEVICE_SLOTS):
            continue
        if mode == DEVICE_SLOTS:
            monkeypatch.setattr(device_inputs.InputSender, "_slots", device_inputs.InputSender._device_slots)
        for path in ("NATIVE", "TORCH"):
            monkeypatch.setattr(cpu, path, Supports(block_sizes=(4,) if mode == KERNEL_BLOCKS else ()))
        engine = InProcessEngine(folder, max_model_len=96, **settings)
        assert len(engine.runner.tables.tables) == (FAMILIES | OTHER_GROUPS).get(family, 1)
        for index, prompt in enumerate(prompts):
            engine.add(str(index), prompt, max_tokens=NEW_TOKENS)
        answers = engine.run()
        assert [answers[str(index)].tokens for index in range(len(prompts))] == wanted, mode
        engine.add("again", prompts[-1], max_tokens=NEW_TOKENS)
        again = engine.run()["again"]
        assert again.tokens == wanted[-1] and again.num_cached_tokens > 0
        assert bool(mapped) == (mode == DEVICE_SLOTS)


@pytest.mark.parametrize("expanded", [False, True])
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu"])
def test_latents_with_a_small_budget(
    family: str,
    expanded: bool,
    checkpoint_factory: Callable[..., tuple[Path, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps of at most 24 tokens, blocks of 16, three prompts at once, and one again; also with chunks expanded."""
    for name in ("FEWEST_TOKENS", "PAIR_COST", "EXPANSION_COST") if expanded else ():
        monkeypatch.setattr(cpu_expanded, name, 5 if name == "FEWEST_TOKENS" else 0)
    filled = unittest.mock.Mock(wraps=cpu_expanded.attend_expanded)
    monkeypatch.setattr(latent_attention, "attend_expanded", filled)
    folder, reference = checkpoint_factory(family)
    prompts = _prompts()[6:12:2]
    engine = InProcessEngine(folder, max_model_len=96, block_size=16, max_num_batched_tokens=24, max_num_seqs=8)
    for index, prompt in enumerate(prompts):
        engine.add(str(index), prompt, max_tokens=NEW_TOKENS)
    answers = engine.run()
    wanted = [greedy_tokens(reference, [prompt], NEW_TOKENS)[0] for prompt in prompts]
    assert [answers[str(index)].tokens for index in range(3)] == wanted
    engine.add("again", prompts[-1], max_tokens=NEW_TOKENS)
    again = engine.run()["again"]
    assert again.tokens == wanted[-1] and again.num_cached_tokens == len(prompts[-1]) // 16 * 16
    assert filled.called == (expanded and load_native() is not None)
