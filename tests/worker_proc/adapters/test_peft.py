"""Adapters against PEFT: equal logits and greedy tokens of the same checkpoint and the same adapter files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_steps import AdapterRunner, logits_of
from checkpoints import greedy_tokens
from peft_adapters import ATTENTION, EXPERTS, make_peft_adapter

Factory = Callable[..., tuple[Path, Any]]

LENGTHS = [21, 3, 14, 9]
NUM_TOKENS = 10
OF_EXPERTS: dict[str, Any] = {"target_modules": ATTENTION, "target_parameters": EXPERTS}

OF_LLAMA4 = ("experts.gate_up_proj", "experts.down_proj")

IN_DEFAULT_RUNS = ("mixtral",)
VARIANTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {}),
    "mixtral": ("mixtral", {}, OF_EXPERTS),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}, {}),
    "llama-rank-1": ("llama", {}, {"r": 1, "lora_alpha": 3}),
    "llama-rank-64": ("llama", {"hidden_size": 96}, {"r": 64}),
    "llama-rslora": ("llama", {}, {"r": 16, "use_rslora": True}),
    "llama-only-values": ("llama", {}, {"target_modules": ["v_proj"]}),
    "llama-one-layer": (
        "llama",
        {},
        {"layers_to_transform": [1], "target_modules": ["k_proj", "up_proj", "down_proj"]},
    ),
    "llama-patterns": (
        "llama",
        {},
        {
            "rank_pattern": {
                "q_proj": 1,
                "layers.1.mlp.up_proj": 33,
                r"^model\.layers\.[0-9]+\.self_attn\.(k|v)_proj": 6,
            },
            "alpha_pattern": {"k_proj": 20, "0.mlp.up_proj": 1, r".*layers\.(0|2)\..*(q|down)_proj$": 5},
        },
    ),
    "qwen3": ("qwen3", {}, {"r": 7}),
    "gemma3": ("gemma3", {}, {"r": 12}),
    "olmo2": ("olmo2", {}, {}),
    "granite": ("granite", {}, {}),
    "glm4": ("glm4", {}, {"target_modules": ["q_proj", "k_proj", "gate_up_proj"]}),
    "phi3": ("phi3", {}, {"target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]}),
    "qwen3_moe": ("qwen3_moe", {}, OF_EXPERTS | {"r": 5}),
    "llama4": ("llama4", {}, {}),
    "llama4-experts": (
        "llama4",
        {},
        {
            "target_modules": ATTENTION,
            "target_parameters": [f"feed_forward.{name}" for name in (*OF_LLAMA4, "router.weight")],
        },
    ),
    "glm4_moe-router": ("glm4_moe", {}, {"target_modules": ["q_proj"], "target_parameters": ["mlp.gate.weight"]}),
    "qwen3_moe-router": ("qwen3_moe", {}, {"target_modules": ["q_proj"], "target_parameters": ["mlp.gate.weight"]}),
}


@pytest.mark.parametrize(
    "variant", [name if name in IN_DEFAULT_RUNS else pytest.param(name, marks=pytest.mark.full) for name in VARIANTS]
)
def test_logits_and_greedy_tokens_equal_those_of_peft(
    variant: str, checkpoint_factory: Factory, tmp_path: Path
) -> None:
    """In one batch: two adapters, of which one has another rank, and the model without one."""
    family, overrides, settings = VARIANTS[variant]
    folder, base = checkpoint_factory(family, **overrides)
    first = make_peft_adapter(base, tmp_path / "first", seed=1, **settings)
    second = make_peft_adapter(base, tmp_path / "second", seed=2, **{**settings, "r": 3})
    runner = AdapterRunner(folder)
    assert [runner.load(tmp_path / "first", 1, 2).problem, runner.load(tmp_path / "second", 2, 0).problem] == ["", ""]
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, 97, (length,), generator=generator).tolist() for length in LENGTHS]
    requests = list(zip(prompts, (1, 2, 0, 1), strict=True))
    models = [(base, first, second)[number] for _, number in requests]
    for got, model, prompt in zip(logits_of(runner, requests), models, prompts, strict=True):
        with torch.inference_mode():
            expected = model(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    tokens = [tokens for tokens, _ in runner.generate(requests, NUM_TOKENS)]
    assert tokens == [
        greedy_tokens(model, [prompt], NUM_TOKENS)[0] for model, prompt in zip(models, prompts, strict=True)
    ]
