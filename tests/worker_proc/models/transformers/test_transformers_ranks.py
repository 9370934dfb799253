"""Tensor parallelism of models that transformers computes: two ranks have its tokens, or are refused."""

import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from adapter_steps import AdapterRunner, adapter_config
from checkpoints import greedy_tokens
from peft_adapters import make_peft_adapter
from quantised_checkpoints import FORMATS, quantise_checkpoint
from thread_ranks import ThreadRank, on_ranks
from tiny_models import make_tiny, tiny_config
from transformers import AutoModelForCausalLM
from transformers.models.phi3.modeling_phi3 import Phi3Config

from quire.protocol.model.checkpoint import stored_tensors, with_stored_format
from quire.protocol.model.measured_config import DivisionQuestion, MeasuredConfig, Refused
from quire.protocol.model.model_config import ModelConfig, load_model_config
from quire.worker_proc.models.transformers import measure, ranks
from quire.worker_proc.models.transformers.model import TransformersModel

pytestmark = pytest.mark.full

ODD = {"vocab_size": 97}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "gpt_neox": (2, ODD),
    "cohere": (2, {"num_key_value_heads": 2}),
    "olmo": (2, ODD | {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "phi3": (4, {"num_key_value_heads": 2}),
    "olmo2": (4, {}),
    "granite_swa": (2, {"num_key_value_heads": 2}),
    "deepseek_v2": (2, {}),
    "deepseek_v3": (4, {}),
    "dots1": (2, {"num_key_value_heads": 2}),
    "aria_text": (2, {"num_key_value_heads": 2}),
}
"""Heads of each of two ranks, of 4, and settings. In order: joined heads, biases and parallel layers; KV heads; tied
rows of an odd number; outputs that are gathered, joined ones and with norms over all heads; sinks; keys from latents;
experts beside whole attention; shared experts; experts whose weights are transposed."""
PROMPTS = [[3 + (7 * i + 11 * n) % 90 for i in range(n)] for n in (5, 21, 17)]
NUM_TOKENS = 8


@pytest.fixture(autouse=True)
def built(monkeypatch: pytest.MonkeyPatch) -> list[TransformersModel]:
    """Build models one by one: transformers does it with global state, which ranks in threads share. Return them."""
    lock, plain, models = threading.Lock(), TransformersModel.__init__, []

    def build(self: TransformersModel, *given: Any) -> None:
        with lock:
            plain(self, *given)
            models.append(self)

    monkeypatch.setattr(TransformersModel, "__init__", build)
    return models


def divided(settings: str, size: int = 2) -> MeasuredConfig | Refused:
    found = msgspec.msgpack.decode(measure.answer(settings.encode()), type=MeasuredConfig)
    question = msgspec.msgpack.encode(DivisionQuestion(found, size))
    return msgspec.msgpack.decode(ranks.answer(question), type=MeasuredConfig | Refused)


def read(folder: Path) -> ModelConfig:
    found = divided((folder / "config.json").read_text())
    assert isinstance(found, MeasuredConfig), found
    return load_model_config(folder, found)


def answers(folder: Path, model: ModelConfig, adapters: list[Path] | None = None) -> list[list[int]]:
    """Return the tokens of two ranks, which are the same: of all prompts, or of one with each adapter."""
    requests = [(prompt, 0) for prompt in PROMPTS] if adapters is None else [(PROMPTS[1], n) for n in range(3)]
    settings = {"tensor_parallel_size": 2, "enable_lora": adapters is not None, "model": model}
    adapter_config(folder, **settings)  # threads must not be the first that let msgspec read its type

    def on_rank(group: ThreadRank) -> list[list[int]]:
        runner = AdapterRunner(folder, group=group, **settings)
        for number, adapter in enumerate(adapters or [], 1):
            assert runner.load(adapter, number, number - 1).problem == ""
        return [tokens for tokens, _ in runner.generate(requests, NUM_TOKENS)]

    first, second = on_ranks(2, on_rank)
    assert first == second
    return first


@pytest.mark.parametrize("family", CASES)
def test_greedy_tokens_equal_transformers(family: str, tmp_path: Path, built: list[TransformersModel]) -> None:
    heads, changes = CASES[family]
    model = make_tiny(tmp_path, family, **changes)
    wanted = [greedy_tokens(model, [prompt], NUM_TOKENS)[0] for prompt in PROMPTS]
    assert answers(tmp_path, read(tmp_path)) == wanted
    assert {rank.attention_shape(0).num_heads for rank in built} == {heads}


def test_adapters(tmp_path: Path) -> None:
    """Of layers that are divided by outputs, by inputs, and not at all, in the same steps."""
    model = make_tiny(tmp_path, "deepseek_v2")
    names, folders = ["q_a_proj", "kv_b_proj", "o_proj"], [tmp_path / "1", tmp_path / "2"]
    tuned = [make_peft_adapter(model, each, seed=n, target_modules=names) for n, each in enumerate(folders)]
    wanted = [greedy_tokens(each, [PROMPTS[1]], NUM_TOKENS)[0] for each in (model, *tuned)]
    assert answers(tmp_path, read(tmp_path), folders) == wanted and len({*map(tuple, wanted)}) == 3


@pytest.mark.parametrize("form", ["awq", "gptq-act-order", "fp8-blocks", "nvfp4"])
def test_quantised_checkpoints(form: str, tmp_path: Path) -> None:
    make_tiny(tmp_path / "source", "cohere", num_key_value_heads=2)
    plain, folder = quantise_checkpoint(tmp_path / "source", tmp_path, FORMATS[form]()), tmp_path / "packed"
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    found = answers(folder, with_stored_format(folder, stored_tensors(folder, renamed=False), read(folder)))
    assert found == [greedy_tokens(model, [prompt], NUM_TOKENS)[0] for prompt in PROMPTS]


@pytest.mark.parametrize(
    "family, changes, plan, size, reason",
    [
        ("gpt2", {}, None, 2, "has no plan for tensor parallelism in transformers (tp_plan of GPT2LMHeadModel)"),
        ("gpt_oss", {}, None, 2, "has a plan for tensor parallelism (tp_plan of GptOssForCausalLM) that divides no"),
        (
            "cohere",
            {"num_key_value_heads": 2},
            None,
            4,
            "has 4 heads and 2 KV heads in model.layers.0.self_attn, which 4",
        ),
        (
            "olmo",
            {},
            None,
            3,
            "has no 3 equal parts of model.layers.0.self_attn.q_proj.weight, whose shape is [64, 64]",
        ),
        # Its feed-forward layers choose outputs by their mean and deviation over the whole width.
        (
            "gemma3n_text",
            {"activation_sparsity_pattern": [0.5] * 4},
            None,
            2,
            "computes something else on 2 ranks, by its plan",
        ),
        # Halves of joined queries, keys and values are other heads.
        ("phi3", {}, {"layers.*.self_attn.qkv_proj": "colwise"}, 2, "does not run on a part of its"),
        ("phi3", {}, {"layers.*.mlp.gate_up_proj": "colwise"}, 2, "does not run on a part of its"),
        ("phi3", {}, {"layers.*.self_attn.o_proj": "own"}, 2, "layers.0.self_attn.o_proj own in its"),
        ("phi3", {}, {"layers.*.mlp": "rowwise"}, 2, "layers.0.mlp rowwise, which is a Phi3MLP"),
    ],
)
def test_a_model_that_ranks_cannot_share_is_refused(
    family: str,
    changes: dict[str, Any],
    plan: dict[str, str] | None,
    size: int,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if plan is not None:
        monkeypatch.setattr(Phi3Config, "base_model_tp_plan", Phi3Config.base_model_tp_plan | plan)
    settings = tiny_config(family, **changes).to_json_string(use_diff=False)
    found = divided(settings, size)
    assert isinstance(found, Refused) and reason in found.reason
