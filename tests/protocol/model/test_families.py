"""Each family's ``config.json``, in the forms in which public checkpoints have it."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.protocol.errors import ConfigError
from quire.protocol.model.chunked_config import QueryScale
from quire.protocol.model.kv_layout import kv_layout
from quire.protocol.model.model_config import ModelConfig, MoeConfig, parse_model_config
from quire.protocol.model.rope_config import RopeConfig

BASE: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def parse(architecture: str, **changes: Any) -> ModelConfig:
    return parse_model_config({"architectures": [architecture]} | BASE | changes, "config.json")


class TestWindows:
    @pytest.mark.parametrize(
        ("architecture", "changes", "windows"),
        [
            ("MistralForCausalLM", {"sliding_window": 64}, [64] * 6),
            ("MistralForCausalLM", {"sliding_window": None}, []),
            ("MistralForCausalLM", {"max_position_embeddings": 32768}, [4096] * 6),
            ("MistralForCausalLM", {"sliding_window": 512}, []),
            ("Phi3ForCausalLM", {"sliding_window": 511}, [511] * 6),
            ("Phi3ForCausalLM", {}, []),
            ("MixtralForCausalLM", {"sliding_window": None}, []),
            ("Qwen2ForCausalLM", {"sliding_window": 64, "max_window_layers": 4}, []),
            ("Qwen2ForCausalLM", {"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 0}, []),
            (
                "Qwen2ForCausalLM",
                {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 4},
                [0] * 4 + [64] * 2,
            ),
            ("Qwen3MoeForCausalLM", {"use_sliding_window": True, "sliding_window": 64, "num_experts": 8}, [64] * 6),
            (
                "Qwen3ForCausalLM",
                {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0,
                 "layer_types": ["full_attention", "sliding_attention"] * 3},
                [0, 64] * 3,
            ),
            ("Gemma2ForCausalLM", {"sliding_window": 64}, [64, 0] * 3),
            ("Gemma3ForCausalLM", {"sliding_window": 64}, [64] * 5 + [0]),
            ("Gemma3ForCausalLM", {"sliding_window": 64, "sliding_window_pattern": 3}, [64, 64, 0] * 2),
            ("Gemma3ForCausalLM", {"sliding_window": 64, "_sliding_window_pattern": 2}, [64, 0] * 3),
            ("GptOssForCausalLM", {"num_local_experts": 8}, [128, 0] * 3),
            ("SmolLM3ForCausalLM", {}, []),
            ("SmolLM3ForCausalLM", {"use_sliding_window": True, "sliding_window": 64}, [0, 0, 0, 64, 0, 0]),
        ],
    )  # fmt: skip
    def test_windows_follow_the_familys_rule(
        self, architecture: str, changes: dict[str, Any], windows: list[int]
    ) -> None:
        assert parse(architecture, **changes).windows == windows

    def test_window_of_a_layer(self) -> None:
        assert [parse("Gemma2ForCausalLM", sliding_window=64).window(i) for i in (0, 1)] == [64, 0]
        assert parse("LlamaForCausalLM").window(3) == 0


class TestRopes:
    def test_yarn(self) -> None:
        scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
        rope = parse("Qwen2ForCausalLM", rope_theta=1e6, rope_scaling=scaling).rope
        assert rope == RopeConfig(
            1e6, "yarn", 4.0, original_max_position=128, attention_factor=pytest.approx(0.1 * math.log(4) + 1)
        )
        scaling |= {"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 16, "truncate": False}
        rope = parse("Qwen2ForCausalLM", rope_scaling=scaling).rope
        assert (rope.attention_factor, rope.beta_fast, rope.truncate) == (1.0, 16.0, False)
        assert parse("Qwen2ForCausalLM", rope_scaling=scaling | {"attention_factor": 2.5}).rope.attention_factor == 2.5

    @pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])
    def test_phi3_longrope_under_its_three_names(self, kind: str) -> None:
        scaling = {"type": kind, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
        model = parse(
            "Phi3ForCausalLM",
            rope_scaling=scaling,
            original_max_position_embeddings=64,
            max_position_embeddings=2048,
            rope_theta=1e4,
        )
        assert model.rope.kind == "longrope" and model.rope.original_max_position == 64 and model.rope.factor == 32
        assert model.rope.attention_factor == pytest.approx(math.sqrt(1 + math.log(32) / math.log(64)))
        assert model.rope.long_factor == [2.0] * 4

    @pytest.mark.parametrize(
        "changes",
        [
            {"partial_rotary_factor": 0.5},
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        ],
    )
    def test_partial_rotation(self, changes: dict[str, Any]) -> None:
        assert parse("Phi3ForCausalLM", **changes).rope.rotary_dim(8) == 4

    def test_dynamic_rope_starts_from_the_models_length(self) -> None:
        rope = parse("LlamaForCausalLM", rope_scaling={"type": "dynamic", "factor": 2.0}).rope
        assert (rope.kind, rope.original_max_position) == ("dynamic", 512)

    def test_llama3_rope_without_original_length_uses_the_models_length(self) -> None:
        scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        assert parse("LlamaForCausalLM", rope_scaling=scaling).rope.original_max_position == 512

    def test_gemma3_in_old_and_new_field_names(self) -> None:
        linear = {"rope_type": "linear", "factor": 8.0}
        old = parse("Gemma3ForCausalLM", rope_scaling=linear, sliding_window=64)
        new = parse(
            "Gemma3ForCausalLM",
            sliding_window=64,
            rope_parameters={
                "full_attention": linear | {"rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        )
        assert old == new
        assert old.rope == RopeConfig(1e6, "linear", 8.0) and old.local_rope == RopeConfig()
        assert old.local_rope_layers == [0, 1, 2, 3, 4]

    def test_windows_of_olmo_3_have_the_rope_without_scaling(self) -> None:
        scaling = {"rope_type": "linear", "factor": 8.0}
        model = parse("Olmo3ForCausalLM", rope_theta=2e5, rope_scaling=scaling, sliding_window=64)
        assert (model.rope, model.local_rope) == (RopeConfig(2e5, "linear", 8.0), RopeConfig(2e5))
        assert model.local_rope_layers == [0, 1, 2, 4, 5]
        assert parse("Olmo3ForCausalLM", rope_theta=2e5, sliding_window=64).local_rope is None

    def test_equal_ropes_of_all_layer_types_are_merged(self) -> None:
        same = {"rope_type": "default", "rope_theta": 1e4}
        ropes = {"full_attention": same, "sliding_attention": same}
        model = parse("Gemma3ForCausalLM", rope_parameters=ropes, sliding_window=64)
        assert model.local_rope is None and model.local_rope_layers == []

    def test_layers_without_rope(self) -> None:
        assert parse("SmolLM3ForCausalLM").no_rope_layers == [3]
        assert parse("SmolLM3ForCausalLM", no_rope_layers=[1, 0, 1, 1, 1, 0]).no_rope_layers == [1, 5]
        assert parse("LlamaForCausalLM").no_rope_layers == []
        with pytest.raises(ConfigError, match="an entry for each of 6 layers"):
            parse("SmolLM3ForCausalLM", no_rope_layers=[1])
        assert parse("Exaone4ForCausalLM").no_rope_layers == [3]
        assert parse("Exaone4ForCausalLM", sliding_window=None, sliding_window_pattern=None).no_rope_layers == []


class TestSwitches:
    def test_gemma_2(self) -> None:
        model = parse("Gemma2ForCausalLM", query_pre_attn_scalar=16)
        assert (model.norms, model.norm_offset, model.activation) == ("both", 1.0, "gelu_tanh")
        assert (model.attention_scale, model.attention_soft_cap, model.final_soft_cap) == (0.25, 50.0, 30.0)
        assert model.embedding_multiplier == 8.0 and model.tie_word_embeddings and model.head_dim == 256
        none = parse("Gemma2ForCausalLM", attn_logit_softcapping=None, final_logit_softcapping=None)
        assert none.attention_soft_cap == none.final_soft_cap == 0.0

    def test_gemma_3_vision_checkpoint(self) -> None:
        raw = {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "eos_token_id": [1, 106],
            "text_config": {
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "model_type": "gemma3_text",
                "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
            "torch_dtype": "bfloat16",
            "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
        }
        model = parse_model_config(raw, "config.json")
        assert (model.hidden_size, model.num_layers, model.num_heads, model.num_kv_heads) == (2560, 34, 8, 4)
        assert (model.head_dim, model.vocab_size, model.dtype, model.max_position) == (256, 262208, "bfloat16", 131072)
        assert model.qk_norm == "head" and model.windows.count(1024) == 29 and model.attention_scale == 1 / 16
        with pytest.raises(ConfigError, match="text_config must be an object"):
            parse("Gemma3ForConditionalGeneration", text_config=[])

    def test_granite(self) -> None:
        model = parse(
            "GraniteForCausalLM",
            embedding_multiplier=12,
            attention_multiplier=0.015625,
            residual_multiplier=0.22,
            logits_scaling=16.0,
        )
        assert (model.embedding_multiplier, model.attention_scale) == (12.0, 0.015625)
        assert (model.residual_multiplier, model.logits_scaling) == (0.22, 16.0)

    def test_olmo_2(self) -> None:
        model = parse("Olmo2ForCausalLM")
        assert (model.norms, model.qk_norm, model.rms_norm_eps) == ("after", "width", 1e-5)

    @pytest.mark.parametrize(
        ("architecture", "changes", "settings"),
        [
            (
                "ExaoneForCausalLM",
                {"num_hidden_layers": None, "num_layers": 3, "layer_norm_epsilon": 0.5, "activation_function": "gelu"},
                {"num_layers": 3, "rms_norm_eps": 0.5, "activation": "gelu"},
            ),
            ("ExaoneForCausalLM", {}, {"num_layers": 6, "rms_norm_eps": 1e-5, "activation": "silu"}),
            (
                "InternLM3ForCausalLM",
                {"qkv_bias": True, "bias": False},
                {"qkv_bias": True, "o_bias": False, "mlp_bias": False},
            ),
            ("InternLM3ForCausalLM", {"bias": True}, {"qkv_bias": False, "o_bias": True, "mlp_bias": True}),
            ("Ernie4_5ForCausalLM", {"use_bias": True}, {"qkv_bias": True, "o_bias": True, "mlp_bias": True}),
            ("SeedOssForCausalLM", {}, {"qkv_bias": True, "o_bias": False}),
            ("SeedOssForCausalLM", {"attention_out_bias": True}, {"o_bias": True}),
            ("CwmForCausalLM", {}, {"rope": RopeConfig(1e6, "llama3", 16.0)}),
        ],
    )
    def test_fields_that_a_family_names_otherwise_or_omits(
        self, architecture: str, changes: dict[str, Any], settings: dict[str, Any]
    ) -> None:
        model = parse(architecture, **changes)
        assert {name: getattr(model, name) for name in settings} == settings

    def test_clipped_projections_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="clip_qkv is not supported"):
            parse("OlmoeForCausalLM", clip_qkv=8.0)
        assert parse("OlmoeForCausalLM", clip_qkv=None).qk_norm == "width"

    def test_families_without_special_features(self) -> None:
        assert parse("LlamaForCausalLM").attention_scale is None
        assert parse("MistralForCausalLM", attention_bias=True).qkv_bias is False
        assert parse("Qwen3ForCausalLM").head_dim == 128
        assert parse("Qwen3ForCausalLM", head_dim=None).head_dim == 8


class TestExperts:
    @pytest.mark.parametrize("name", ["num_experts", "num_local_experts"])
    def test_qwen3_moe(self, name: str) -> None:
        model = parse(
            "Qwen3MoeForCausalLM",
            **{name: 16},
            num_experts_per_tok=4,
            moe_intermediate_size=32,
            decoder_sparse_step=2,
            mlp_only_layers=[3],
            norm_topk_prob=True,
        )
        assert model.moe == MoeConfig(
            num_experts=16, num_experts_per_token=4, intermediate_size=32, layers=[1, 5], renormalise=True
        )

    def test_mixtral(self) -> None:
        moe = parse("MixtralForCausalLM").moe
        assert moe == MoeConfig(num_experts=8, num_experts_per_token=2, intermediate_size=128, layers=[*range(6)])

    def test_gpt_oss_checkpoint(self) -> None:
        model = parse(
            "GptOssForCausalLM",
            num_local_experts=32,
            attention_bias=True,
            swiglu_limit=7.0,
            quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
            rope_scaling={
                "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
                "rope_type": "yarn", "truncate": False,
            },
        )  # fmt: skip
        assert model.moe == MoeConfig(
            num_experts=32, num_experts_per_token=4, intermediate_size=128, layers=[*range(6)],
            bias=True, activation="swiglu_oai", mxfp4=True,
        )  # fmt: skip
        assert model.attention_sinks and model.qkv_bias and model.o_bias and model.head_dim == 64
        assert model.rope.theta == 150000.0 and model.rope.kind == "yarn" and not model.rope.truncate

    def test_unsupported_swiglu_parameters_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="swiglu_alpha and swiglu_limit must be"):
            parse("GptOssForCausalLM", num_local_experts=32, swiglu_limit=6.0)

    def test_more_experts_per_token_than_experts_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="num_experts_per_tok must be an integer from 1 to 8"):
            parse("MixtralForCausalLM", num_experts_per_tok=9)


GLM_FLASH: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "num_hidden_layers": 47,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "num_nextn_predict_layers": 1,
    "rope_parameters": {"partial_rotary_factor": 1.0, "rope_theta": 1000000, "rope_type": "default"},
}
"""As the checkpoint of GLM-4.7-Flash names them; the rest are defaults."""


class TestLatents:
    def test_a_block_of_glm_flash(self) -> None:
        model = parse("Glm4MoeLiteForCausalLM", **GLM_FLASH)
        layout = kv_layout(model, 16, "bfloat16")
        assert [(group.kind, group.parts, len(group.layers)) for group in layout.groups] == [
            ("latent_attention", 1, 47)
        ]
        assert layout.block_bytes == layout.rank_block_bytes(4) == 866_304
        assert model.moe is not None and (model.moe.layers, model.moe.shared_width) == ([*range(1, 47)], 1536)

    def test_deepseek_scales_scores_by_yarn(self) -> None:
        yarn = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}
        yarn["original_max_position_embeddings"] = 256
        model = parse("DeepseekV3ForCausalLM", rope_scaling=yarn)
        assert model.attention_scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
        assert (model.rope.attention_factor, model.interleaved_rope, model.extra_layers) == (1.0, True, 1)

    @pytest.mark.parametrize(
        ("family", "changes", "message"),
        [
            ("DeepseekV3", {"kv_lora_rank": 0}, "kv_lora_rank must be an integer from 1 to 4096 .got 0"),
            ("DeepseekV3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim 7 must be even"),
            ("DeepseekV3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1 with latent attention"),
            ("DeepseekV3", {"v_head_dim": "wide"}, "v_head_dim must be an integer"),
            ("DeepseekV3", {"n_group": 7}, "n_group 7 and topk_group 4 must divide 256 experts into equal groups"),
            ("DeepseekV3", {"topk_group": 9}, "topk_group must be an integer from 1 to 8"),
            ("DeepseekV3", {"num_experts_per_tok": 200}, r"leave at least num_experts_per_tok \(200\)"),
            ("DeepseekV3", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported; supported: sigmoid"),
            ("DeepseekV3", {"moe_layer_freq": 2}, "moe_layer_freq must be 1"),
            ("DeepseekV3", {"mlp_layer_types": ["dense"]}, "mlp_layer_types must be a list of 6 names"),
            ("DeepseekV2", {}, "num_experts_per_tok must be an integer from 1 to 64 .got None"),
            ("DeepseekV2", {"num_experts_per_tok": 2, "topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not"),
            ("DeepseekV2", {"num_experts_per_tok": 2, "norm_topk_prob": True}, "norm_topk_prob must be false"),
        ],
    )
    def test_what_does_not_fit_is_named(self, family: str, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message) as refusal:
            parse(f"{family}ForCausalLM", **changes)
        assert str(refusal.value).startswith("config.json: ") and "\n" not in str(refusal.value)


SCOUT: dict[str, Any] = {
    "architectures": ["Llama4ForConditionalGeneration"],
    "model_type": "llama4",
    "text_config": {
        "attention_chunk_size": 8192,
        "attn_temperature_tuning": 4,
        "interleave_moe_layer_step": 1,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "max_position_embeddings": 10485760,
        "no_rope_layers": [],
        "num_experts_per_tok": 1,
        "num_hidden_layers": 48,
        "num_local_experts": 16,
        "rope_scaling": {
            "factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3",
        },
        "vocab_size": 202048,
    },
    "vision_config": {"hidden_size": 1408},
}  # fmt: skip
"""The fields of Llama 4 Scout's config.json that differ from the defaults, in an early form."""


class TestLlama4:
    def test_a_checkpoint_with_a_vision_part(self) -> None:
        model = parse_model_config(SCOUT, "config.json")
        assert model.moe == MoeConfig(
            num_experts=16, num_experts_per_token=1, intermediate_size=8192, layers=[*range(48)], renormalise=False,
            shared_width=8192, scales_inputs=True,
        )  # fmt: skip
        assert (model.intermediate_size, model.head_dim, model.qk_norm, model.interleaved_rope) == (
            16384, 128, "unit", True,
        )  # fmt: skip
        assert model.no_rope_layers == [*range(3, 48, 4)] and model.query_scale == QueryScale(interval=8192, weight=0.1)
        assert model.chunks == [8192, 8192, 8192, 0] * 12 and model.rope.kind == "llama3"

    @pytest.mark.parametrize(
        ("changes", "settings"),
        [
            ({"attention_chunk_size": None}, {"chunks": []}),
            ({"attention_chunk_size": 512}, {"chunks": []}),
            ({"attention_chunk_size": 64, "no_rope_layers": [1, 0, 1, 1, 1, 0]}, {"chunks": [64, 0, 64, 64, 64, 0]}),
            ({"attention_chunk_size": 64, "layer_types": ["full_attention"] * 6}, {"chunks": []}),
            ({"use_qk_norm": False, "attn_temperature_tuning": False}, {"qk_norm": "", "query_scale": None}),
            ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}, "use_qk_norm": False}, {"qk_norm": ""}),
        ],
    )
    def test_switches(self, changes: dict[str, Any], settings: dict[str, Any]) -> None:
        model = parse("Llama4ForCausalLM", **changes)
        assert {name: getattr(model, name) for name in settings} == settings

    def test_layers_with_experts(self) -> None:
        def layers(**changes: Any) -> list[int]:
            moe = parse("Llama4ForCausalLM", **changes).moe
            assert moe is not None
            return moe.layers

        assert layers(interleave_moe_layer_step=2) == [1, 3, 5]
        assert layers(interleave_moe_layer_step=2, moe_layers=[4, 0]) == [0, 4]
        assert parse("Llama4ForCausalLM", moe_layers=[]).moe is None

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"attention_chunk_size": 0}, "attention_chunk_size must be an integer from 1 to"),
            ({"floor_scale": 0.5}, "floor_scale must be an integer from 1 to"),
            ({"attn_scale": "much"}, "attn_scale must be a positive number"),
            ({"attn_temperature_tuning": "on"}, "attn_temperature_tuning must be true or false"),
            ({"layer_types": ["sliding_attention"] * 6}, "layer_types 'sliding_attention' is not supported"),
            ({"moe_layers": [6]}, "moe_layers must be a list of integers from 0 to 5"),
            ({"no_rope_layers": [1]}, "no_rope_layers must have an entry for each of 6 layers"),
            (
                {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
                "use_qk_norm is not supported with rope type yarn",
            ),
        ],
    )
    def test_what_does_not_fit_is_named(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message) as refusal:
            parse("Llama4ForCausalLM", **changes)
        assert str(refusal.value).startswith("config.json: ") and "\n" not in str(refusal.value)


class TestGroups:
    def test_one_layer_type_is_one_group(self) -> None:
        assert [(g.kind, g.window, len(g.layers)) for g in _groups(parse("LlamaForCausalLM"))] == [
            ("full_attention", 0, 6)
        ]
        assert [(g.kind, g.window, len(g.layers)) for g in _groups(parse("MistralForCausalLM", sliding_window=64))] == [
            ("sliding_window", 64, 6)
        ]

    def test_frequent_layer_type_is_split(self) -> None:
        groups = _groups(parse("Gemma3ForCausalLM", num_hidden_layers=26, sliding_window=64))
        assert [len(g.layers) for g in groups] == [4, 4, 4, 4, 4, 4, 2]
        assert [g.kind for g in groups] == ["full_attention"] + ["sliding_window"] * 6
        assert groups[0].layers == [5, 11, 17, 23]

    def test_similar_layer_counts_make_one_group_each(self) -> None:
        types = ["full_attention"] * 2 + ["sliding_attention"] * 3
        model = parse("Gemma2ForCausalLM", num_hidden_layers=5, layer_types=types, sliding_window=64)
        assert [g.layers for g in _groups(model)] == [[0, 1], [2, 3, 4]]

    @given(st.data())
    def test_each_layer_with_a_cache_is_in_one_group(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, 40))
        types = data.draw(st.lists(st.sampled_from(["full", "sliding"]), min_size=count, max_size=count))
        shared = data.draw(st.integers(0, count - 1))
        names = [f"{name}_attention" for name in types]
        owners = count - shared
        fits = all(name in names[:owners] for name in names[owners:])
        raw = {"num_hidden_layers": count, "layer_types": names, "num_kv_shared_layers": shared, "sliding_window": 64}
        if not fits:
            with pytest.raises(ConfigError, match="num_kv_shared_layers"):
                parse("Gemma3ForCausalLM", **raw)
            return
        model = parse("Gemma3ForCausalLM", **raw)
        groups = _groups(model)
        assert sorted(layer for g in groups for layer in g.layers) == list(range(owners))
        for group in groups:
            assert {model.window(layer) for layer in group.layers} == {group.window}
        for layer in range(count):
            source = model.cache_source(layer)
            assert source == layer if layer < owners else source < owners
            assert model.window(source) == model.window(layer)
            assert types[source] == types[layer]
        sizes = [len(g.layers) for g in groups]
        # Waste of smaller groups: less than one group of layers per type, or half if the counts are similar.
        assert max(sizes) * len(sizes) <= 1.5 * owners or max(sizes) * len(sizes) - owners < 2 * max(sizes)


def _groups(model: ModelConfig) -> Any:
    return kv_layout(model, 16, "float32").groups
