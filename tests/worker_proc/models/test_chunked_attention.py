"""A native model with chunked local attention in three of five layers, through the real scheduler and runner.

Chunks of 20 tokens are no multiple of the blocks, and prompts, steps, cached prefixes and forks end around borders.
"""

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from inprocess import InProcessEngine
from model_steps import Rows
from plain_decoder import plain_logits
from safetensors.torch import save_file
from tiers import thinned

from quire.protocol.model.kv_layout import kv_layout
from quire.protocol.model.model_config import parse_model_config
from quire.worker_proc.attention.cpu import CpuBackend
from quire.worker_proc.models.decoder import Decoder
from quire.worker_proc.models.registry import build_model
from quire.worker_proc.startup.loader import init_dummy_weights

RAW: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"], "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "query_pre_attn_scalar": 12, "dtype": "float32", "head_dim": 8, "layer_types": ["full_attention"] * 5,
}  # fmt: skip
CONFIG = msgspec.structs.replace(parse_model_config(RAW, "config.json"), chunks=[20, 0, 20, 20, 0])
NEW_TOKENS = 24
WAYS: dict[str, dict[str, Any]] = {
    "blocks of 16": {"block_size": 16},
    "chunks of 7, tight pool, synchronous": {
        "block_size": 4, "long_prefill_token_threshold": 7, "num_blocks_override": 120, "async_scheduling": False
    },
    "a draft model with chunks": {"block_size": 16, "num_speculative_tokens": 3},
    "torch operators": {"block_size": 16, "long_prefill_token_threshold": 30},
}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Decoder:
    model = build_model(CONFIG, torch.float32, "cpu")
    init_dummy_weights(model, seed=0)
    for name, slot in model.weight_slots().items():
        if not name.endswith(("norm.weight", "embed_tokens.weight")):
            slot.target.mul_(25)  # otherwise the last token decides the next one; without chunks, most tokens differ
    return model


@pytest.mark.parametrize("native", [True, False])
@torch.inference_mode()
def test_logits_equal_a_plain_decoder(model: Decoder, native: bool) -> None:
    prompts = [torch.arange(length) * step % 97 for length, step in ((70, 7), (20, 5), (41, 3))]
    rows = Rows(model, [len(prompt) for prompt in prompts], CpuBackend(native))
    for logits, prompt in zip(rows.run_in_pieces(prompts), prompts, strict=True):
        torch.testing.assert_close(logits, plain_logits(model, prompt), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("way", thinned(WAYS, keep=1))
def test_engine(way: str, model: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "torch operators":
        monkeypatch.setenv("QUIRE_CPU_NATIVE", "0")
    tensors = {name: (slot.target - slot.offset).contiguous() for name, slot in model.weight_slots().items()}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(RAW))
    settings = dict(WAYS[way])
    if "num_speculative_tokens" in settings:
        settings["speculative"] = {"method": "draft_model", "model": CONFIG, "model_path": str(tmp_path)}
    engine = InProcessEngine(tmp_path, model=CONFIG, max_model_len=112, max_num_seqs=8, **settings)
    groups = [(group.kind, group.chunk, group.layers) for group in engine.runner.forward.groups]
    assert groups == [("full_attention", 0, [1, 4]), ("chunked_local", 20, [0, 2, 3])]
    rng = random.Random(3)
    prompts = [[rng.randrange(97) for _ in range(length)] for length in (1, 19, 20, 21, 40, 59, 61)]
    prompts.append(prompts[-1][:50] + [rng.randrange(97)] * 9)
    for index, prompt in enumerate(prompts):
        engine.add(str(index), prompt, max_tokens=NEW_TOKENS)
    answers = engine.run()
    for index, prompt in enumerate(prompts):
        check_greedy(model, prompt, answers[str(index)].tokens)
    assert engine.statistics().num_preemptions > 0 or "num_blocks_override" not in settings
    assert engine.statistics().num_accepted_tokens > 50 or "speculative" not in settings
    again = {"twice": prompts[4] + [3], "further": prompts[6] + answers["6"].tokens[:20] + [5]}
    for name, prompt in again.items():  # 41 and 82 tokens: hits that end at a border or in the middle of a chunk
        engine.add(name, prompt, max_tokens=NEW_TOKENS)
    engine.add("parent", [7, 8, 9], max_tokens=60)
    for child, length in (("at a border", 20), ("before a border", 39)):
        while len(engine.answers["parent"].tokens) < length:
            engine.step()
        engine.add(child, [], forked_from=("parent", length), max_tokens=NEW_TOKENS)
    answers = engine.run()
    for name, prompt in again.items():
        check_greedy(model, prompt, answers[name].tokens)
        assert answers[name].num_cached_tokens == (len(prompt) - 1) // settings["block_size"] * settings["block_size"]
    check_greedy(model, [7, 8, 9], answers["parent"].tokens)
    for child, length in (("at a border", 20), ("before a border", 39)):
        parent = [7, 8, 9, *answers["parent"].tokens]
        check_greedy(model, parent[:length], answers[child].tokens)


def check_greedy(model: Decoder, prompt: list[int], answer: list[int]) -> None:
    """Check each token of an answer against logits that one pass over the whole text computes."""
    with torch.inference_mode():
        logits = plain_logits(model, torch.tensor(prompt + answer))[len(prompt) - 1 : -1]
    assert logits.argmax(-1).tolist() == answer


def test_groups_of_layers_with_windows_and_chunks_and_neither() -> None:
    mixed = msgspec.structs.replace(CONFIG, windows=[0, 8, 0, 0, 0])
    groups = [(group.kind, group.window, group.layers) for group in kv_layout(mixed, 16, "float32").groups]
    assert groups == [("full_attention", 0, [4]), ("chunked_local", 20, [0]), ("chunked_local", 20, [2]),
                      ("chunked_local", 20, [3]), ("sliding_window", 8, [1])]  # fmt: skip
