"""Models whose layers with a window have other KV heads or head dimensions, hence KV groups with their own blocks."""

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
from model_steps import Rows
from plain_decoder import plain_logits
from safetensors.torch import save_file
from thread_ranks import on_ranks

from quire.protocol.errors import ConfigError
from quire.protocol.model.kv_layout import KVLayout, kv_layout
from quire.protocol.model.model_config import load_model_config, parse_model_config
from quire.worker_proc.attention import cpu
from quire.worker_proc.attention.cpu import CpuBackend
from quire.worker_proc.attention.supports import Supports
from quire.worker_proc.batch.kv_cache import allocate_kv_caches
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

SHAPES: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "fewer heads without a window": (
        {"num_key_value_heads": 4, "num_global_key_value_heads": 1, "global_head_dim": 16},
        {"sliding_window": 4, "full_attention": 8},
    ),
    "wider heads without a window": (
        {"num_key_value_heads": 1, "num_global_key_value_heads": 2, "global_head_dim": 16},
        {"sliding_window": 16, "full_attention": 4},
    ),
    "no whole multiple": (
        {"num_key_value_heads": 4, "num_global_key_value_heads": 2, "global_head_dim": 12},
        {"sliding_window": 4, "full_attention": 4},
    ),
}
"""Fields of ``config.json``; block sizes of the groups with ``--block-size 4``."""

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
def test_engine_with_groups_of_different_blocks(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefix hits, chunks, preemption in a tight pool, and kernels with smaller blocks; every step is checked."""
    fields, block_sizes = SHAPES[name]
    model = model_of(fields)
    folder = checkpoint(tmp_path, model, fields)
    rng = random.Random(3)
    start = [rng.randrange(97) for _ in range(50)]
    prompts = [(start[: 2 * n // 3] + [rng.randrange(97) for _ in range(n)])[:n] for n in (1, 9, 30, 45, 60, 75)]
    expected = [greedy(model, prompt) for prompt in prompts]
    for settings in (
        {},
        {"num_blocks_override": 48, "long_prefill_token_threshold": 7, "async_scheduling": False},
        {"num_blocks_override": 48, "kernel": 2},
    ):
        kernel = settings.pop("kernel", 0)
        for path in ("NATIVE", "TORCH"):
            monkeypatch.setattr(cpu, path, Supports(block_sizes=(kernel,) if kernel else ()))
        engine = InProcessEngine(folder, max_model_len=96, block_size=4, max_num_seqs=6, **settings)
        found = {(group.kind, group.block_size) for group in engine.runner.forward.groups}
        assert found == set(block_sizes.items())
        for index, prompt in enumerate(prompts):
            engine.add(str(index), prompt, max_tokens=NEW_TOKENS)
        answers = engine.run()
        assert [answers[str(index)].tokens for index in range(len(prompts))] == expected, settings
        assert engine.statistics().num_preemptions > 0 or "num_blocks_override" not in settings
        engine.add("again", prompts[-1], max_tokens=NEW_TOKENS)
        again = engine.run()["again"]
        assert again.tokens == expected[-1]
        assert again.num_cached_tokens >= 32 or "num_blocks_override" in settings


@pytest.mark.parametrize("name", SHAPES)
def test_groups_with_blocks_of_equal_bytes_share_tensors(name: str) -> None:
    fields, block_sizes = SHAPES[name]
    layout = kv_layout(parse_model_config(RAW | fields, "config.json"), 4, "float32")
    caches = allocate_kv_caches(layout, 10, CpuBackend(), torch.device("cpu"))
    tensors = {cache.untyped_storage().data_ptr(): cache.untyped_storage().nbytes() for cache in caches.values()}
    assert sum(tensors.values()) == 10 * layout.block_bytes
    most = max(len(group.layers) for group in layout.groups)
    assert len(tensors) == most + (2 if name == "no whole multiple" else 0)
    assert {(group.kind, group.block_size) for group in layout.groups} == set(block_sizes.items())
    if name == "no whole multiple":
        return
    for group in layout.groups:  # block 3 is the same bytes in every group
        cache = caches[group.layers[0]]
        cache.zero_()
        cache[:, 3] = 1.0
        others = [caches[other.layers[0]] for other in layout.groups]
        assert all(other[:, 3].eq(1.0).all() and other.sum() == other[:, 3].numel() for other in others)


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
