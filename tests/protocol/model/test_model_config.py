"""Fields of ``config.json`` in the names of transformers 4 and 5, and errors in one line."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.protocol.config import EngineConfig
from quire.protocol.errors import ConfigError
from quire.protocol.model.kv_layout import kv_layout
from quire.protocol.model.model_config import SUPPORTED_ARCHITECTURES, load_model_config, parse_model_config
from quire.protocol.model.rope_config import RopeConfig

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def parse(**changes: Any) -> Any:
    raw = LLAMA | changes
    return parse_model_config({k: v for k, v in raw.items() if v != "absent"}, "config.json")


def test_llama() -> None:
    model = parse()
    assert (model.head_dim, model.num_kv_heads, model.num_layers, model.dtype) == (8, 2, 3, "float32")
    assert not model.qk_norm and not model.qkv_bias and not model.o_bias and not model.tie_word_embeddings
    assert model.rms_norm_eps == 1e-5 and model.rope == RopeConfig()


def test_absent_fields_have_the_familys_defaults() -> None:
    model = parse(num_key_value_heads="absent", max_position_embeddings="absent", rms_norm_eps="absent")
    assert (model.num_kv_heads, model.max_position, model.rms_norm_eps) == (8, 2048, 1e-6)


def test_differences_between_families() -> None:
    qwen2 = parse(architectures=["Qwen2ForCausalLM"])
    qwen3 = parse(architectures=["Qwen3ForCausalLM"], head_dim=16)
    biased = parse(attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
    assert qwen2.qkv_bias and not qwen2.o_bias and not qwen2.qk_norm
    assert qwen3.qk_norm and not qwen3.qkv_bias and qwen3.head_dim == 16
    assert biased.qkv_bias and biased.o_bias and biased.mlp_bias and biased.tie_word_embeddings


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_dtype_under_both_names(name: str) -> None:
    assert parse(**{name: "bfloat16"}).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("changes", "rope"),
    [
        ({"rope_theta": 5e5}, RopeConfig(theta=5e5)),
        ({"rope_theta": 5e5, "rope_scaling": None}, RopeConfig(theta=5e5)),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, RopeConfig(kind="linear", factor=2.0)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7e4}}, RopeConfig(theta=7e4)),
        ({"rope_parameters": {"rope_theta": 7e4}, "rope_theta": 1.0}, RopeConfig(theta=7e4)),
        ({"rope_theta": 5e5, "rope_scaling": LLAMA3}, RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 64)),
        ({"rope_parameters": LLAMA3 | {"rope_theta": 5e5}}, RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 64)),
    ],
)
def test_rope_in_old_and_new_form(changes: dict[str, Any], rope: RopeConfig) -> None:
    assert parse(**changes).rope == rope


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture 'GPT2LMHeadModel'"),
        ({"architectures": "absent"}, "architecture None"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"sliding_window": 128}, "use_sliding_window"),
        ({"hidden_size": 65}, "hidden_size 65 is not a multiple"),
        ({"num_key_value_heads": 3}, "num_attention_heads 8 is not a multiple of num_key_value_heads 3"),
        ({"head_dim": 7}, "head_dim 7 must be even"),
        ({"dtype": "int8"}, "dtype 'int8'"),
        ({"vocab_size": "absent"}, "vocab_size must be an integer from 1"),
        ({"hidden_size": 64.0}, "hidden_size must be an integer"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "method 'aqlm' is not supported for LlamaForCausalLM"),
        (
            {"quantization_config": {"quant_method": "mxfp4"}},
            "awq, modelopt (FP8, NVFP4), and mxfp4 for GptOssForCausalLM",
        ),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported; supported: silu"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"layer_types": ["full_attention"]}, "layer_types must be a list of 3 names"),
        ({"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "layer_types 'linear_attention'"),
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "use_sliding_window"),
        ({"num_kv_shared_layers": 3}, "no layer before 0 is of type full_attention"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers must be an integer from 0 to 3"),
        (
            {"rope_scaling": {"rope_type": "proportional"}},
            "supported: default, linear, dynamic, llama3, yarn, longrope",
        ),
        ({"rope_scaling": {"type": ["yarn"]}}, "rope type ['yarn'] is not supported"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "short_factor must be a list of 4 positive"),
        ({"partial_rotary_factor": 0.4}, "rotates 3 of 8 dimensions"),
        ({"partial_rotary_factor": 2}, "rotates 16 of 8 dimensions"),
    ],
)
def test_error_names_file_and_field_in_one_line(changes: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(**changes)
    text = str(caught.value)
    assert text.startswith("config.json: ") and error in text and "\n" not in text


def test_unsupported_architecture_error_says_where_the_list_is() -> None:
    """The list itself would fill half a screen."""
    with pytest.raises(ConfigError, match=r"'MambaForCausalLM' is not supported by .*: docs/models\.md has the list"):
        parse(architectures=["MambaForCausalLM"])
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    assert all(name in page for name in SUPPORTED_ARCHITECTURES)


def write(folder: Path, config: Any, generation: Any = None) -> Path:
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def test_end_tokens_of_both_files_are_merged(tmp_path: Path) -> None:
    write(tmp_path, LLAMA | {"eos_token_id": 2}, {"eos_token_id": [2, 7, 5]})
    assert load_model_config(tmp_path).eos_token_ids == [2, 5, 7]


def test_missing_end_token_gives_an_empty_list(tmp_path: Path) -> None:
    assert load_model_config(write(tmp_path, LLAMA)).eos_token_ids == []


def test_missing_directory_and_missing_file_have_different_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a folder"):
        load_model_config(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"config\.json not found"):
        load_model_config(tmp_path)


def test_block_bytes() -> None:
    """8 KV heads of dimension 128 in 16 bits take 4 KB per token and layer."""
    model = parse(num_attention_heads=32, num_key_value_heads=8, hidden_size=4096, head_dim=128, num_hidden_layers=32)
    layout = kv_layout(model, 16, "float16")
    assert layout.token_bytes(layout.groups[0]) == 4096
    assert layout.block_bytes == 4096 * 16 * 32 == 2 * 2**20
    assert [g.layers for g in layout.groups] == [list(range(32))] and layout.groups[0].kind == "full_attention"
    assert kv_layout(model, 1, "float32").block_bytes == 2 * 4096 * 32


def test_digest_changes_with_each_setting() -> None:
    config = EngineConfig(model=parse(), model_path="/m", max_model_len=64)
    again = EngineConfig(model=parse(), model_path="/m", max_model_len=64)
    assert config.digest == again.digest
    others = {
        msgspec.structs.replace(config, **change).digest
        for change in (
            {"model": parse(vocab_size=101)},
            {"model_path": "/n"},
            {"max_model_len": 65},
            {"block_size": 8},
            {"async_scheduling": False},
            {"seed": 1},
        )
    }
    assert len(others) == 6 and config.digest not in others


def test_config_survives_encoding() -> None:
    config = EngineConfig(model=parse(rope_scaling=LLAMA3), model_path="/m", max_model_len=64)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=EngineConfig) == config


def test_pipeline_depth_is_two_only_with_async_scheduling() -> None:
    config = EngineConfig(model=parse(), model_path="", max_model_len=64)
    assert config.pipeline_depth == 2
    assert msgspec.structs.replace(config, async_scheduling=False).pipeline_depth == 1
