"""``quantization_config`` of quantised weights: what is read, and what is refused by name."""

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quantised_checkpoints import TOKEN_INT8

from quire.protocol.errors import ConfigError
from quire.protocol.model.weight_format import WeightFormat, parse_weight_format

BLOCKS = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 64]}


def parse(given: dict[str, Any], architecture: str = "LlamaForCausalLM") -> WeightFormat | None:
    return parse_weight_format({"quantization_config": given}, architecture, "config.json")


def compressed(layout: str | None, activations: Any = None, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}


E4M3 = {"type": "float", "num_bits": 8}


def rounding(kind: str, group: int = 0) -> dict[str, Any]:
    return {"fp8_activations": kind, "activation_group": group}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            compressed("pack-quantized", num_bits=4, group_size=128, symmetric=False),
            {"layout": "pack-quantized", "kind": "int4", "group_size": 128, "zero_points": True},
        ),
        (compressed("naive-quantized", **BLOCKS), {"layout": "float-quantized", "group_size": 64, "block_rows": 128}),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 64]},
            {"layout": "fp8", "kind": "fp8", "group_size": 64, "block_rows": 128, **rounding("dynamic", 64)},
        ),
        ({"quant_method": "fp8"}, {"layout": "fp8", "group_size": 0, "block_rows": 0, **rounding("dynamic")}),
        ({"quant_method": "fp8", "activation_scheme": "static"}, rounding("static")),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8"},
            {"layout": "fp8", "group_size": 0, "block_rows": 0, **rounding("static")},
        ),
        *[
            (compressed("float-quantized", E4M3 | given, num_bits=8, type="float"), rounding(*expected))
            for given, expected in (
                ({"dynamic": True, "strategy": "token"}, ("dynamic",)),
                ({"dynamic": True, "strategy": "tensor"}, ("dynamic",)),
                ({"dynamic": True, "strategy": "group", "group_size": 128}, ("dynamic", 128)),
                ({"dynamic": False, "strategy": "tensor"}, ("static",)),
                ({"dynamic": False, "strategy": "channel"}, ("",)),
                ({"dynamic": True, "num_bits": 16}, ("",)),
            )
        ],
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, {"layout": "modelopt-nvfp4", "kind": "fp4"}),
        (
            compressed("pack-quantized", num_bits=4, group_size=128, actorder="group"),
            {"act_order": True, "has_input_groups": True},
        ),
        (compressed("pack-quantized", num_bits=4, group_size=128, actorder="weight"), {"act_order": False}),
        (
            {"quant_method": "gptq", "bits": 8, "group_size": -1, "desc_act": True, "sym": False},
            {
                "layout": "gptq",
                "kind": "int8",
                "group_size": 0,
                "zero_offset": 1,
                "act_order": True,
                "zero_points": True,
            },
        ),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 64, "checkpoint_format": "gptq_v2"},
            {"kind": "int4", "group_size": 64, "zero_offset": 0, "act_order": False, "zero_points": False},
        ),
        (
            {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "GEMM"},
            {"layout": "awq", "zero_points": True},
        ),
    ],
)
def test_formats(given: dict[str, Any], expected: dict[str, Any]) -> None:
    form = parse(given)
    assert {name: getattr(form, name) for name in expected} == expected


def test_groups_without_weights_declare_nothing() -> None:
    given = {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": None}}}
    assert parse(given | {"kv_cache_scheme": {"num_bits": 8}}) is None
    assert parse({"quant_method": "mxfp4"}) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            compressed("marlin-24", num_bits=4),
            "group_0: format 'marlin-24' is not supported; supported: pack-quantized",
        ),
        ({"quant_method": "compressed-tensors"}, "config_groups must have a group with weights"),
        (compressed("pack-quantized", num_bits=3), "type int with 3 bits is not supported in format pack-quantized"),
        (compressed("float-quantized", num_bits=4, type="float"), "type float with 4 bits is not supported in format"),
        (compressed("pack-quantized", num_bits=[4]), "num_bits must be an integer"),
        (compressed("int-quantized", num_bits=8, dynamic=True), "dynamic must be false"),
        (compressed("int-quantized", num_bits=8, strategy="token"), "strategy 'token' is not supported"),
        (compressed("pack-quantized", num_bits=4, strategy="group"), "group_size must be an integer from 2"),
        (compressed("float-quantized", **BLOCKS | {"block_structure": [128]}), "block_structure must be a list of two"),
        (compressed("float-quantized", **BLOCKS | {"symmetric": False}), "symmetric must be true"),
        (
            compressed("int-quantized", {"num_bits": 8, "strategy": "tensor", "dynamic": False}, num_bits=8),
            "input_activations: dynamic False is not supported beside int8 weights",
        ),
        (compressed("int-quantized", 7, num_bits=8), "input_activations: num_bits None is not supported"),
        (compressed("pack-quantized", num_bits=4) | {"sparsity_config": {"format": "x"}}, "sparsity_config is not"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "bits 3 is not supported; supported: 4 and 8"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size must be an integer from 2"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 64, "dynamic": {"a": {}}}, "dynamic (other settings"),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 64, "checkpoint_format": "marlin"},
            "format 'marlin' is not",
        ),
        ({"quant_method": "awq", "bits": 8, "group_size": 128}, "bits 8 is not supported; supported: 4"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}, "version 'gemv' is not supported"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2' is not supported"),
        ({"quant_method": "fp8", "scale_fmt": "ue8m0"}, "scale_fmt 'ue8m0' is not supported"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "weight_block_size must be a list of two integers"),
    ],
)
def test_refusals(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse(given)
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_two_formats_and_experts_of_gpt_oss_are_refused() -> None:
    given = compressed("pack-quantized", num_bits=4)
    given["config_groups"] |= compressed("pack-quantized", num_bits=8)["config_groups"] | {
        "group_1": given["config_groups"]["group_0"]
    }
    with pytest.raises(ConfigError, match="different formats of weights"):
        parse(given)
    with pytest.raises(ConfigError, match=r"not supported for GptOssForCausalLM; supported: mxfp4"):
        parse(compressed("pack-quantized", num_bits=4), "GptOssForCausalLM")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**40) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=4,
)
SETTINGS = [
    compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32, symmetric=True),
    compressed("int-quantized", TOKEN_INT8, num_bits=8, type="int", strategy="channel", dynamic=False),
    compressed("float-quantized", **BLOCKS),
    {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3", "scale_fmt": "float"},
    {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": True, "checkpoint_format": "gptq"},
    {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
    {"quant_method": "modelopt", "quant_algo": "FP8"},
]


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Return every field of nested objects, as the object and the key."""
    own = [(value, key) for key in value] if isinstance(value, dict) else []
    return own + [place for inner, key in own for place in _places(inner[key])]


@given(st.sampled_from(SETTINGS), st.data())
def test_any_value_of_any_field_is_read_or_refused(settings: dict[str, Any], data: st.DataObject) -> None:
    changed = copy.deepcopy(settings)
    inside, key = data.draw(st.sampled_from(_places(changed)))
    inside[key] = data.draw(VALUES)
    try:
        assert isinstance(parse(changed), WeightFormat | None)
    except ConfigError as error:
        assert "\n" not in str(error)
