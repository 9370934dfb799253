"""The decoder against transformers: the same checkpoint, the same logits, however the tokens are cut into steps."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from model_steps import Rows

from quire.protocol.model.model_config import SUPPORTED_ARCHITECTURES, load_model_config
from quire.worker_proc.attention.cpu import CpuBackend
from quire.worker_proc.models.decoder import Decoder
from quire.worker_proc.models.registry import MODELS, build_model
from quire.worker_proc.startup.loader import load_weights

Factory = Callable[..., tuple[Path, Any]]

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-gqa": ("llama", {}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "llama-wide-heads": ("llama", {"head_dim": 24}),
    "llama-groups-of-3": ("llama", {"hidden_size": 48, "num_attention_heads": 6, "head_dim": 4}),
    "llama-llama3-rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-linear-rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen3": ("qwen3", {}),
    "qwen3-wide-heads-tied": ("qwen3", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
}


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def _load(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    model = build_model(load_model_config(folder), dtype, "cpu")
    load_weights(model, folder, dtype, progress=False)
    return model


def _assert_same(logits: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers_however_steps_are_cut(variant: str, checkpoint_factory: Factory) -> None:
    family, overrides = VARIANTS[variant]
    folder, reference = checkpoint_factory(family, **overrides)
    model = _load(folder)
    generator = torch.Generator().manual_seed(1)
    lengths = [45, 3, 30, 17, 1]
    prompts = [torch.randint(0, 97, (length,), generator=generator) for length in lengths]
    expected = [reference(prompt[None]).logits[0] for prompt in prompts]

    whole = Rows(model, lengths, CpuBackend()).step(dict(enumerate(prompts)))
    for row, logits in whole.items():
        _assert_same(logits, expected[row])

    for row, logits in enumerate(Rows(model, lengths, CpuBackend(), seed=2).run_in_pieces(prompts)):
        _assert_same(logits, expected[row])


@pytest.mark.parametrize("variant", ["llama-biases", "qwen2-tied"])
def test_prepacked_weights_give_the_same_logits(variant: str, checkpoint_factory: Factory) -> None:
    family, overrides = VARIANTS[variant]
    folder, reference = checkpoint_factory(family, **overrides)
    model = _load(folder)
    assert model.prepack() and model.prepack()
    with pytest.raises(RuntimeError, match="prepacked"):
        model.weight_slots()
    assert model.layers[0].attention.qkv.weight.numel() == 0
    prompt = torch.arange(20)
    expected = reference(prompt[None]).logits[0]
    rows = Rows(model, [20], CpuBackend())
    _assert_same(rows.step({0: prompt[:19]})[0], expected[:19])
    _assert_same(rows.step({0: prompt[19:]})[0], expected[19:])
    assert model.logits(torch.empty(0, model.config.hidden_size)).shape == (0, 97)


def test_greedy_decoding_gives_the_tokens_of_transformers(checkpoint_factory: Factory) -> None:
    folder, reference = checkpoint_factory("llama", rope_parameters=LLAMA3_ROPE)
    prompts = [torch.arange(3, 3 + length) for length in (5, 9, 2)]
    wanted = [
        reference.generate(prompt[None], max_new_tokens=40, min_new_tokens=40, do_sample=False, eos_token_id=None)
        for prompt in prompts
    ]
    rows = Rows(_load(folder), [len(prompt) + 40 for prompt in prompts], CpuBackend())
    assert rows.greedy(prompts, 40) == [row[0].tolist() for row in wanted]


def test_bfloat16_stays_near_float32(checkpoint_factory: Factory) -> None:
    folder, _ = checkpoint_factory("qwen3", dtype=torch.bfloat16)
    prompt = torch.arange(20)
    low, high = _load(folder, torch.bfloat16), _load(folder)
    assert all(p.dtype is torch.bfloat16 for p in low.parameters())
    rows = Rows(low, [20], CpuBackend())
    exact = Rows(high, [20], CpuBackend()).step({0: prompt})[0]
    error = (rows.step({0: prompt})[0] - exact).abs().mean() / exact.abs().mean()
    assert error < 0.05


def test_every_supported_architecture_has_a_model() -> None:
    assert set(MODELS) == set(SUPPORTED_ARCHITECTURES)


def test_a_meta_model_takes_no_memory_and_knows_its_weights(checkpoint_factory: Factory) -> None:
    folder, reference = checkpoint_factory("qwen2")
    model = build_model(load_model_config(folder), torch.float32, "meta")
    shapes = {name: slot.shape for name, slot in model.weight_slots().items()}
    assert shapes == {name: tuple(weight.shape) for name, weight in reference.named_parameters()}


def test_the_rotary_table_is_as_long_as_the_engine_needs(checkpoint_factory: Factory) -> None:
    folder, _ = checkpoint_factory("llama")
    config = load_model_config(folder)
    assert build_model(config, torch.float32, "cpu").rope.shape == (2, 256, 8)
    assert build_model(config, torch.float32, "cpu", max_position=32).rope.shape == (2, 32, 8)
