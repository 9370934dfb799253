"""The roofline and kernel table cost models: bounds that must hold, and their agreement."""

from pathlib import Path

import msgspec
import pytest

from quire.bench.measure.shapes import SHAPES
from quire.protocol.errors import ConfigError
from quire.protocol.model.model_config import ModelConfig, parse_model_config
from quire.protocol.model.weight_format import online_format
from quire.replay.costs.chips import CHIPS
from quire.replay.costs.kernel_tables import KernelTableCost
from quire.replay.costs.link import Interconnect
from quire.replay.costs.models import find_model
from quire.replay.costs.pairs import decode_pairs, prefill_pairs
from quire.replay.costs.roofline import Roofline
from quire.replay.costs.sizes import num_experts_read, num_parameters, room_for_kv, weight_bytes
from quire.replay.run.step_shape import StepShape

TABLES = Path(__file__).parents[1] / "data" / "kernel_tables_excerpt"
LLAMA = SHAPES["llama-3.1-8b"]
H200 = CHIPS["h200"]
SIZES = {
    "vocab_size": 73448,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 62,
    "dtype": "bfloat16",
}
LATENTS = parse_model_config(
    SIZES | {"architectures": ["MiniCPM3ForCausalLM"], "num_attention_heads": 40, "tie_word_embeddings": False}, ""
)
ONE = StepShape([], 1, 1000, 1)
MANY = StepShape([], 256, 256 * 1000, 256)
PREFILL = StepShape([(2048, 0)], 0, 0, 1)
MIXED = StepShape([(1024, 3000)], 64, 64 * 1000, 65)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        *[("llama-3.1-8b", 8.03), ("llama-3.1-70b", 70.6), ("qwen3-0.6b", 0.596), ("qwen3-32b", 32.8)],
        *[("qwen3-30b-a3b", 30.5), ("gemma-3-1b", 1.0), ("smollm2-135m", 0.1345)],
    ],
)
def test_parameter_counts_equal_published_ones(name: str, billions: float) -> None:
    assert num_parameters(find_model(name)) / 1e9 == pytest.approx(billions, rel=0.01)


class TestPairs:
    @pytest.mark.parametrize(("chunk", "before", "window"), [(7, 0, 0), (7, 5, 0), (7, 5, 20), (7, 5, 8), (7, 5, 3)])
    def test_prefill_pairs_equal_direct_count(self, chunk: int, before: int, window: int) -> None:
        seen = [position + 1 if not window else min(position + 1, window) for position in range(before, before + chunk)]
        assert prefill_pairs(chunk, before, window) == sum(seen)

    def test_decode_pairs(self) -> None:
        assert decode_pairs(0, 0) == 0
        assert decode_pairs(4, 400) == decode_pairs(4, 400, 100) == 400
        assert decode_pairs(4, 400, 30) == 120


def test_latents_and_shared_experts_are_counted() -> None:
    """GLM-4.7-Flash has 30 billion parameters."""
    sizes = {"vocab_size": 154880, "hidden_size": 2048, "intermediate_size": 10240, "num_hidden_layers": 47}
    raw = sizes | {"architectures": ["Glm4MoeLiteForCausalLM"], "num_attention_heads": 20}
    assert num_parameters(parse_model_config(raw, "config.json")) / 1e9 == pytest.approx(29.94, rel=0.001)


def test_all_reduce_is_bound_by_latency_or_bytes() -> None:
    link = Interconnect(bandwidth=1e9, latency=1e-5)
    assert link.all_reduce(1000, 1) == 0
    assert link.all_reduce(0, 8) == pytest.approx(1e-5)
    assert link.all_reduce(1e9, 4) == pytest.approx(6 * (1e-5 + 0.25))


class TestRoofline:
    def test_single_decode_streams_the_weights(self) -> None:
        streamed = num_parameters(LLAMA) * 2 / (H200.bandwidth * H200.memory_efficiency)
        assert streamed < Roofline(LLAMA, H200).seconds(ONE) < 1.25 * streamed

    @pytest.mark.parametrize("model", [LLAMA, LATENTS], ids=["keys", "latents"])
    def test_prefill_is_bound_by_products(self, model: ModelConfig) -> None:
        products = 2 * 2048 * (num_parameters(model) - 2 * model.vocab_size * model.hidden_size)
        at_peak = products / (H200.flops["bfloat16"] * H200.gemm_efficiency)
        assert at_peak < Roofline(model, H200).seconds(PREFILL) < 1.3 * at_peak

    def test_many_decodes_read_their_contexts(self) -> None:
        cost = Roofline(LLAMA, H200)
        twice = StepShape([], 256, 2 * MANY.decode_context, 256)
        read = MANY.decode_context * 131072 / (H200.bandwidth * H200.memory_efficiency)
        assert cost.seconds(twice) - cost.seconds(MANY) == pytest.approx(read)

    @pytest.mark.parametrize("step", [PREFILL, MANY, MIXED])
    def test_two_chips_take_more_than_half(self, step: StepShape) -> None:
        alone, shared = (Roofline(LLAMA, H200, ranks).seconds(step) for ranks in (1, 2))
        assert alone / 2 < shared < 0.75 * alone

    def test_slow_link_takes_longer(self) -> None:
        slow = msgspec.structs.replace(H200, link_bandwidth=10e9)
        fast, slower = (Roofline(LLAMA, chip, 2).seconds(PREFILL) for chip in (H200, slow))
        exchanged = 64 * 2048 * 4096 * 2
        assert slower - fast == pytest.approx(exchanged * (1 / 10e9 - 1 / H200.link_bandwidth), rel=0.01)

    def test_few_tokens_read_few_experts(self) -> None:
        model = SHAPES["qwen3-30b-a3b"]
        assert num_experts_read(model, 1) == pytest.approx(8)
        assert num_experts_read(model, 1000) == pytest.approx(128)
        cost = Roofline(model, H200)
        dense = num_parameters(model) * 2 / (H200.bandwidth * H200.memory_efficiency)
        assert cost.seconds(ONE) < dense / 4 < dense < cost.seconds(MANY)

    def test_packed_experts_are_read_as_they_are_stored(self) -> None:
        """gpt-oss-20b: a file of 13.8 GB; with 16-bit experts three times as many bytes."""
        packed = find_model("gpt-oss-20b")
        assert packed.moe is not None and packed.moe.mxfp4
        wide = msgspec.structs.replace(packed, moe=msgspec.structs.replace(packed.moe, mxfp4=False))
        assert weight_bytes(packed) == pytest.approx(13.8e9, rel=0.02)
        assert weight_bytes(wide) == 2 * num_parameters(wide)
        assert room_for_kv(packed, 80e9, 1) - room_for_kv(wide, 80e9, 1) > 27e9
        assert Roofline(packed, H200).seconds(ONE) < 0.75 * Roofline(wide, H200).seconds(ONE)

    def test_quantised_layers_are_read_packed(self) -> None:
        """int4 in groups of 32 with 16-bit scales: 4.5 bits for each weight, but for the embedding and the head."""
        packed = msgspec.structs.replace(LLAMA, weight_format=online_format("int4"))
        embeddings = 2 * LLAMA.vocab_size * LLAMA.hidden_size
        projections = num_parameters(LLAMA) - embeddings
        assert weight_bytes(packed) == 2 * embeddings + projections * 4.5 / 8
        saved = projections * (2 - 4.5 / 8) / (H200.bandwidth * H200.memory_efficiency)
        assert Roofline(LLAMA, H200).seconds(ONE) - Roofline(packed, H200).seconds(ONE) == pytest.approx(saved)

    def test_layers_have_kv_heads_of_their_own(self) -> None:
        """Every second layer has the fourth of the KV heads and twice the head dimension."""
        mixed = msgspec.structs.replace(LLAMA, kv_shapes=[(8, 128), (2, 256)] * 16)
        wide = msgspec.structs.replace(LLAMA, kv_shapes=[(2, 256)] * 32)
        assert num_parameters(mixed) == (num_parameters(LLAMA) + num_parameters(wide)) / 2
        for step in (ONE, MANY, PREFILL, MIXED):
            outer = [Roofline(model, H200).seconds(step) for model in (LLAMA, wide)]
            assert Roofline(mixed, H200).seconds(step) == pytest.approx(sum(outer) / 2)
        reading = [layer % 2 for layer in range(32)]
        sources = msgspec.structs.replace(LLAMA, cache_sources=[layer - odd for layer, odd in enumerate(reading)])
        assert num_parameters(LLAMA) - num_parameters(sources) == 16 * 2 * 4096 * 8 * 128
        with pytest.raises(ConfigError, match="multiple of 3 KV heads"):
            Roofline(msgspec.structs.replace(LLAMA, kv_shapes=[(8, 128), (3, 128)] * 16), H200, 2)

    def test_windows_limit_contexts(self) -> None:
        model = SHAPES["mistral-7b"]
        cost = Roofline(model, H200)
        near, far = (cost.seconds(StepShape([], 8, 8 * context, 8)) for context in (5000, 50_000))
        assert near == far
        assert cost.seconds(StepShape([(512, 30_000)], 0, 0, 1)) == cost.seconds(StepShape([(512, 20_000)], 0, 0, 1))
        assert cost.seconds(StepShape([], 8, 8 * 2000, 8)) < near
        chunked = Roofline(msgspec.structs.replace(model, windows=[], chunks=[8192] * model.num_layers), H200)
        assert chunked.seconds(StepShape([], 8, 8 * 50_000, 8)) == far  # 8192 tokens see 4096 on average

    def test_memory_for_the_kv_cache(self) -> None:
        chip = CHIPS["h100"]
        one, two = (Roofline(LLAMA, chip, ranks).kv_bytes for ranks in (1, 2))
        assert 55e9 < one < 0.9 * chip.memory_bytes - 16e9
        assert two > 2 * one + 0.95 * 16e9  # both ranks together hold the weights once
        assert Roofline(find_model("llama-3.1-70b"), chip).kv_bytes == 0

    @pytest.mark.parametrize(
        ("ranks", "message"), [(3, "32 attention heads"), (0, "32 attention heads"), (64, "32 attention heads")]
    )
    def test_rejects_indivisible_heads(self, ranks: int, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            Roofline(LLAMA, H200, ranks)

    def test_rejects_dtype_unknown_to_the_chip(self) -> None:
        chip = msgspec.structs.replace(H200, flops={"float32": 1e12})
        with pytest.raises(ConfigError, match="flops has no bfloat16; it has float32"):
            Roofline(LLAMA, chip)


class TestKernelTables:
    @pytest.mark.parametrize("ranks", [1, 2])
    @pytest.mark.parametrize("step", [ONE, MANY, PREFILL, MIXED, StepShape([(500, 0), (900, 200)], 8, 8000, 10)])
    def test_kernel_tables_and_roofline_agree(self, step: StepShape, ranks: int) -> None:
        """They agree within a quarter, so that a missing or doubled factor is detected."""
        measured = KernelTableCost(TABLES, LLAMA, ranks).seconds(step)
        assert Roofline(LLAMA, H200, ranks).seconds(step) == pytest.approx(measured, rel=0.25)

    def test_prefill_after_cached_tokens_takes_the_difference(self) -> None:
        cost = KernelTableCost(TABLES, LLAMA)
        whole, first, rest = (cost.seconds(StepShape([p], 0, 0, 1)) for p in ((4096, 0), (2048, 0), (2048, 2048)))
        assert first < rest < whole
        attention = [cost.seconds(StepShape([(2048, k)], 0, 0, 1)) - first for k in (2048, 4096, 6144)]
        steps = [b - a for a, b in zip([0.0, *attention], attention, strict=False)]
        assert max(steps) < 1.5 * min(steps)  # each 2048 tokens of context add about the same time

    def test_longer_contexts_grow_quadratically(self) -> None:
        cost = KernelTableCost(TABLES, LLAMA)
        near, far = (cost.seconds(StepShape([(1024, k)], 0, 0, 1)) for k in (15_360, 31_744))
        none = cost.seconds(StepShape([(1024, 0)], 0, 0, 1))
        assert 1.7 < (far - none) / (near - none) < 2.5

    @pytest.mark.parametrize(
        ("model", "ranks", "message"),
        [
            ("qwen3-30b-a3b", 1, "mixture-of-experts models, use a roofline"),
            ("gemma-3-1b", 1, "head_dim must be 128 .got 256."),
            ("llama-3.1-70b", 1, "no rows for 64 heads over 8 KV heads; the table has 16/4, 32/8"),
            ("llama-3.1-8b", 4, "no rows for 4 ranks; the table has 2, 8"),
        ],
    )
    def test_rejects_models_without_tables(self, model: str, ranks: int, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            KernelTableCost(TABLES, find_model(model), ranks)

    def test_rejects_missing_table(self, tmp_path: Path) -> None:
        (tmp_path / "gemm.csv").write_text("m,n,k,latency\n1,1,1,1")
        with pytest.raises(ConfigError, match=r"generation_attention\*.csv not found"):
            KernelTableCost(tmp_path, LLAMA)
