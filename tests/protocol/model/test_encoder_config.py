"""Encoders' ``config.json``, in the forms in which public checkpoints have it, and the names of their tensors."""

from typing import Any

import pytest

from quire.protocol.errors import ConfigError
from quire.protocol.model.checkpoint import full_name
from quire.protocol.model.encoder_config import EncoderConfig
from quire.protocol.model.kv_layout import kv_layout
from quire.protocol.model.model_config import ModelConfig, parse_model_config

SHAPE = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 128}


def parse(architecture: str, **changes: Any) -> ModelConfig:
    return parse_model_config({"architectures": [architecture]} | SHAPE | changes, "config.json")


def encoder(architecture: str, **changes: Any) -> EncoderConfig:
    found = parse(architecture, **changes).encoder
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("BertModel", "BertModel"),
        ("BertForMaskedLM", "BertModel"),
        ("RobertaForSequenceClassification", "RobertaModel"),
        ("XLMRobertaForMaskedLM", "XLMRobertaModel"),
        ("ModernBertForSequenceClassification", "ModernBertModel"),
    ],
)
def test_an_encoder_keeps_no_kv_and_does_not_generate(architecture: str, name: str) -> None:
    model = parse(architecture)
    assert model.architecture == name and not model.generates
    assert kv_layout(model, 16, "float32").groups == []


def test_positions_of_roberta_begin_after_that_of_the_padding_token() -> None:
    model = parse("XLMRobertaModel", max_position_embeddings=8194, pad_token_id=1, type_vocab_size=1)
    assert model.max_position == 8192
    own = encoder("XLMRobertaModel", max_position_embeddings=8194, pad_token_id=1, type_vocab_size=1)
    assert (own.position_rows, own.first_position, own.token_types) == (8194, 2, 1)
    assert parse("BertModel").max_position == 512 and encoder("BertModel").first_position == 0


def test_modernbert_alternates_reach_and_rope() -> None:
    old = parse("ModernBertModel", global_rope_theta=80000.0, local_rope_theta=5000.0, local_attention=64)
    assert old.encoder is not None and old.encoder.reach == [0, 32, 32, 0]
    assert old.local_rope is not None and (old.rope.theta, old.local_rope.theta) == (80000.0, 5000.0)
    assert old.local_rope_layers == [1, 2]
    ropes = {
        "full_attention": {"rope_type": "default", "rope_theta": 80000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
    }
    types = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    assert parse("ModernBertModel", rope_parameters=ropes, layer_types=types, local_attention=64) == old


@pytest.mark.parametrize(
    ("architecture", "changes", "error"),
    [
        ("BertModel", {"is_decoder": True}, "is_decoder true is not supported"),
        ("BertModel", {"position_embedding_type": "relative_key"}, "position_embedding_type 'relative_key'"),
        ("BertModel", {"hidden_act": "mish"}, "hidden_act 'mish' is not supported; supported: gelu,"),
        ("BertModel", {"num_attention_heads": 7}, "hidden_size 64 is not a multiple of num_attention_heads 7"),
        ("BertModel", {"type_vocab_size": 0}, "type_vocab_size must be an integer from 1"),
        ("BertModel", {"layer_norm_eps": "small"}, "layer_norm_eps must be a positive number"),
        ("BertModel", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config is not supported"),
        (
            "RobertaModel",
            {"max_position_embeddings": 3, "pad_token_id": 1},
            "max_position_embeddings must be at least 4",
        ),
        ("RobertaModel", {"pad_token_id": 99999}, "pad_token_id must be an integer from 0 to 30521"),
        ("ModernBertModel", {"layer_types": ["full_attention"]}, "layer_types must have"),
        ("ModernBertModel", {"layer_types": [["full_attention"]] * 4}, "layer_types must have"),
        ("ModernBertModel", {"classifier_pooling": "max"}, "classifier_pooling 'max' is not supported"),
        ("ModernBertModel", {"hidden_activation": "relu"}, "hidden_activation 'relu' is not supported"),
        ("ModernBertModel", {"rope_parameters": []}, "rope_parameters must be an object"),
        ("ModernBertModel", {"rope_parameters": {"full_attention": 3}}, "rope_parameters.full_attention must be"),
        ("ModernBertModel", {"local_attention": 1}, "local_attention must be an integer from 2"),
        ("ModernBertModel", {"num_attention_heads": 64}, "hidden_size / num_attention_heads must be even"),
    ],
)
def test_an_unsupported_setting_is_named(architecture: str, changes: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(architecture, **changes)
    assert str(caught.value).startswith("config.json: ") and error in str(caught.value)


@pytest.mark.parametrize(
    ("stored", "name"),
    [
        ("bert.embeddings.word_embeddings.weight", "model.embed_tokens.weight"),
        ("embeddings.LayerNorm.gamma", "model.embeddings.norm.weight"),
        ("encoder.layer.11.attention.self.query.bias", "model.layers.11.self_attn.q_proj.bias"),
        ("roberta.encoder.layer.0.attention.output.LayerNorm.beta", "model.layers.0.attn_norm.bias"),
        ("encoder.layer.0.attention.output.dense.weight", "model.layers.0.self_attn.o_proj.weight"),
        ("encoder.layer.0.output.dense.weight", "model.layers.0.mlp.down_proj.weight"),
        ("layers.3.attn.Wqkv.weight", "model.layers.3.self_attn.qkv_proj.weight"),
        ("model.layers.3.mlp.Wi.weight", "model.layers.3.mlp.gate_up_proj.weight"),
        ("classifier.out_proj.weight", "model.classifier.out_proj.weight"),
        ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.q_proj.weight"),
    ],
)
def test_tensors_have_the_names_of_a_decoder(stored: str, name: str) -> None:
    assert full_name(stored) == name
