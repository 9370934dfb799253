"""Models whose layers with a window have other KV heads or head dimensions, hence blocks that pack their layers."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from dense_attention import DenseBackend
from inprocess import InProcessEngine
from kv_cases import case, step
from model_steps import Rows
from plain_decoder import plain_logits
from safetensors.torch import save_file
from thread_ranks import on_ranks

from quire.protocol.errors import ConfigError
from quire.protocol.model.kv_layout import KVLayout, kv_layout
from quire.protocol.model.model_config import load_model_config, parse_model_config
from quire.scheduler_proc.kv.manager import KVCacheManager
from quire.worker_proc.attention import cpu
from quire.worker_proc.attention.cpu import CpuBackend
from quire.worker_proc.attention.supports import Supports
from quire.worker_proc.batch.kv_cache import allocate_kv_caches, group_caches
from quire.worker_proc.models.decoder import Decoder
from quire.worker_proc.models.registry import build_model
from quire.worker_proc.parallel.group import TensorParallel
from quire.worker_proc.startup.loader import init_dummy_weights

RAW: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"], "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 5, "num_attention_heads": 4, "max_position_embeddings": 128, "sliding_window": 12,
    "query_pre_attn_scalar": 12, "dtype": "float32", "head_dim": 8,
    "layer_types": [f"{kind}_attention" for kind in ("sliding", "full", "sliding", "sliding", "full")],
}  # fmt: skip

SHAPES: dict[str, tuple[dict[str, int], list[list[int]]]] = {
    "fewer heads without a window": (
        {"num_key_value_heads": 4, "num_global_key_value_heads": 1, "global_head_dim": 16},
        [[1, 4], [0], [2], [3]],
    ),
    "wider heads without a window": (
        {"num_key_value_heads": 1, "num_global_key_value_heads": 2, "global_head_dim": 16},
        [[1], [4], [0, 2, 3]],
    ),
    "no whole multiple": (
        {"num_key_value_heads": 4, "num_global_key_value_heads": 2, "global_head_dim": 12},
        [[1, 4], [0], [2], [3]],
    ),
}
"""Fields of ``config.json``; layers of each group, those without a window first."""

NEW_TOKENS = 20


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def model_of(fields: dict[str, int], parallel: TensorParallel | None = None) -> Decoder:
    model = build_model(parse_model_config(RAW | fields, "config.json"), torch.float32, "cpu", parallel=parallel)
    init_dummy_weights(model, seed=0)
    for name, slot in model.weight_slots().items():
        if not name.endswith("norm.weight"):
            slot.target.mul_(2 if "embed" in name else 25)  # otherwise the last token decides the next one
    return model


@pytest.mark.parametrize("name", SHAPES)
def test_logits_equal_a_plain_decoder(name: str) -> None:
    fields, _ = SHAPES[name]
    model = model_of(fields)
    prompts = [torch.arange(40) * 7 % 97, torch.arange(13) * 5 % 97]
    expected = [plain_logits(model, prompt) for prompt in prompts]
    for logits, wanted in zip(Rows(model, [40, 13], CpuBackend()).run_in_pieces(prompts), expected, strict=True):
        torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)
    for ranks in on_ranks(2, lambda p: Rows(model_of(fields, p), [40], DenseBackend()).step({0: prompts[0]})):
        torch.testing.assert_close(ranks[0], expected[0], atol=1e-4, rtol=1e-4)


def checkpoint(folder: Path, model: Decoder, fields: dict[str, int]) -> Path:
    tensors = {name: (slot.target - slot.offset).contiguous() for name, slot in model.weight_slots().items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(RAW | fields))
    return folder


def greedy(model: Decoder, prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    for _ in range(NEW_TOKENS):
        tokens.append(int(plain_logits(model, torch.tensor(tokens))[-1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.full
@pytest.mark.parametrize("name", SHAPES)
def test_engine_with_packed_blocks(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefix hits, chunks, preemption in a tight pool, and kernels with smaller blocks; every step is checked."""
    fields, groups = SHAPES[name]
    model = model_of(fields)
    folder = checkpoint(tmp_path, model, fields)
    rng = random.Random(3)
    start = [rng.randrange(97) for _ in range(50)]
    prompts = [(start[: 2 * n // 3] + [rng.randrange(97) for _ in range(n)])[:n] for n in (1, 9, 30, 45, 60, 75)]
    expected = [greedy(model, prompt) for prompt in prompts]
    tight = 24 * (sum(1 in layers or 4 in layers for layers in groups) + 1)
    for settings in (
        {},
        {"num_blocks_override": tight, "long_prefill_token_threshold": 7, "async_scheduling": False},
        {"num_blocks_override": tight, "kernel": 2},
    ):
        kernel = settings.pop("kernel", 0)
        for path in ("NATIVE", "TORCH"):
            monkeypatch.setattr(cpu, path, Supports(block_sizes=(kernel,) if kernel else ()))
        engine = InProcessEngine(folder, max_model_len=96, block_size=4, max_num_seqs=6, **settings)
        assert [group.layers for group in engine.runner.forward.groups] == groups
        for index, prompt in enumerate(prompts):
            engine.add(str(index), prompt, max_tokens=NEW_TOKENS)
        answers = engine.run()
        assert [answers[str(index)].tokens for index in range(len(prompts))] == expected, settings
        assert engine.statistics().num_preemptions > 0 or "num_blocks_override" not in settings
        engine.add("again", prompts[-1], max_tokens=NEW_TOKENS)
        again = engine.run()["again"]
        assert again.tokens == expected[-1]
        assert again.num_cached_tokens >= 32 or "num_blocks_override" in settings


@pytest.mark.parametrize("kernel", [4, 2])
@pytest.mark.parametrize("name", SHAPES)
def test_a_block_is_the_same_bytes_in_every_group(name: str, kernel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fields, groups = SHAPES[name]
    layout = kv_layout(parse_model_config(RAW | fields, "config.json"), 4, "float32")
    assert [group.layers for group in layout.groups] == groups
    monkeypatch.setattr(cpu, "NATIVE", Supports(block_sizes=(kernel,)))
    caches = allocate_kv_caches(layout, 10, CpuBackend(), torch.device("cpu"))
    (memory,) = {cache.untyped_storage().data_ptr(): cache.untyped_storage() for cache in caches.values()}.values()
    assert memory.nbytes() == 10 * layout.block_bytes
    (whole,) = {blocks.data_ptr(): blocks for (blocks,) in group_caches(layout, caches, 10)}.values()
    ratio = 4 // kernel
    for group in layout.groups:
        for number, layer in enumerate(group.layers, 1):
            caches[layer][:, 3 * ratio : 4 * ratio] = number
        written = sum(caches[layer][0].numel() for layer in group.layers) * 2 // 10
        numbers = whole.view(torch.float32)
        assert numbers[:, 3].count_nonzero() == numbers.count_nonzero() == written, "layers overlap or leave the block"
        assert all(caches[layer].max() == number for number, layer in enumerate(group.layers, 1))
        whole.zero_()


def test_hits_end_at_the_last_whole_block_whatever_an_entry_weighs() -> None:
    """One head of 512 without a window, 4 of 4 with one: 32 times the numbers. 2 of 3 blocks of 40 tokens are whole."""
    fields = {"num_key_value_heads": 1, "head_dim": 16, "num_global_key_value_heads": 1, "global_head_dim": 512}
    kv = KVCacheManager(kv_layout(parse_model_config(RAW | fields, "config.json"), 16, "float32"), 64, True)
    step(kv, first := case(1, 40, 16), 40)
    kv.free(first)
    hits, num_hits = kv.get_computed_blocks(case(2, 40, 16))
    assert num_hits == 32 and [len(blocks) for blocks in hits] == [2, 2, 2]


def test_draft_model_with_several_shapes_is_refused(tmp_path: Path) -> None:
    fields, _ = SHAPES["fewer heads without a window"]
    folder = checkpoint(tmp_path, model_of(fields), fields)
    own = {"method": "draft_model", "model": load_model_config(folder), "model_path": str(folder)}
    with pytest.raises(ConfigError, match="has layers with different KV heads or head dimensions, which a draft model"):
        InProcessEngine(folder, num_speculative_tokens=2, speculative=own)


def test_groups_without_their_own_shape_are_read_from_old_messages() -> None:
    old = b'{"groups":[{"kind":"full_attention","block_size":16,"layers":[0,1],"window":0}],'
    layout = msgspec.json.decode(old + b'"num_kv_heads":2,"head_dim":8,"dtype":"float32"}', type=KVLayout)
    assert layout.kv_shape(layout.groups[0]) == (2, 8) and layout.block_bytes == 2 * 16 * 2 * 8 * 2 * 4


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_global_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_global_key_value_heads 3"),
        ({"global_head_dim": 7}, "global_head_dim 7 must be even"),
        ({"global_head_dim": 0}, "global_head_dim must be an integer from 1 to 1024"),
    ],
    ids=str,
)
def test_invalid_shapes_are_errors(fields: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_model_config(RAW | {"num_key_value_heads": 2} | fields, "config.json")
