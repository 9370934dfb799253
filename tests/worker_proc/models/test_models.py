"""Every family against transformers: equal logits of the same checkpoint, with any division of the tokens into steps.

Contexts are several windows long. If only the reference attention (``support/worker/dense_attention.py``) passes, the
model is correct and the CPU's backend is not.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import FAMILIES, LLAMA3_ROPE
from dense_attention import DenseBackend
from model_steps import Rows
from thread_ranks import ThreadRank, on_ranks
from tiers import thinned

from quire.protocol.errors import ConfigError
from quire.protocol.model.model_config import load_model_config
from quire.worker_proc.attention.cpu import CpuBackend
from quire.worker_proc.models.decoder import Decoder
from quire.worker_proc.models.linear import Linear
from quire.worker_proc.models.registry import build_model
from quire.worker_proc.startup.loader import init_dummy_weights, load_weights

Factory = Callable[..., tuple[Path, Any]]

LENGTHS = [45, 3, 30, 17, 1]
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.2, 1.5],
    "long_factor": [1.5, 3.0, 8.0],
    "original_max_position_embeddings": 16,
    "partial_rotary_factor": 0.75,
}

LLAMAS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "llama-wide-heads": ("llama", {"head_dim": 24}),
    "llama-groups-of-3": ("llama", {"hidden_size": 48, "num_attention_heads": 6, "head_dim": 4}),
    "llama-llama3-rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-linear-rope": ("llama", {"rope_parameters": LINEAR}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen3-wide-heads-tied": ("qwen3", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in FAMILIES} | {
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "llama-yarn-mscale": ("llama", {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}}),
    "llama-yarn-given-factor": ("llama", {"rope_parameters": YARN | {"attention_factor": 1.3, "truncate": False}}),
    "llama-dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    "qwen2-last-layers-windowed": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "num_hidden_layers": 3},
    ),
    "qwen3-windowed": ("qwen3", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}),
    "phi3-windowed-partial": (
        "phi3",
        {
            "sliding_window": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
    "smollm3-windowed": (
        "smollm3",
        {"use_sliding_window": True, "sliding_window": 6, "no_rope_layers": [1, 0, 0, 1], "tie_word_embeddings": True},
    ),
    "gemma3-two-ropes": (
        "gemma3",
        {
            "rope_parameters": {
                "full_attention": LINEAR | {"rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
    ),
    "olmo3-yarn": (
        "olmo3",
        {"rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 1e3}}},
    ),
    "exaone4-without-windows": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    "seed_oss-biases": ("seed_oss", {"attention_out_bias": True, "mlp_bias": True}),
    "llama4-maverick": ("llama4", {"use_qk_norm": False, "moe_layers": None, "interleave_moe_layer_step": 2}),
    "llama4-scout": (
        "llama4",
        {"num_experts_per_tok": 1, "rope_parameters": LLAMA3_ROPE | {"high_freq_factor": 1.0}, "moe_layers": None},
    ),
    "llama4-whole": ("llama4", {"attention_chunk_size": None, "attn_temperature_tuning": False, "moe_layers": []}),
    "mixtral-windowed": ("mixtral", {"sliding_window": 8}),
    "qwen3_moe-dense-layers": (
        "qwen3_moe",
        {"decoder_sparse_step": 1, "mlp_only_layers": [0, 2], "norm_topk_prob": True, "attention_bias": True},
    ),
}


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def _load(folder: Path, parallel: ThreadRank | None = None, max_position: int | None = None) -> Decoder:
    model = build_model(load_model_config(folder), torch.float32, "cpu", max_position, parallel=parallel)
    load_weights(model, folder, torch.float32, progress=False)
    return model


def _prompts(lengths: list[int], seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 97, (length,), generator=generator) for length in lengths]


def _assert_same(logits: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=2e-4)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("variant", [*thinned(LLAMAS, keep=6), *thinned(VARIANTS, keep=7)])
def test_logits_equal_transformers_with_any_prefill_chunks(variant: str, checkpoint_factory: Factory) -> None:
    family, overrides = (LLAMAS | VARIANTS)[variant]
    folder, reference = checkpoint_factory(family, **overrides)
    model = _load(folder)
    prompts = _prompts(LENGTHS)
    expected = [reference(prompt[None]).logits[0] for prompt in prompts]
    for row, logits in Rows(model, LENGTHS, DenseBackend()).step(dict(enumerate(prompts))).items():
        _assert_same(logits, expected[row])
    for row, logits in Rows(model, LENGTHS, CpuBackend()).step(dict(enumerate(prompts))).items():
        _assert_same(logits, expected[row])
    for row, logits in enumerate(Rows(model, LENGTHS, CpuBackend(), seed=2).run_in_pieces(prompts)):
        _assert_same(logits, expected[row])


@pytest.mark.parametrize("family", thinned(FAMILIES, keep=5))
def test_greedy_tokens_equal_transformers_on_one_and_two_ranks(family: str, checkpoint_factory: Factory) -> None:
    folder, reference = checkpoint_factory(family)
    prompts = _prompts([11, 20, 4], seed=3)
    num_tokens = 12
    lengths = [len(prompt) + num_tokens for prompt in prompts]
    alone = Rows(_load(folder), lengths, DenseBackend()).greedy(prompts, num_tokens)
    for prompt, tokens in zip(prompts, alone, strict=True):
        best = reference(torch.tensor([tokens])).logits[0].argmax(-1)
        assert tokens[len(prompt) :] == best[len(prompt) - 1 : -1].tolist()

    def on_rank(parallel: ThreadRank) -> list[list[int]]:
        return Rows(_load(folder, parallel), lengths, DenseBackend()).greedy(prompts, num_tokens)

    assert on_ranks(2, on_rank) == [alone, alone]


@pytest.mark.parametrize("variant", thinned(["llama", "phi3", "olmo2", "gemma2", "mixtral", "gpt_oss", "glm4"], keep=2))
def test_more_ranks_than_kv_heads_give_the_same_logits(variant: str, checkpoint_factory: Factory) -> None:
    folder, reference = checkpoint_factory(variant)
    prompts = _prompts([20, 9])
    expected = [reference(prompt[None]).logits[0] for prompt in prompts]

    def on_rank(parallel: ThreadRank) -> dict[int, torch.Tensor]:
        model = _load(folder, parallel)
        assert model.attention_shape(0).num_kv_heads == 1 and sum(p.numel() for p in model.parameters()) < 0.5 * total
        return Rows(model, [20, 9], DenseBackend()).step(dict(enumerate(prompts)))

    total = sum(p.numel() for p in reference.parameters())
    first, *others = on_ranks(4, on_rank)
    for row, logits in first.items():
        _assert_same(logits, expected[row])
        assert all(torch.equal(logits, other[row]) for other in others)


@pytest.mark.parametrize(("max_position", "length"), [(16, 16), (64, 40)])
def test_longrope_factors_follow_the_engines_length(
    max_position: int, length: int, checkpoint_factory: Factory
) -> None:
    """Phi-3 in transformers chooses factors by the present length; Quire chooses them once for all contexts."""
    folder, reference = checkpoint_factory("phi3", rope_parameters=LONGROPE, original_max_position_embeddings=16)
    model = _load(folder, max_position=max_position)
    assert model.rope.shape == (2, max_position, 6)
    prompt = _prompts([length])[0]
    expected = reference(prompt[None]).logits[0]
    _assert_same(Rows(model, [length], DenseBackend()).run_in_pieces([prompt])[0], expected)


def test_dynamic_rope_is_limited_to_the_models_length(checkpoint_factory: Factory) -> None:
    folder, _ = checkpoint_factory(*VARIANTS["llama-dynamic"][:1], **VARIANTS["llama-dynamic"][1])
    with pytest.raises(ConfigError, match=r"rope type dynamic serves up to .* not 257"):
        build_model(load_model_config(folder), torch.float32, "cpu", 257)


@pytest.mark.parametrize("family", thinned(FAMILIES, keep=4))
def test_random_weights_give_finite_logits_that_ranks_agree_on(family: str, checkpoint_factory: Factory) -> None:
    folder, _ = checkpoint_factory(family)
    config = load_model_config(folder)
    prompt = _prompts([20])[0]

    def logits(parallel: ThreadRank | None) -> torch.Tensor:
        model = build_model(config, torch.float32, "cpu", parallel=parallel)
        init_dummy_weights(model, seed=5)
        return Rows(model, [20], DenseBackend()).step({0: prompt})[0]

    alone = logits(None)
    assert bool(alone.isfinite().all()) and float(alone.std()) > 0
    for other in on_ranks(2, logits):
        torch.testing.assert_close(other, alone)


@pytest.mark.parametrize("family", thinned(["gemma3", "mixtral", "gpt_oss", "deepseek_v3"], keep=1))
@pytest.mark.parametrize("deterministic", [False, True])
def test_prepacked_weights_give_the_same_logits(family: str, deterministic: bool, checkpoint_factory: Factory) -> None:
    folder, reference = checkpoint_factory(family)
    model = _load(folder)
    assert model.prepack(deterministic=deterministic) and model.prepack(deterministic=deterministic)
    with pytest.raises(RuntimeError, match="prepacked"):
        model.weight_slots()
    assert all(module.weight.numel() == 0 for module in model.modules() if isinstance(module, Linear))
    assert model.logits(torch.empty(0, model.config.hidden_size)).shape == (0, 97)
    prompts = _prompts([20, 9])
    for row, logits in enumerate(Rows(model, [20, 9], DenseBackend()).run_in_pieces(prompts)):
        _assert_same(logits, reference(prompts[row][None]).logits[0])


@pytest.mark.parametrize("family", thinned(["gemma3", "granite", "mixtral", "gpt_oss", "deepseek_v3"], keep=2))
def test_wide_activations_with_narrow_weights_equal_wide_weights(family: str, checkpoint_factory: Factory) -> None:
    folder, _ = checkpoint_factory(family, dtype=torch.bfloat16)
    prompt = _prompts([20])[0]

    def logits(dtype: torch.dtype, activation_dtype: torch.dtype, *, prepack: bool = False) -> torch.Tensor:
        config = load_model_config(folder)
        model = build_model(config, dtype, "cpu", activation_dtype=activation_dtype)
        load_weights(model, folder, dtype, progress=False)
        if prepack:
            model.prepack(deterministic=True)
        return Rows(model, [20], DenseBackend()).step({0: prompt})[0]

    exact = logits(torch.float32, torch.float32)
    low = logits(torch.bfloat16, torch.bfloat16)
    assert (low - exact).abs().mean() < 0.2 * exact.abs().mean()
    for prepack in (False, True):
        mixed = logits(torch.bfloat16, torch.float32, prepack=prepack)
        # Gemma's embedding multiplier is rounded to the weights' dtype.
        torch.testing.assert_close(mixed, exact, atol=0.03 if family == "gemma3" else 2e-4, rtol=0.01)
