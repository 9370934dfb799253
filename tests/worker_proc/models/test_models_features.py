"""Layers that share a KV cache, experts, and a check that each switch of a family has an effect."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from dense_attention import DenseBackend
from model_steps import Rows
from plain_decoder import plain_logits
from thread_ranks import on_ranks
from tiers import thinned

from quire.protocol.model.model_config import ModelConfig, load_model_config, parse_model_config
from quire.protocol.model.rope_config import RopeConfig
from quire.worker_proc.attention.cpu import CpuBackend
from quire.worker_proc.models.decoder import Decoder
from quire.worker_proc.models.ops import Experts, TorchOps, swiglu_oai
from quire.worker_proc.models.registry import build_model
from quire.worker_proc.parallel.group import TensorParallel
from quire.worker_proc.startup.loader import init_dummy_weights, load_weights

Factory = Callable[..., tuple[Path, Any]]


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


class TestSharedCaches:
    RAW: dict[str, Any] = {  # noqa: RUF012
        "architectures": ["Gemma3ForCausalLM"], "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 7, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "max_position_embeddings": 256, "sliding_window": 8, "query_pre_attn_scalar": 12,
        "layer_types": [f"{kind}_attention" for kind in
                        ("sliding", "full", "sliding", "sliding", "full", "sliding", "full")],
    }  # fmt: skip

    def _model(self, shared: int, parallel: TensorParallel | None = None) -> Decoder:
        config = parse_model_config(self.RAW | {"num_kv_shared_layers": shared}, "config.json")
        model = build_model(config, torch.float32, "cpu", parallel=parallel)
        init_dummy_weights(model, seed=0)
        for name, slot in model.weight_slots().items():
            if not name.endswith("norm.weight"):
                slot.target.mul_(15)
        return model

    def test_cache_of_the_last_layer_of_the_same_kind_is_read(self) -> None:
        assert self._model(4).config.cache_sources == [0, 1, 2, 2, 1, 2, 1]

    @pytest.mark.parametrize("shared", [0, 3, 5])
    def test_logits_equal_a_decoder_without_sharing(self, shared: int) -> None:
        model = self._model(shared)
        assert "model.layers.6.self_attn.k_proj.weight" not in model.weight_slots() or not shared
        prompts = [torch.arange(40) * 7 % 97, torch.arange(13) * 5 % 97]
        for prompt, logits in zip(prompts, Rows(model, [40, 13], CpuBackend()).run_in_pieces(prompts), strict=True):
            torch.testing.assert_close(logits, plain_logits(model, prompt), atol=1e-4, rtol=1e-4)
        for ranks in on_ranks(2, lambda p: Rows(self._model(shared, p), [40], DenseBackend()).step({0: prompts[0]})):
            torch.testing.assert_close(ranks[0], plain_logits(model, prompts[0]), atol=1e-4, rtol=1e-4)

    def test_unused_key_tensors_of_sharing_layers_are_skipped(
        self, checkpoint_factory: Factory, tmp_path: Path
    ) -> None:
        folder, _ = checkpoint_factory("gemma3")
        config = msgspec.structs.replace(load_model_config(folder), cache_sources=[0, 1, 2, 1])
        model = build_model(config, torch.float32, "cpu")
        load_weights(model, folder, torch.float32, progress=False)
        prompt = torch.arange(20)
        expected = plain_logits(model, prompt)
        torch.testing.assert_close(Rows(model, [20], DenseBackend()).step({0: prompt})[0], expected)


def _without_windows(config: ModelConfig) -> ModelConfig:
    return msgspec.structs.replace(config, windows=[])


def _with(**changes: Any) -> Callable[[ModelConfig], ModelConfig]:
    return lambda config: msgspec.structs.replace(config, **changes)


def _moe_with(**changes: Any) -> Callable[[ModelConfig], ModelConfig]:
    def change(config: ModelConfig) -> ModelConfig:
        assert config.moe is not None
        return msgspec.structs.replace(config, moe=msgspec.structs.replace(config.moe, **changes))

    return change


def _rope_with(**changes: Any) -> Callable[[ModelConfig], ModelConfig]:
    return lambda config: msgspec.structs.replace(config, rope=msgspec.structs.replace(config.rope, **changes))


_GLM4_NORMS = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm")
SWITCHES: list[tuple[str, Callable[[ModelConfig], ModelConfig]]] = [
    ("mistral", _without_windows),
    ("granite", _with(embedding_multiplier=1.0)),
    ("granite", _with(residual_multiplier=1.0)),
    ("granite", _with(attention_scale=None)),
    ("granite", _with(logits_scaling=1.0)),
    ("smollm3", _with(no_rope_layers=[])),
    ("gemma", _with(norm_offset=0.0)),
    ("gemma", _with(activation="silu")),
    ("gemma", _with(embedding_multiplier=1.0)),
    ("gemma2", _without_windows),
    ("gemma2", _with(attention_soft_cap=0.0)),
    ("gemma2", _with(final_soft_cap=0.0)),
    ("gemma2", _with(attention_scale=None)),
    ("gemma3", _without_windows),
    ("gemma3", _with(local_rope=None)),
    ("qwen3_moe", _moe_with(renormalise=True)),
    ("mixtral", _moe_with(renormalise=False)),
    ("gpt_oss", _without_windows),
    ("gpt_oss", _with(rope=RopeConfig(100.0))),
    ("gpt_oss", _rope_with(truncate=True)),
    ("gpt_oss", _rope_with(attention_factor=1.0)),
    ("gpt_oss", _rope_with(beta_fast=2.0)),
    ("exaone4", _with(no_rope_layers=[])),
    ("llama4", _with(chunks=[])),
    ("llama4", _with(qk_norm="")),
    ("llama4", _with(query_scale=None)),
    ("llama4", _moe_with(scales_inputs=False)),
    ("glm4", _with(interleaved_rope=False)),
    ("glm4", _with(norm_names=["post_mlp_layernorm", *_GLM4_NORMS])),
]


@pytest.mark.parametrize(("family", "change"), thinned(SWITCHES, keep=6))
def test_each_switch_matters(
    family: str, change: Callable[[ModelConfig], ModelConfig], checkpoint_factory: Factory
) -> None:
    """Without this, a comparison with transformers could pass with a switch off."""
    folder, _ = checkpoint_factory(family)
    config = load_model_config(folder)
    prompt = torch.arange(40) * 5 % 97
    answers = []
    for chosen in (config, change(config)):
        model = build_model(chosen, torch.float32, "cpu")
        load_weights(model, folder, torch.float32, progress=False)
        answers.append(Rows(model, [40], DenseBackend()).step({0: prompt})[0])
    assert float((answers[0] - answers[1]).abs().max()) > 0.01


class TestExperts:
    def _experts(self, dtype: torch.dtype = torch.float32, activation: str = "silu", biases: bool = True) -> Experts:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.empty(shape).normal_(0, 0.5, generator=generator).to(dtype)

        return Experts(
            normal(5, 12, 8),
            normal(5, 8, 6),
            normal(5, 12) if biases else None,
            normal(5, 8) if biases else None,
            activation,
        )

    def _one_by_one(self, x: torch.Tensor, e: Experts, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(x.shape)
        for token in range(len(x)):
            for share, expert in zip(shares[token], chosen[token].tolist(), strict=True):
                hidden = e.gate_up[expert] @ x[token] + (0 if e.gate_up_bias is None else e.gate_up_bias[expert])
                if e.activation == "swiglu_oai":
                    hidden = swiglu_oai(hidden)
                else:
                    hidden = F.silu(hidden[:6]) * hidden[6:]
                out[token] += share * (e.down[expert] @ hidden + (0 if e.down_bias is None else e.down_bias[expert]))
        return out

    @pytest.mark.parametrize("activation", ["silu", "swiglu_oai"])
    @pytest.mark.parametrize("biases", [True, False])
    @pytest.mark.parametrize("tokens", [0, 1, 9])
    def test_output_is_the_weighted_sum_of_the_chosen_experts(self, activation: str, biases: bool, tokens: int) -> None:
        generator = torch.Generator().manual_seed(1)
        x = torch.empty(tokens, 8).normal_(generator=generator)
        experts = self._experts(activation=activation, biases=biases)
        scores = torch.empty(tokens, 5).normal_(generator=generator)
        scores[:, 3] = -9.0  # Never chosen.
        chosen, shares = TorchOps().route(scores, 2, renormalise=True)
        assert shares.shape == chosen.shape == (tokens, 2) and not bool((chosen == 3).any())
        answer = TorchOps().experts(x, experts, chosen, shares)
        torch.testing.assert_close(answer, self._one_by_one(x, experts, chosen, shares))

    def test_expert_output_does_not_depend_on_other_tokens(self) -> None:
        generator = torch.Generator().manual_seed(2)
        x, scores = torch.empty(9, 8).normal_(generator=generator), torch.empty(9, 5).normal_(generator=generator)
        experts, ops = self._experts(), TorchOps()
        chosen, shares = ops.route(scores, 3, renormalise=False)
        together = ops.experts(x, experts, chosen, shares)
        for token in range(9):
            own = slice(token, token + 1)
            torch.testing.assert_close(ops.experts(x[own], experts, chosen[own], shares[own]), together[own])

    def test_gate_of_gpt_oss(self) -> None:
        gate_up = torch.tensor([[9.0, 9.0, -9.0, -9.0, 1.0, 0.5]])
        sevens = 7 / (1 + math.exp(-1.702 * 7)) * 8
        low = -9 / (1 + math.exp(1.702 * 9)) * -6
        one = 1 / (1 + math.exp(-1.702)) * 1.5
        torch.testing.assert_close(TorchOps().gate(gate_up, "swiglu_oai"), torch.tensor([[sevens, low, one]]))

    def test_expert_weights_with_and_without_renormalisation(self) -> None:
        scores = torch.randn(7, 5, generator=torch.Generator().manual_seed(3))
        experts, weights = TorchOps().route(scores, 2, renormalise=True)
        same, shares = TorchOps().route(scores.bfloat16(), 2, renormalise=False)
        assert experts.dtype is same.dtype is torch.int32 and weights.dtype is shares.dtype is torch.float32
        torch.testing.assert_close(weights.sum(-1), torch.ones(7))
        all_shares = scores.bfloat16().float().softmax(-1)
        torch.testing.assert_close(shares, all_shares.topk(2).values)
        assert TorchOps().route(torch.zeros(1, 5), 3, renormalise=True)[0].tolist() == [[0, 1, 2]]

    def test_activations_may_be_wider_than_weights(self) -> None:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(4))
        shares, chosen = torch.full((4, 2), 0.5), torch.tensor([[0, 1]] * 4, dtype=torch.int32)
        wide = TorchOps().experts(x, self._experts(torch.bfloat16), chosen, shares)
        assert wide.dtype is torch.float32
        torch.testing.assert_close(wide, TorchOps().experts(x, self._experts(), chosen, shares), atol=0.1, rtol=0.1)
