"""``--model-impl``: what computes a model, and what is refused before transformers is imported."""

import json
import math
from pathlib import Path
from threading import Event
from typing import Any

import msgspec
import pytest

from quire.launch.config import implementation, measured_layouts
from quire.launch.config.engine_config import make_engine_config
from quire.launch.config.implementation import read_model
from quire.launch.config.options import EngineOptions
from quire.protocol.errors import ConfigError
from quire.protocol.model.measured_config import (
    DivisionQuestion,
    MeasuredConfig,
    MeasuredLayer,
    MeasuredState,
    Refused,
)
from quire.protocol.process.helper import HelperDied

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "eos_token_id": 2,
    "dtype": "float16",
}
NEOX = LLAMA | {"architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox"}


def layer(index: int, **changes: Any) -> MeasuredLayer:
    whole = {"module": f"layers.{index}", "num_heads": 4, "num_kv_heads": 2, "key_width": 8, "value_width": 8}
    return MeasuredLayer(**(whole | {"scale": 0.25, "source": index} | changes))


LAYOUT = MeasuredConfig(
    class_name="GPTNeoXForCausalLM",
    version="5.24.0",
    settings="{}",
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    max_position=64,
    linears={"layers.0.dense": (32, 32)},
    layers=[layer(0, value_width=12, window=8), layer(1, soft_cap=3.0), layer(2, value_width=12, window=8, source=0)],
)


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let the helpers answer LAYOUT, which three ranks cannot share; return what they are asked about."""
    asked: list[str] = []

    def measure(path: Path, settings: str) -> MeasuredConfig:
        asked.append(settings)
        return LAYOUT

    def divide(flag: str, question: DivisionQuestion) -> MeasuredConfig | Refused:
        asked.append(str(question.ranks))
        return Refused("has 4 heads") if question.ranks == 3 else msgspec.structs.replace(LAYOUT, ranks=question.ranks)

    monkeypatch.setattr(measured_layouts, "_measure", measure)
    monkeypatch.setattr(measured_layouts, "_divide", divide)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return asked


def write(folder: Path, config: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_native_code_is_chosen_where_there_is_any(tmp_path: Path, measured: list[str]) -> None:
    write(tmp_path, LLAMA)
    assert read_model(tmp_path).implementation == read_model(tmp_path, "native").implementation == "native"
    assert not measured
    assert read_model(tmp_path, "transformers").implementation == "transformers 5.24.0"
    write(tmp_path, NEOX)
    assert read_model(tmp_path).implementation == "transformers 5.24.0"
    with pytest.raises(ConfigError, match=r"GPTNeoXForCausalLM.* is not supported"):
        read_model(tmp_path, "native")


def test_the_measured_layout_determines_the_shape(tmp_path: Path, measured: list[str]) -> None:
    model = read_model(write(tmp_path, NEOX))
    assert (model.architecture, model.dtype, model.eos_token_ids) == ("GPTNeoXForCausalLM", "float16", [2])
    assert (model.num_layers, model.num_heads, model.max_position, model.vocab_size) == (3, 4, 64, 97)
    assert [model.kv_shape(index) for index in range(3)] == [(2, 12), (2, 8), (2, 12)]
    assert (model.windows, model.cache_sources, model.attention_soft_cap) == ([8, 0, 8], [0, 1, 0], 3.0)


def test_a_layout_is_measured_once_for_each_config_and_version(
    tmp_path: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, NEOX)
    first = read_model(tmp_path)
    assert read_model(tmp_path) == first and len(measured) == 1
    (kept,) = (tmp_path / "cache" / "quire" / "measured").iterdir()
    kept.write_bytes(b"damaged")
    assert read_model(tmp_path) == first and len(measured) == 2
    write(tmp_path, NEOX | {"eos_token_id": 3})
    read_model(tmp_path)
    monkeypatch.setattr(measured_layouts, "version", lambda name: "5.25.0")
    read_model(tmp_path)
    assert len(measured) == 4
    (tmp_path / "cache" / "quire" / "measured").chmod(0o777)
    read_model(tmp_path)
    assert len(measured) == 5


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be from 1 to 1024 (got 1000000000)"),
        ({"text_config": {"n_layer": -3}}, "n_layer must be from 1 to 1024 (got -3)"),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers must be from 0 to 1024 (got -1)"),
        ({"num_attention_heads": 0}, "num_attention_heads must be from 1 to 1099511627776 (got 0)"),
        ({"rope_parameters": {"short_factor": [1.0, math.nan]}}, "short_factor must be a number (got NaN)"),
        ({"hidden_size": 10**30}, "hidden_size must be from 1 to 1099511627776"),
        (
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            "method 'bitsandbytes' is not supported",
        ),
        ({"architectures": None}, "architectures must name the model's class (got None)"),
        ({"padding": "x" * 2**20}, "has more than 1048576 characters"),
        ({"eos_token_id": 97}, "eos_token_id 97 is not in a vocabulary of 97"),
    ],
)
def test_a_config_that_no_model_has_is_refused(
    changes: dict[str, Any], reason: str, tmp_path: Path, measured: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_model(write(tmp_path, NEOX | changes))
    assert reason in str(caught.value) and str(tmp_path / "config.json") in str(caught.value)


def test_nesting_as_deep_as_json_allows_is_no_crash(tmp_path: Path, measured: list[str]) -> None:
    nested: dict[str, Any] = {}
    for _ in range(400):
        nested = {"text_config": nested}
    assert read_model(write(tmp_path, NEOX | nested | {"vocab_size_per_layer_input": 262144})).num_layers == 3


@pytest.mark.parametrize("installed, reason", [(None, "which is not installed"), ("5.2.0", "5.24 or newer, and 5.2.0")])
def test_a_missing_or_old_transformers_is_named(
    installed: str | None, reason: str, tmp_path: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if installed is None:
            raise measured_layouts.PackageNotFoundError
        return installed

    monkeypatch.setattr(measured_layouts, "version", version)
    with pytest.raises(ConfigError) as caught:
        read_model(write(tmp_path, NEOX))
    assert reason in str(caught.value) and "pip install 'quire-serve[transformers]'" in str(caught.value)


@pytest.mark.parametrize(
    "answer, reason",
    [
        (Refused("calls attention twice in one layer"), "the model calls attention twice in one layer"),
        (HelperDied(27), "takes more than 120 CPU seconds"),
        (HelperDied(0, was_starved=True), "the machine is too busy"),
        (HelperDied(11), "its process ended by signal 11"),
    ],
)
def test_what_the_helper_answers_is_one_line(
    answer: Refused | HelperDied, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Answers:
        def __init__(self, *given: object) -> None: ...

        def ask(self, *question: object) -> bytes:
            if isinstance(answer, HelperDied):
                raise answer
            return msgspec.msgpack.encode(answer)

        def close(self) -> None: ...

    monkeypatch.setattr(measured_layouts, "Helper", Answers)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(ConfigError, match=reason):
        read_model(write(tmp_path, NEOX))


def test_measuring_that_takes_long_is_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noted = Event()

    class Slow:
        def __init__(self, *given: object) -> None: ...

        def ask(self, *question: object) -> bytes:
            assert noted.wait(60)
            return msgspec.msgpack.encode(LAYOUT)

        def close(self) -> None: ...

    def info(message: str, **data: object) -> None:
        if message == "measuring takes long" and data == {"max_cpu_seconds": 120.0}:
            noted.set()

    monkeypatch.setattr(measured_layouts, "Helper", Slow)
    monkeypatch.setattr(measured_layouts, "NOTE_SECONDS", 0.0)
    monkeypatch.setattr(measured_layouts.log, "info", info)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert read_model(write(tmp_path, NEOX)).num_layers == 3


FP8 = {"quant_method": "fp8"}
FEATURES: dict[str, dict[str, Any]] = {
    "prefix cache, prompts in chunks, preemption, asynchronous scheduling": {},
    "drafts: n-grams, suffixes": {"speculative_config": {"method": "suffix", "num_speculative_tokens": 2}},
    "draft models: native or of transformers, of targets that are either": {},
    "grammars, log probabilities of answers and prompts, beam search": {},
    "running forks, sessions, the offline API": {},
    "vectors (`--pooling`)": {"pooling": "last"},
    "8-bit KV cache, with calculated scales": {"kv_cache_dtype": "fp8", "calculate_kv_scales": True},
    "host memory and disk behind the prefix cache": {"cpu_offload_bytes": 2**20},
    "traces and replay, recovery, `--load-format dummy`": {},
    "LoRA adapters of linear layers outside of experts": {"enable_lora": True},
    "weights rounded at the start (`--quantization`)": {"quantization": "int8"},
    "quantised checkpoints: compressed-tensors, fp8, GPTQ, AWQ, ModelOpt": {"quantization_config": FP8},
    "bitwise equal answers (`--deterministic`)": {"deterministic": True, "device": "cpu"},
    "bitwise equal answers on a GPU": {"deterministic": True, "device": "cuda"},
    "tensor parallelism of classes that have a plan for it (below)": {"tensor_parallel_size": 2},
    "bitwise equal answers of several ranks": {"deterministic": True, "device": "cpu", "tensor_parallel_size": 2},
    "the chosen experts": {"enable_return_routed_experts": True},
}
"""Rows of the table of docs/models.md: flags, or fields of ``config.json``. Those without either have none."""


def outcome(folder: Path, given: dict[str, Any]) -> str:
    fields = {name: value for name, value in given.items() if name == "quantization_config"}
    flags = {name: value for name, value in given.items() if name not in fields}
    options = EngineOptions(model_impl="transformers", load_format="dummy", **flags)
    try:
        make_engine_config(options, folder=write(folder, NEOX | fields))
    except ConfigError as refusal:
        return f"refused: {refusal}".replace(f"{folder}/", "")
    return "works"


def test_the_table_of_features_is_what_happens(tmp_path: Path, measured: list[str]) -> None:
    text = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    rows = [f"| {name} | {outcome(tmp_path, given)} |" for name, given in FEATURES.items()]
    assert "\n".join(["| feature | |", "|---|---|", *rows, ""]) in text


STATE = MeasuredState(module="layers.1.mixer", kind="conv", index=0, shape=(3, 4), dtype="")


@pytest.mark.parametrize(
    "flags, refused",
    [
        ({"cpu_offload_bytes": 2**20}, ""),
        ({"enable_lora": True}, "--enable-lora cannot be used with a model with recurrent states"),
        ({"state_slots": 4}, ""),
        ({"state_slots": -1}, "--state-slots must be from 0 to"),
    ],
)
def test_what_is_refused_for_recurrent_states(
    flags: dict[str, Any], refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = msgspec.structs.replace(LAYOUT, states=[STATE])
    monkeypatch.setattr(implementation, "measured_layout", lambda *given: layout)
    assert (outcome(tmp_path, flags).partition(": ")[2])[: len(refused) or None] == refused


def test_slots_of_states_need_states(tmp_path: Path, measured: list[str]) -> None:
    assert "--state-slots cannot be used with a model without recurrent states" in outcome(tmp_path, {"state_slots": 4})


def test_a_plan_is_tried_once_for_each_number_of_ranks(tmp_path: Path, measured: list[str]) -> None:
    def ranks(size: int, config: dict[str, Any] = NEOX) -> int:
        options = EngineOptions(load_format="dummy", model_impl="transformers", tensor_parallel_size=size)
        found = make_engine_config(options, folder=write(tmp_path, config)).model.transformers
        assert found is not None
        return found.ranks

    assert [ranks(size) for size in (2, 2, 4, 1)] == [2, 2, 4, 1] and measured[1:] == ["2", "4"]
    with pytest.raises(ConfigError, match=r"^--tensor-parallel-size 3: the model has 4 heads: omit the flag$"):
        ranks(3)
    with pytest.raises(ConfigError, match=r"the model has 4 heads: omit the flag, or set --model-impl native$"):
        ranks(3, LLAMA)


def test_a_refused_setting_that_native_code_has_names_it(tmp_path: Path, measured: list[str]) -> None:
    options = EngineOptions(model_impl="transformers", load_format="dummy", enable_return_routed_experts=True)
    with pytest.raises(ConfigError, match=r"-experts is not supported for Llama.*, or set --model-impl native"):
        make_engine_config(options, folder=write(tmp_path, LLAMA))


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"enable_lora": True}, "--enable-lora is not supported by Quire's own code for DeepseekV3ForCausalLM"),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8 is not supported by Quire's own code for DeepseekV3"),
    ],
)
def test_latents_refuse_what_needs_keys(flags: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = write(tmp_path, LLAMA | {"architectures": ["DeepseekV3ForCausalLM"]})
    with pytest.raises(ConfigError, match=message + ".*--model-impl transformers"):
        make_engine_config(EngineOptions(load_format="dummy", **flags), folder=folder)


@pytest.mark.parametrize(
    "changes, flags",
    [({"quantization_config": FP8}, {}), ({}, {"quantization": "int8"})],
)
def test_quantised_weights_need_linear_layers(
    changes: dict[str, Any], flags: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a class most of whose weights are joined experts, for example."""
    layout = msgspec.structs.replace(LAYOUT, outside="layers.0.experts.down_proj", linears={})
    monkeypatch.setattr(implementation, "measured_layout", lambda *given: layout)
    options = EngineOptions(load_format="dummy", **flags)
    with pytest.raises(ConfigError, match=r"such as layers\.0\.experts\.down_proj, are in no linear layer"):
        make_engine_config(options, folder=write(tmp_path, NEOX | changes))
    with pytest.raises(ConfigError, match=r"--enable-lora is not supported for GPTNeoXForCausalLM"):
        make_engine_config(EngineOptions(load_format="dummy", enable_lora=True), folder=write(tmp_path, NEOX))


def test_a_context_beyond_the_models_positions_is_refused(tmp_path: Path, measured: list[str]) -> None:
    options = EngineOptions(load_format="dummy", max_model_len=65)
    with pytest.raises(ConfigError, match="--max-model-len must be from 2 to 64"):
        make_engine_config(options, folder=write(tmp_path, NEOX))


def test_a_gguf_file_is_native(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="--model-impl transformers needs a folder with safetensors"):
        read_model(tmp_path / "model.gguf", "transformers")
