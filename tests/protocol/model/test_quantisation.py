"""``quantization_config``: fp8 schemes of the KV cache beside plain and quantised weights; what is refused."""

from typing import Any

import pytest
from kv_scale_checkpoints import SCHEME

from quire.launch.config.engine_config import make_engine_config
from quire.launch.config.options import parse_options
from quire.protocol.errors import ConfigError
from quire.protocol.model.model_config import ModelConfig, parse_model_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "dtype": "bfloat16",
}
ATTENTION = {"targets": ["LlamaAttention"], "weights": None, "input_activations": SCHEME | {"strategy": "attn_head"}}
WEIGHTS = {"targets": ["Linear"], "weights": SCHEME, "input_activations": None}


def parse(**quantization: Any) -> ModelConfig:
    return parse_model_config(LLAMA | {"quantization_config": quantization}, "config.json")


@pytest.mark.parametrize(
    "given",
    [
        {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": SCHEME, "ignore": []},
        {"quant_method": "compressed-tensors", "kv_cache_scheme": SCHEME | {"strategy": "attn_head"}},
        {"quant_method": "compressed-tensors", "config_groups": {"a": ATTENTION}, "kv_cache_scheme": SCHEME},
        {"quant_method": "modelopt", "quant_algo": None, "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
        {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"},
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {"a": WEIGHTS},
            "kv_cache_scheme": SCHEME,
        },
    ],
)
def test_fp8_kv_cache_beside_any_weights(given: dict[str, Any]) -> None:
    model = parse(**given)
    assert model.fp8_kv_cache
    assert make_engine_config(parse_options({}, "LLM"), model).kv_cache_dtype == "float8_e4m3fn"
    for wanted, dtype in (("bfloat16", "bfloat16"), ("fp8_e5m2", "float8_e5m2")):
        assert make_engine_config(parse_options({"kv_cache_dtype": wanted}, "LLM"), model).kv_cache_dtype == dtype


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_bits": 4}, "num_bits 4 is not supported; supported: num_bits 8, type float, strategy tensor or attn_he"),
        ({"type": "int"}, "type 'int' is not supported"),
        ({"strategy": "channel"}, "strategy 'channel' is not supported"),
        ({"strategy": ["tensor"]}, "strategy ['tensor'] is not supported"),
        ({"symmetric": False}, "symmetric False is not supported"),
        ({"dynamic": True}, "dynamic True is not supported"),
    ],
)
def test_unknown_scheme_of_the_cache_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse(quant_method="compressed-tensors", kv_cache_scheme=SCHEME | changes)
    assert f"config.json: quantization_config: kv_cache_scheme: {message}" in str(raised.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": "fp8"}, "kv_cache_scheme must be an object"),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"}, "kv_cache_quant_algo 'NVFP4' is not supported;"),
        ({"quant_method": "compressed-tensors"}, "config_groups must have a group with weights"),
        ({"quant_method": "fbgemm_fp8", "kv_cache_scheme": SCHEME}, "method 'fbgemm_fp8' is not supported"),
        (
            {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
            "quant_algo 'W4A8_AWQ' is not supported; supported: F",
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": WEIGHTS}, "kv_cache_scheme": SCHEME},
            "a: format None is not supported; supported: pack-quantized, int-quantized, float-quantized",
        ),
        ({"quant_method": "compressed-tensors", "config_groups": [7]}, "config_groups must be an object of objects"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": 7}},
            "config_groups must be an object of objects",
        ),
        ({"quant_method": ["modelopt"], "kv_cache_quant_algo": "FP8"}, "method ['modelopt'] is not supported"),
    ],
)
def test_other_quantisation_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse(**given)
    assert message in str(raised.value)


def test_gpt_oss_with_an_fp8_kv_cache() -> None:
    gpt_oss = LLAMA | {"architectures": ["GptOssForCausalLM"], "num_local_experts": 4}
    for given, mxfp4 in (({"quant_method": "mxfp4"}, True), ({"quant_method": "compressed-tensors"}, False)):
        model = parse_model_config(
            gpt_oss | {"quantization_config": given | {"kv_cache_scheme": SCHEME}}, "config.json"
        )
        assert model.moe is not None and model.moe.mxfp4 is mxfp4 and model.fp8_kv_cache


def test_calculated_scales_need_an_fp8_cache() -> None:
    model = parse_model_config(LLAMA, "config.json")
    with pytest.raises(ConfigError, match=r"--calculate-kv-scales needs an fp8 KV cache \(got bfloat16\): add --kv-ca"):
        make_engine_config(parse_options({"calculate_kv_scales": True}, "LLM"), model)
    given = {"calculate_kv_scales": True, "kv_cache_dtype": "fp8"}
    assert make_engine_config(parse_options(given, "LLM"), model).calculate_kv_scales
