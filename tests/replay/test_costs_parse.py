"""``--cost``: every kind, models and chips by name or file, and errors."""

import json
from pathlib import Path

import pytest

from quire.bench.measure.shapes import SHAPES
from quire.protocol.errors import ConfigError
from quire.replay.costs.chips import CHIPS, find_chip
from quire.replay.costs.models import MODELS, find_model
from quire.replay.costs.parse import default_cost, parse_cost
from quire.replay.run.step_shape import StepShape
from quire.replay.workload.workload import Workload

DATA = Path(__file__).parents[1] / "data"
STEP = StepShape([(100, 50)], 8, 8000, 9)


class TestKinds:
    def test_constant(self) -> None:
        cost = parse_cost("constant:2.5")
        assert cost.seconds(STEP) == 0.0025 and cost.kv_bytes == 0 and "2.5 ms" in cost.describe()

    def test_roofline(self) -> None:
        one, two = (parse_cost("roofline:llama-3.1-8b,h100", tensor_parallel_size=n) for n in (1, 2))
        assert two.seconds(STEP) < one.seconds(STEP)
        assert "h100 x 2" in two.describe() and two.kv_bytes > one.kv_bytes
        given = parse_cost("roofline:,h100", model=SHAPES["llama-3.1-8b"])
        assert parse_cost("roofline:h100", model=SHAPES["llama-3.1-8b"]).seconds(STEP) == given.seconds(STEP)
        assert given.seconds(STEP) == one.seconds(STEP)

    def test_kernel_tables(self) -> None:
        folder = DATA / "kernel_tables_excerpt"
        cost = parse_cost(f"table:{folder}")
        assert cost.seconds(STEP) == parse_cost(f"table:{folder},llama-3.1-8b").seconds(STEP)
        assert "kernels" in cost.describe() and cost.kv_bytes > 100e9

    def test_layer_profile_names_its_model(self) -> None:
        folder = DATA / "layer_profile_excerpt"
        cost = parse_cost(f"table:{folder}", model=SHAPES["tiny"])
        assert cost.seconds(STEP) == parse_cost(f"table:{folder}").seconds(STEP)
        assert parse_cost(f"table:{folder},tiny").seconds(STEP) < cost.seconds(STEP)
        with pytest.raises(ConfigError, match=r"profile_dense_tp2\.csv not found.*degree of the profile \(1; got 2\)"):
            parse_cost(f"table:{folder}", tensor_parallel_size=2)

    def test_folder_name_may_contain_comma(self, tmp_path: Path) -> None:
        folder = tmp_path / "a,b"
        folder.mkdir()
        with pytest.raises(ConfigError, match="a,b: neither kernel tables"):
            parse_cost(f"table:{folder}")

    @pytest.mark.parametrize(
        ("spec", "message"),
        [
            ("constnat:5", r"unknown kind; did you mean constant\?; known: constant:MS, roofline"),
            ("", "unknown kind"),
            ("constant", "must be constant:MS"),
            ("constant:", "must be constant:MS"),
            ("constant:fast", "milliseconds must be a number above 0 .got 'fast'"),
            ("constant:0", "must be a number above 0"),
            ("constant:inf", "must be a number above 0"),
            ("constant:nan", "must be a number above 0"),
            ("roofline:llama-3.1-8b", "must be roofline:CONFIG,CHIP"),
            ("roofline:llama-3.1-8b,h10", r"h10: unknown chip; did you mean h100\?"),
            ("roofline:llama-3.1-8,h100", r"neither a config.json nor a known model name; did you mean llama"),
            ("roofline:nothing/config.json,h100", "file not found"),
            ("roofline:llama-3.1-8b,nothing.yaml", "nothing.yaml: No such file"),
            ("table:/nowhere", "/nowhere: folder not found"),
        ],
    )
    def test_rejects_invalid_costs(self, spec: str, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            parse_cost(spec)


class TestDefault:
    def test_default_is_an_h200(self) -> None:
        cost = default_cost(Workload("mooncake", str(DATA / "mooncake_excerpt.jsonl"), []), tensor_parallel_size=2)
        assert "roofline" in cost.describe() and "h200 x 2" in cost.describe()


class TestModels:
    @pytest.mark.parametrize(
        ("name", "known"),
        [
            ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
            ("meta-llama/Meta-Llama-3-8B", "llama-3.1-8b"),
            ("meta-llama/Llama-3.3-70B-Instruct", "llama-3.1-70b"),
            ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"),
            ("/data/model/Qwen3-32B/", "qwen3-32b"),
            ("tiny", "tiny"),
        ],
    )
    def test_finds_shape_by_publishers_name(self, name: str, known: str) -> None:
        assert find_model(name) is MODELS[known]

    def test_finds_config_file_or_its_folder(self, tmp_path: Path) -> None:
        raw = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 32}
        raw |= {"intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
        (tmp_path / "config.json").write_text(json.dumps(raw | {"dtype": "float32", "rms_norm_eps": 1e-5}))
        assert find_model(str(tmp_path)) == find_model(str(tmp_path / "config.json"))
        assert parse_cost(f"roofline:{tmp_path},cpu").seconds(STEP) > 0


class TestChips:
    def test_built_in_chips_are_complete(self) -> None:
        for name in CHIPS:
            assert 0 < parse_cost(f"roofline:smollm2-135m,{name}").seconds(STEP) < 1
            assert find_chip(name.upper()) is CHIPS[name]

    @pytest.mark.parametrize("name", ["mine.json", "mine.yaml"])
    def test_reads_chip_from_file(self, tmp_path: Path, name: str) -> None:
        description = {"flops": {"bfloat16": 1e15}, "memory_bytes": 1e11, "bandwidth": 2e12, "memory_efficiency": 0.9}
        (tmp_path / name).write_text(json.dumps(description))
        chip = find_chip(str(tmp_path / name))
        assert chip.name == "mine" and chip.memory_efficiency == 0.9 and chip.flops_of("bfloat16") == 1e15

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("flops: [", "mine.yaml: "),
            ("3", "mine.yaml: Expected `object`"),
            ("{flops: {bfloat16: 1e12}, bandwidth: 1e12}", "missing required field `memory_bytes`"),
            ("{flops: {bfloat16: 0}, bandwidth: 1, memory_bytes: 1}", r"Expected `float` > 0"),
            ("{flops: {}, bandwidth: 1, memory_bytes: 1, bandwith: 2}", "unknown field `bandwith`"),
            ("{flops: {}, bandwidth: 1, memory_bytes: 1, gemm_efficiency: 2}", r"Expected `float` <= 1"),
        ],
    )
    def test_rejects_invalid_chips(self, tmp_path: Path, text: str, message: str) -> None:
        (tmp_path / "mine.yaml").write_text(text)
        with pytest.raises(ConfigError, match=message):
            find_chip(str(tmp_path / "mine.yaml"))
