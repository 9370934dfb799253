"""Layer profiles as a cost model: sums of a step, on an excerpt of a real profile, and invalid tables."""

import csv
import shutil
from pathlib import Path
from typing import Any

import pytest

from quire.bench.measure.shapes import SHAPES
from quire.protocol.errors import ConfigError
from quire.replay.costs.layers import (
    ATTENTION,
    DENSE,
    EXPERTS,
    PER_SEQUENCE,
    LayerProfileCost,
    captured_sizes,
    load_layer_profile,
    merge_prefills,
)
from quire.replay.run.step_shape import StepShape

EXCERPT = Path(__file__).parents[1] / "data" / "layer_profile_excerpt"
LLAMA = SHAPES["llama-3.1-8b"]


def rows(name: str) -> list[dict[str, str]]:
    with (EXCERPT / name).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def expected(tokens: int, requests: int, attention: str) -> float:
    """Return the seconds of a step from the rows of the tables; ``attention`` is the key of its row."""
    times = {"embedding": 1, "final_layernorm": 1, "layernorm": 64}
    total = sum(times.get(r["layer"], 32) * float(r["time_us"]) for r in rows(DENSE) if int(r["tokens"]) == tokens)
    total += sum(float(r["time_us"]) for r in rows(PER_SEQUENCE) if int(r["sequences"]) == requests)
    (found,) = [r for r in rows(ATTENTION) if ",".join(list(r.values())[:4]) == attention]
    return (total + 32 * float(found["time_us"])) * 1e-6


def machine(**options: Any) -> LayerProfileCost:
    return LayerProfileCost(EXCERPT, LLAMA, "test", **options)


def decodes(n: int, context: int, longest: int = 0) -> StepShape:
    return StepShape([], n, n * context, n, longest)


class TestSums:
    @pytest.mark.parametrize(
        ("step", "tokens", "requests", "attention"),
        [
            (decodes(1, 256), 1, 1, "0,0,1,256"),
            (decodes(64, 1024), 64, 64, "0,0,64,1024"),
            (StepShape([(1024, 256)], 0, 0, 1), 1024, 1, "1024,256,0,0"),
            (StepShape([(2048, 0)], 0, 0, 0), 2048, 1, "2048,0,0,0"),
        ],
    )
    def test_measured_step_takes_the_sum_of_its_rows(
        self, step: StepShape, tokens: int, requests: int, attention: str
    ) -> None:
        assert machine().seconds(step) == pytest.approx(expected(tokens, requests, attention), rel=1e-9)

    def test_prefill_with_decodes_uses_mixed_grid(self) -> None:
        cost = machine()
        together = cost.seconds(StepShape([(1024, 1024)], 64, 64 * 256, 65))
        assert together < cost.seconds(StepShape([(1024, 1024)], 0, 0, 1)) + cost.seconds(decodes(64, 256))
        assert together > cost.seconds(StepShape([(1024, 1024)], 0, 0, 1))

    def test_longer_steps_take_longer(self) -> None:
        cost = machine()
        for worse, better in (
            (decodes(64, 2000), decodes(64, 1000)),
            (decodes(64, 9000), decodes(64, 4096)),
            (decodes(200, 1000), decodes(100, 1000)),
            (StepShape([(700, 0)], 9, 900, 10), StepShape([(600, 0)], 9, 900, 10)),
            (StepShape([(600, 900)], 9, 900, 10), StepShape([(600, 0)], 9, 900, 10)),
        ):
            assert cost.seconds(worse) > cost.seconds(better)

    def test_two_short_prompts_take_less_than_one_long_prompt(self) -> None:
        cost = machine()
        one = cost.seconds(StepShape([(2000, 0)], 0, 0, 1))
        two = cost.seconds(StepShape([(1000, 0), (1000, 0)], 0, 0, 2))
        assert 0.95 * one < two < one

    def test_merges_prefills_by_pairs(self) -> None:
        assert merge_prefills([(100, 50)]) == (100, 50.0)
        assert merge_prefills([(100, 0), (100, 0)]) == (200, 0.0)  # fewer pairs than one prompt of 200
        tokens, before = merge_prefills([(100, 1000), (100, 500)])
        assert tokens == 200
        assert 200 * (before + 100) == pytest.approx(100 * 1050 + 100 * 550)


class TestSkew:
    def test_unequal_contexts_are_between_mean_and_longest(self) -> None:
        equal, longest = machine().seconds(decodes(64, 1000)), machine().seconds(decodes(64, 4000))
        skewed = machine(skew=0.25).seconds(decodes(64, 1000, longest=4000))
        assert skewed == pytest.approx(equal + 0.25 * (longest - equal))

    def test_equal_contexts_take_measured_time(self) -> None:
        assert machine(skew=0.25).seconds(decodes(64, 1000, longest=1000)) == machine().seconds(decodes(64, 1000))
        assert machine(skew=0.25).seconds(decodes(64, 1000)) == machine().seconds(decodes(64, 1000))


class TestCaptured:
    def test_step_takes_the_time_of_its_padded_graph(self) -> None:
        padded, plain = machine(captured=captured_sizes(256)), machine()
        attention = plain.seconds(decodes(60, 1000)) - plain.seconds(decodes(60, 16))
        assert padded.seconds(decodes(60, 1000)) > plain.seconds(decodes(60, 1000))
        assert padded.seconds(decodes(60, 1000)) - padded.seconds(decodes(60, 16)) == pytest.approx(attention)
        assert padded.seconds(decodes(64, 1000)) == plain.seconds(decodes(64, 1000))
        long = StepShape([(300, 0)], 0, 0, 1)
        assert padded.seconds(long) == plain.seconds(long)

    def test_captured_sizes(self) -> None:
        assert captured_sizes(20) == [1, 2, 4, 8, 16]
        assert captured_sizes(512)[-2:] == [496, 512] and len(captured_sizes(512)) == 51


class TestExperts:
    def test_experts_replace_feed_forward_layers(self, tmp_path: Path) -> None:
        folder = copy(tmp_path)
        model = SHAPES["qwen3-30b-a3b"]
        few = [
            line for line in (folder / DENSE).read_text().splitlines() if "gate_up" not in line and "down" not in line
        ]
        (folder / DENSE).write_text("\n".join(few))
        with pytest.raises(ConfigError, match=EXPERTS):
            LayerProfileCost(folder, model, "test")
        seconds = {}
        for each in (10, 20):  # microseconds per expert read
            table = ["tokens,activated_experts,time_us"]
            table += [f"{t},{n},{each * n}" for t in (1, 64, 2048) for n in (8, 64, 128)]
            (folder / EXPERTS).write_text("\n".join(table))
            cost = LayerProfileCost(folder, model, "test")
            seconds[each] = [cost.seconds(decodes(1, 256)), cost.seconds(StepShape([(2048, 0)], 0, 0, 1))]
        assert seconds[20][0] - seconds[10][0] == pytest.approx(48 * 8 * 10e-6)
        assert seconds[20][1] - seconds[10][1] == pytest.approx(48 * 128 * 10e-6)


def copy(folder: Path) -> Path:
    return Path(shutil.copytree(EXCERPT, folder / "profile"))


class TestFolder:
    def test_profile_names_its_model_and_chip(self) -> None:
        cost = load_layer_profile(EXCERPT, None, 1)
        assert "RTX 4090" in cost.describe() and "32" in cost.describe()
        assert cost.seconds(decodes(64, 1024)) == pytest.approx(expected(64, 64, "0,0,64,1024"))
        assert cost.kv_bytes == 0  # the folder names no model

    def test_reads_skew_and_largest_batch(self, tmp_path: Path) -> None:
        folder = copy(tmp_path)
        meta = "{engine_effective: {max_num_seqs: 10}, skew_fit: {per_tp: {1: {alpha_default: 0.5}}}}"
        (folder / "profile_meta.yaml").write_text(meta)
        wanted = machine(skew=0.5, captured=captured_sizes(20))
        for step in (decodes(13, 1000, longest=3000), decodes(60, 1000, longest=3000)):
            assert load_layer_profile(folder, LLAMA, 1).seconds(step) == wanted.seconds(step)

    @pytest.mark.parametrize(
        ("name", "text", "message"),
        [
            (DENSE, "layer,tokens\nqkv_proj,1", r"profile_dense.csv:1: the header lacks time_us"),
            (
                DENSE,
                "layer,tokens,time_us\nqkv_proj,1,2\nqkv_proj,2",
                r"dense.csv:3: 2 fields; the header has 3",
            ),
            (
                DENSE,
                "layer,tokens,time_us\nqkv_proj,1,x",
                r"dense.csv:2: time_us must be a number above 0 .got 'x'",
            ),
            (DENSE, "layer,tokens,time_us\nqkv_proj,1,-1", r"profile_dense.csv:2: time_us must be a number above 0"),
            (DENSE, "layer,tokens,time_us\nqkv_proj,1,nan", r"profile_dense.csv:2: time_us must be a number above 0"),
            (DENSE, "layer,tokens,time_us\nqkv_proj,0,1", r"profile_dense.csv:2: tokens must be a whole number"),
            (DENSE, "layer,tokens,time_us\nqkv_proj,1,1", r"no row for layer down_proj, gate_up_proj, o_proj"),
            (DENSE, "", r"profile_dense.csv: no row for layer"),
            (ATTENTION, "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us", "no rows"),
            (
                ATTENTION,
                "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n0,0,1,1.5,3",
                r"profile_attention.csv:2: .* must be whole numbers",
            ),
            (ATTENTION, "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n0,0,1,-1,3", "must not be negative"),
            (ATTENTION, "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n0,0,1,1,3", "no row for prefills alone"),
            ("profile_meta.yaml", "a: [", r"profile_meta.yaml: "),
            ("profile_meta.yaml", "gpu: X", r"profile_meta.yaml does not name the model"),
            ("profile_meta.yaml", "model: acme/llama-3.1-9b", r"did you mean llama-3.1-8b"),
            ("profile_meta.yaml", "[]", r"profile_meta.yaml: must be a mapping"),
        ],
    )
    def test_error_names_file_and_line(self, tmp_path: Path, name: str, text: str, message: str) -> None:
        folder = copy(tmp_path)
        (folder / name).write_text(text)
        with pytest.raises(ConfigError, match=message):
            load_layer_profile(folder, None, 1)

    def test_rejects_missing_table_and_unreadable_file(self, tmp_path: Path) -> None:
        folder = copy(tmp_path)
        (folder / PER_SEQUENCE).unlink()
        with pytest.raises(ConfigError, match=r"profile_per_sequence.csv not found"):
            load_layer_profile(folder, None, 1)
        (folder / "profile_meta.yaml").write_bytes(b"\xff")
        with pytest.raises(ConfigError, match=r"profile_meta.yaml: cannot be read: "):
            load_layer_profile(folder, None, 1)
