"""Models that transformers computes with Quire's attention, in a whole engine; and what measuring refuses.

One file, because importing transformers takes seconds in each process of a test run.
"""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from checkpoints import greedy_tokens
from inprocess import InProcessEngine
from measured_here import measure_here
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny, tiny_config

from quire.protocol.errors import ConfigError
from quire.protocol.model.measured_config import MeasuredConfig, Refused
from quire.worker_proc.models.transformers import measure as measuring

pytestmark = pytest.mark.full

PROMPTS = [[3 + (7 * i + 11 * n) % 90 for i in range(n)] for n in (5, 21, 40)]
ENGINE: dict[str, Any] = {"block_size": 16, "max_num_batched_tokens": 24, "max_num_seqs": 8, "num_blocks_override": 64}


@pytest.fixture(autouse=True)
def in_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure_here(monkeypatch)


def engine(folder: Path, **settings: Any) -> InProcessEngine:
    return InProcessEngine(folder, model_impl="transformers", **(ENGINE | {"max_model_len": 128} | settings))


@pytest.mark.parametrize(
    "family",
    [
        "gpt_neox",  # the plainest
        "gpt2",  # names without a prefix, and a tied head
        "opt",  # learnt positions below a nested decoder
        "deepseek_v3",  # keys wider than values, and joined experts
        "sarvam_moe",  # queries, keys and values in one tensor of the checkpoint
        "gpt_oss",  # sinks and windows
        "gemma3n_text",  # layers that read another layer's keys
    ],
)
def test_greedy_tokens_equal_transformers(family: str, tmp_path: Path) -> None:
    model = make_tiny(tmp_path, family)
    wanted = [greedy_tokens(model, [prompt], 8)[0] for prompt in PROMPTS]
    served = engine(tmp_path)
    for index, prompt in enumerate(PROMPTS):
        served.add(str(index), prompt, max_tokens=8)
    answers = served.run()
    assert [answers[str(index)].tokens for index in range(len(PROMPTS))] == wanted
    served.add("again", PROMPTS[-1], max_tokens=8)
    again = served.run()["again"]
    assert again.tokens == wanted[-1] and again.num_cached_tokens == 32


def test_two_models_in_a_process_share_nothing(tmp_path: Path) -> None:
    """A draft model with other heads runs between the steps of its target."""
    model = make_tiny(tmp_path / "target", "deepseek_v3")
    make_tiny(tmp_path / "draft", "gpt_neox", num_attention_heads=2)
    drafts = {
        "method": "draft_model",
        "model": measured_model(tmp_path / "draft"),
        "model_path": str(tmp_path / "draft"),
    }
    served = engine(tmp_path / "target", speculative=drafts, num_speculative_tokens=2, max_num_batched_tokens=64)
    served.add("0", PROMPTS[1], max_tokens=8)
    assert served.run()["0"].tokens == greedy_tokens(model, [PROMPTS[1]], 8)[0]


def measured_model(folder: Path) -> Any:
    from quire.launch.config.implementation import read_model

    return read_model(folder)


def test_an_fp8_cache_pads_narrow_values_exactly(tmp_path: Path) -> None:
    """Keys of 24 dimensions and values of 16: with calculated scales the best tokens stay near the exact ones."""
    model = make_tiny(tmp_path, "deepseek_v3")
    served = engine(tmp_path, kv_cache_dtype="float8_e4m3fn", calculate_kv_scales=True)
    served.add("0", PROMPTS[2], max_tokens=1)
    assert served.run()["0"].tokens == greedy_tokens(model, [PROMPTS[2]], 1)[0]


@pytest.mark.parametrize(
    "family, changes, reason",
    [
        (
            "bert",
            {"is_decoder": False},
            "attends in bert.encoder.layer.0.attention.self to later tokens: it is not cau",
        ),
        ("llama4_text", {}, "chunked attention"),
        (
            "llama4_text",  # it scales queries by positions that it counts itself, where it does not rotate them
            {"layer_types": ["full_attention"] * 4, "no_rope_layers": [1, 0, 1, 1]},
            "counts tokens in model.layers.1.self_attn in place of reading their positions",
        ),
        ("diffllama", {}, "calls attention twice in one layer"),
        ("starcoder2", {"num_key_value_heads": 8}, "has 4 heads of queries, 8 of keys and 8 of values"),
        ("jamba", {"num_experts": 1}, "has layers that continue a state by one token only"),
        ("bloom", {}, "is a BloomForCausalLM, whose code has no interface for attention"),
        ("bamba", {"attn_layer_indices": [], "time_step_limit": [0.0, float("inf")]}, "does not call attention"),
        ("vit", {}, "is a vit, for which transformers has no causal language model"),
        ("paligemma", {}, "is a paligemma, which reads images and is not among those of docs/models.md"),
        ("moshi", {"sliding_window": 16}, "keeps 16 tokens for model.layers.0.self_attn"),
        ("doge", {}, "adds a mask or a bias of its own to the scores of model.layers.0.self_attn"),
        (
            "gpt_neox",
            {"architectures": ["GPTNeoXModel"]},
            "is a 'GPTNeoXModel', and only its GPTNeoXForCausalLM",
        ),
        ("falcon", {}, "chooses what computes its attention from a table of its own"),
    ],
)
def test_a_model_that_computes_something_else_is_refused(family: str, changes: dict[str, Any], reason: str) -> None:
    settings = tiny_config(family, **changes).to_json_string(use_diff=False)
    found = msgspec.msgpack.decode(measuring.answer(settings.encode()), type=MeasuredConfig | Refused)
    assert isinstance(found, Refused) and reason in found.reason


def test_counts_of_experts_are_no_positions() -> None:
    """One expert for each token: as many rows as tokens."""
    settings = tiny_config("deepseek_v3", num_experts_per_tok=1).to_json_string(use_diff=False)
    assert isinstance(msgspec.msgpack.decode(measuring.answer(settings.encode()), type=MeasuredConfig), MeasuredConfig)


@pytest.mark.parametrize(
    "settings, reason",
    [
        (
            {"model_type": "own", "auto_map": {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}},
            "code named by auto_map is never run",
        ),
        ({"model_type": "gpt_neox", "hidden_size": "32"}, "Field 'hidden_size' expected int, got str (value: '32')"),
    ],
)
def test_settings_that_transformers_cannot_read_are_refused(settings: dict[str, Any], reason: str) -> None:
    found = msgspec.msgpack.decode(measuring.answer(json.dumps(settings).encode()), type=MeasuredConfig | Refused)
    assert isinstance(found, Refused) and reason in found.reason


def test_code_that_reads_values_is_measured_without_memory_for_weights() -> None:
    wide = {"hidden_size": 2048, "intermediate_size": 5632, "num_local_experts": 8}
    settings = json.dumps(tiny_config("jetmoe", num_hidden_layers=1, **wide).to_dict())
    found = msgspec.msgpack.decode(measuring.answer(settings.encode()), type=MeasuredConfig | Refused)
    assert isinstance(found, MeasuredConfig) and len(found.layers) == 1


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda tensors: tensors.pop("gpt_neox.layers.1.mlp.dense_h_to_4h.weight"), "dense_h_to_4h.weight is missing"),
        (lambda tensors: tensors.update(extra=torch.ones(2)), "tensor extra is not part of GPTNeoXForCausalLM"),
        (lambda tensors: tensors["embed_out.weight"].fill_(torch.nan), "embed_out.weight has non-finite values"),
        (
            lambda tensors: tensors.update({"embed_out.weight": torch.ones(128, 63)}),
            "embed_out.weight has shape [128, 63], but config.json requires [128, 64]",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused(change: Any, reason: str, tmp_path: Path) -> None:
    make_tiny(tmp_path, "gpt_neox")
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError) as caught:
        engine(tmp_path)
    assert reason in str(caught.value)


def test_constants_of_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    """Pythia's and GPT-2's files have the causal mask of each layer, and GPT-2's lack the prefix of the base model."""
    for family, constants in (("gpt_neox", ("attention.bias", "attention.masked_bias")), ("gpt2", ("attn.bias",))):
        model = make_tiny(tmp_path / family, family)
        tensors = load_file(tmp_path / family / "model.safetensors")
        first = next(name for name in tensors if ".0." in name).partition(".0.")[0]
        tensors |= {f"{first}.0.{name}": torch.ones(1, 1, 8, 8, dtype=torch.bool) for name in constants}
        tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
        save_file(tensors, tmp_path / family / "model.safetensors")
        served = engine(tmp_path / family)
        served.add("0", PROMPTS[0], max_tokens=4)
        assert served.run()["0"].tokens == greedy_tokens(model, [PROMPTS[0]], 4)[0]


def test_joined_experts_are_checked(tmp_path: Path) -> None:
    make_tiny(tmp_path, "deepseek_v3")
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.3.mlp.experts.3.up_proj.weight"
    tensors[name][0, 0] = torch.inf
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"another part of model.layers.3.mlp.experts.gate_up_proj has non-finite"):
        engine(tmp_path)


def test_a_class_that_mixes_tokens_outside_of_attention_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXMLP

    make_tiny(tmp_path, "gpt_neox")
    plain = GPTNeoXMLP.forward
    monkeypatch.setattr(GPTNeoXMLP, "forward", lambda self, x: plain(self, x) + x.roll(1, 1))
    with pytest.raises(ConfigError, match="GPTNeoXForCausalLM of transformers mixes tokens outside of attention"):
        engine(tmp_path)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_dtypes_stay_close(dtype: str, tmp_path: Path) -> None:
    """Log probabilities in 16 bits, of experts, with routers that the class keeps in float32."""
    make_tiny(tmp_path, "deepseek_v3")
    found = []
    for each in ("float32", dtype):
        served = engine(tmp_path, dtype=each, kv_cache_dtype=each)
        served.add("0", PROMPTS[0], max_tokens=1, logprobs=1)
        found.append(np.frombuffer(served.run()["0"].logprobs[0], np.float32)[0])
    assert abs(found[0] - found[1]) < 0.3


def test_another_version_of_transformers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny(tmp_path, "gpt_neox")
    monkeypatch.setattr("transformers.__version__", "5.23.0")
    measured = measured_model(tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr("inprocess.read_model", lambda *given: measured)
    with pytest.raises(ConfigError, match=r"and the model was measured with 5\.23\.0"):
        engine(tmp_path)
