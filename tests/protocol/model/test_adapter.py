"""Adapters are read as PEFT writes them, identified by their content, and refused by name if they are not usable."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapters import Tensors, make_adapter
from safetensors.numpy import save

from quire.protocol.model.adapter import (
    Adapter,
    AdapterError,
    AdapterTensor,
    largest_bytes,
    projection_shapes,
    read_adapter,
)
from quire.protocol.model.model_config import ModelConfig, parse_model_config

FIELDS: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}
Q = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"


def model_of(**fields: Any) -> ModelConfig:
    return parse_model_config({**FIELDS, **fields}, "config.json")


def read(folder: Path, model: ModelConfig | None = None, max_rank: int = 64) -> Adapter:
    return read_adapter(folder, model or model_of(), max_rank)


def test_parts_have_the_stored_matrices(tmp_path: Path) -> None:
    kept: Tensors = {}
    folder = make_adapter(tmp_path / "a", model_of(), rank=3, alpha=6, change=kept.update)
    adapter = read(folder)
    assert len(adapter.parts) == 14 and adapter.rank == 3
    assert adapter.num_bytes == sum(tensor.nbytes for tensor in kept.values())
    for part in adapter.parts:
        prefix = f"base_model.model.{part.module}"
        assert np.array_equal(part.a.float32(), kept[f"{prefix}.lora_A.weight"])
        assert np.array_equal(part.b.float32(), kept[f"{prefix}.lora_B.weight"])
        assert part.scale == 2.0 and part.rank == 3


def test_identity_is_the_content_and_not_the_folder(tmp_path: Path) -> None:
    first, same = (read(make_adapter(tmp_path / name, model_of(), seed=1)) for name in ("a", "b"))
    other = read(make_adapter(tmp_path / "c", model_of(), seed=2))
    scaled = read(make_adapter(tmp_path / "d", model_of(), seed=1, settings={"lora_alpha": 9}))
    assert first.digest == same.digest and len(first.digest) == 32
    assert len({first.digest, other.digest, scaled.digest}) == 3


STOPS_RE = "".join(f"({letter}|{letter}|{letter})" for letter in "model.layers.0.self_attn.q_proj") + "!"
"""A pattern that takes 3^30 tries of an engine that goes back."""


def test_patterns_give_modules_their_rank_and_scale(tmp_path: Path) -> None:
    def narrow(tensors: Tensors) -> None:
        for name in list(tensors):
            if "layers.1.self_attn.q_proj" in name:
                tensors[name] = tensors[name][:2] if "lora_A" in name else tensors[name][:, :2].copy()

    settings = {
        "rank_pattern": {STOPS_RE: 8, r"^model\.layers\.1\.self_attn\.q_proj": 2},
        "alpha_pattern": {"v_proj": 16},
        "use_rslora": True,
    }
    adapter = read(make_adapter(tmp_path / "a", model_of(), rank=4, change=narrow, settings=settings))
    found = {part.module: (part.rank, part.scale) for part in adapter.parts}
    assert found["model.layers.1.self_attn.q_proj"] == (2, 8 / 2**0.5)
    assert found["model.layers.0.self_attn.q_proj"] == (4, 4.0)
    assert found["model.layers.0.self_attn.v_proj"] == (4, 8.0)


def test_16_bit_tensors_keep_their_values(tmp_path: Path) -> None:
    bits = np.array([[0x3F80, 0xC000], [0x0000, 0x4049]], np.uint16)
    assert AdapterTensor("x", "BF16", bits).float32().tolist() == [[1.0, -2.0], [0.0, 3.140625]]
    assert not AdapterTensor("x", "BF16", np.array([[0x7F80]], np.uint16)).is_finite()

    def to_half(tensors: Tensors) -> None:
        tensors.update({name: tensor.astype(np.float16) for name, tensor in tensors.items()})

    assert {part.a.dtype for part in read(make_adapter(tmp_path / "a", model_of(), change=to_half)).parts} == {"F16"}


def test_fused_projections_are_parts_of_one_pair(tmp_path: Path) -> None:
    def fuse(tensors: Tensors) -> None:
        tensors.clear()
        tensors["base_model.model.model.layers.0.self_attn.qkv_proj.lora_A.weight"] = np.ones((4, 32), np.float32)
        rows = np.repeat(np.arange(64, dtype=np.float32)[:, None], 4, 1)
        tensors["base_model.model.model.layers.0.self_attn.qkv_proj.lora_B.weight"] = rows

    adapter = read(make_adapter(tmp_path / "a", model_of(), change=fuse))
    parts = {part.module.removeprefix("model.layers.0."): part for part in adapter.parts}
    firsts = {name: (part.b.data.shape[0], float(part.b.float32()[0, 0])) for name, part in parts.items()}
    assert firsts == {"self_attn.q_proj": (32, 0), "self_attn.k_proj": (16, 32), "self_attn.v_proj": (16, 48)}


def test_matrices_of_all_experts_are_parts_of_each(tmp_path: Path) -> None:
    """PEFT stores A by expert and rank, and B by rank and expert."""
    generator = np.random.default_rng(0)
    prefix = "base_model.model.model.layers.0.mlp.experts"
    a, b = (generator.standard_normal(shape).astype(np.float32) for shape in ((4 * 3, 32), (96, 3 * 4)))

    def stacked(tensors: Tensors) -> None:
        tensors.clear()
        tensors[f"{prefix}.base_layer.lora_A.weight"], tensors[f"{prefix}.base_layer.lora_B.weight"] = a, b

    model = model_of(**EXPERTS)
    adapter = read(make_adapter(tmp_path / "a", model, rank=3, change=stacked), model)
    parts = {part.module: part for part in adapter.parts}
    assert len(parts) == 8
    up = parts["model.layers.0.mlp.experts.2.up_proj"]
    expected = b.reshape(96, 3, 4)[48:, :, 2] @ a.reshape(4, 3, 32)[2]
    assert np.allclose(up.b.float32() @ up.a.float32(), expected)


@pytest.mark.parametrize("rows", [12, 13])
def test_matrices_of_experts_with_inputs_before_outputs(rows: int, tmp_path: Path) -> None:
    """PEFT takes the inputs of Llama 4's experts for outputs: A has the columns of gates and ups."""
    generator = np.random.default_rng(0)
    prefix = "base_model.model.model.layers.0.feed_forward.experts"
    a, b = (generator.standard_normal(shape).astype(np.float32) for shape in ((rows, 96), (32, 3 * 4)))

    def stacked(tensors: Tensors) -> None:
        tensors.clear()
        tensors[f"{prefix}.lora_A.weight"], tensors[f"{prefix}.lora_B.weight"] = a, b

    model = model_of(architectures=["Llama4ForCausalLM"], num_local_experts=4)
    folder = make_adapter(tmp_path / "a", model, rank=3, change=stacked)
    if rows == 13:
        with pytest.raises(AdapterError, match=r"experts\.lora_A\.weight has shape \[13, 96\], but the model and"):
            read(folder, model)
        return
    up = {part.module: part for part in read(folder, model).parts}["model.layers.0.mlp.experts.2.up_proj"]
    expected = (b.reshape(32, 3, 4)[:, :, 2] @ a.reshape(4, 3, 96)[2]).T[48:]
    assert np.allclose(up.b.float32() @ up.a.float32(), expected)


def test_experts_and_routers_by_name(tmp_path: Path) -> None:
    model = model_of(**EXPERTS)
    names = ("gate", "gate_proj", "up_proj", "down_proj")
    adapter = read(make_adapter(tmp_path / "a", model, projections=names), model)
    assert len(adapter.parts) == 2 * (1 + 3 * 4)
    assert sum(part.module.endswith("mlp.gate") for part in adapter.parts) == 2


REFUSED_SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "IA3"}, "peft_type must be 'LORA' (got 'IA3')"),
    ({"use_dora": True}, "DoRA"),
    ({"monteclora_config": {"num_samples": 4}}, "MonteCLoRA is not supported"),
    ({"velora_config": {"num_groups": 4}}, "VeLoRA is not supported"),
    ({"bias": "all"}, "bias must be 'none' (got 'all')"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"alora_invocation_tokens": [1]}, "activated LoRA"),
    ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights 'pissa_niter_16'"),
    ({"r": 65}, "r must be an integer from 1 to 64 (got 65)"),
    ({"r": 0}, "r must be an integer from 1 to 64 (got 0)"),
    ({"lora_alpha": "x"}, "lora_alpha must be a number"),
    ({"rank_pattern": {"q_proj": 128}}, "from 1 to 64 (got 128)"),
    (
        {"rank_pattern": {"(": 4}},
        "rank_pattern has the pattern '('; supported: at most 256 characters, in the common syntax",
    ),
    ({"alpha_pattern": {"(?!a)b": 4}}, "alpha_pattern has the pattern '(?!a)b'"),
    (
        {"rank_pattern": {"[^a]{999}" * 28: 4}},
        "rank_pattern has patterns that are too complex together: merge or shorten them",
    ),
    ({"use_rslora": 3}, "use_rslora must be true or false"),
]


@pytest.mark.parametrize(("settings", "text"), REFUSED_SETTINGS, ids=lambda value: str(value)[:40])
def test_refuses_settings_by_name(tmp_path: Path, settings: dict[str, Any], text: str) -> None:
    folder = make_adapter(tmp_path / "a", model_of(), settings=settings)
    with pytest.raises(AdapterError) as error:
        read(folder)
    assert text in str(error.value) and "\n" not in str(error.value) and str(folder) in str(error.value)


def _set(name: str, value: Any) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: value})


WRONG_TENSORS: list[tuple[Callable[[Tensors], object], str]] = [
    (lambda tensors: tensors.pop(Q), "lora_A.weight is missing"),
    (lambda tensors: tensors.clear(), "has no tensors"),
    (_set(Q, np.full((4, 32), np.nan, np.float32)), "not finite"),
    (_set(Q, np.ones((4, 31), np.float32)), "has shape [4, 31], but the model and adapter_config.json require [4, 32]"),
    (_set(Q, np.ones((5, 32), np.float32)), "require [4, 32]"),
    (_set(Q, np.ones((4, 32), np.int32)), "has dtype I32; supported: F32, F16, BF16"),
    (_set("base_model.model.lm_head.lora_A.weight", np.ones((4, 32), np.float32)), "is missing"),
    (_set("base_model.model.model.norm.weight", np.ones((4, 32), np.float32)), "is not used"),
    (_set("model.layers.0.x.lora_A.weight", np.ones((4, 32), np.float32)), "is not used"),
    (_set(Q.replace("lora_A.weight", "lora_magnitude_vector.weight"), np.ones((4, 32), np.float32)), "DoRA"),
    (_set("base_model.model.model.embed_tokens.lora_embedding_A", np.ones((4, 32), np.float32)), "an embedding"),
    (_set("base_model.model.model.embed_tokens.base_layer.weight", np.ones((9, 32), np.float32)), "an embedding"),
    (_set("base_model.model.lm_head.base_layer.weight", np.ones((9, 32), np.float32)), "or the output layer"),
]


@pytest.mark.parametrize(("change", "text"), WRONG_TENSORS, ids=lambda value: value if isinstance(value, str) else "")
def test_refuses_tensors_by_name(tmp_path: Path, change: Callable[[Tensors], object], text: str) -> None:
    folder = make_adapter(tmp_path / "a", model_of(), change=change)
    with pytest.raises(AdapterError) as error:
        read(folder)
    assert text in str(error.value) and "\n" not in str(error.value) and str(folder) in str(error.value)


def _rename(tensors: Tensors, old: str, new: str) -> None:
    for name in [name for name in tensors if old in name]:
        tensors[name.replace(old, new)] = tensors.pop(name)


@pytest.mark.parametrize(
    ("old", "new"),
    [("layers.1.", "layers.2."), ("q_proj", "w_proj"), ("model.layers.1.self_attn.q_proj", "lm_head")],
)
def test_refuses_modules_that_the_model_lacks(tmp_path: Path, old: str, new: str) -> None:
    folder = make_adapter(tmp_path / "a", model_of(), change=lambda tensors: _rename(tensors, old, new))
    with pytest.raises(AdapterError, match="adapts '"):
        read(folder)


def test_refuses_an_adapter_of_another_model(tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "a", model_of(hidden_size=64))
    with pytest.raises(AdapterError, match="has shape"):
        read(folder)


def test_refuses_damaged_files(tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "a", model_of())
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    whole = weights.read_bytes()
    for damaged in (whole[:-1], whole[:100], b"", b"\xff" * 64):
        weights.write_bytes(damaged)
        with pytest.raises(AdapterError, match="truncated, damaged"):
            read(folder)
    weights.write_bytes(whole + bytes(2**24))
    with pytest.raises(AdapterError, match="bytes; an adapter of rank 64 has at most"):
        read(folder)
    weights.write_bytes(whole)
    for text in ("", "[]", "{", "null"):
        config.write_text(text)
        with pytest.raises(AdapterError, match="cannot be read as a JSON object"):
            read(folder)
    config.unlink()
    with pytest.raises(AdapterError, match=r"adapter_config.json not found"):
        read(folder)
    with pytest.raises(AdapterError, match="is not a folder with an adapter"):
        read(tmp_path / "absent")


def test_never_opens_pickled_weights(tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "a", model_of())
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(AdapterError, match="only pickled weights, which are never opened"):
        read(folder)


def test_refuses_links_to_other_folders(tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "a", model_of())
    weights = folder / "adapter_model.safetensors"
    weights.rename(tmp_path / "elsewhere.safetensors")
    weights.symlink_to(tmp_path / "elsewhere.safetensors")
    with pytest.raises(AdapterError, match="symbolic link"):
        read(folder)


def test_the_largest_adapter_adapts_every_projection(tmp_path: Path) -> None:
    model = model_of(**EXPERTS)
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate", "gate_proj", "up_proj", "down_proj")
    adapter = read(make_adapter(tmp_path / "a", model, rank=64, projections=names), model)
    layers = [projection_shapes(model, layer) for layer in range(model.num_layers)]
    assert adapter.num_bytes == largest_bytes(layers, 64)


@pytest.mark.full
def test_reads_what_peft_writes(tmp_path: Path) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    fields = {name: value for name, value in FIELDS.items() if name != "architectures"}
    config = LoraConfig(r=5, lora_alpha=10, target_modules="all-linear", init_lora_weights=False)
    tuned: Any = get_peft_model(LlamaForCausalLM(LlamaConfig(**fields)), config)
    tuned.save_pretrained(tmp_path)
    adapter = read(tmp_path)
    assert len(adapter.parts) == 14
    for part in adapter.parts:
        module: Any = tuned.get_submodule(f"base_model.model.{part.module}")
        delta = part.scale * part.b.float32() @ part.a.float32()
        assert np.allclose(delta, module.get_delta_weight("default").detach().numpy(), atol=1e-6)


def test_files_may_have_tensors_in_any_order(tmp_path: Path) -> None:
    kept: Tensors = {}
    folder = make_adapter(tmp_path / "a", model_of(), change=kept.update)
    (folder / "adapter_model.safetensors").write_bytes(save(dict(reversed(kept.items()))))
    assert len(read(folder).parts) == 14
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == 4
