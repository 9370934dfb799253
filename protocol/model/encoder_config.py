"""Encoders: BERT, RoBERTa, XLM-RoBERTa and ModernBERT. Their ``config.json``, and the names of their tensors."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from quire.protocol.errors import ConfigError, printable
from quire.protocol.model.config_fields import Fields
from quire.protocol.model.rope_config import parse_ropes

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}
"""Activation names in ``config.json`` → names in ``worker_proc/models/linear.py``."""
GATED_ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "silu", "swish")
"""Those of gated layers (``Ops.gate``)."""

_BERT = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
}
_ROBERTA = _BERT | {"pad_token_id": 1}
_MODERN = {
    "vocab_size": 50368,
    "hidden_size": 768,
    "num_hidden_layers": 22,
    "num_attention_heads": 12,
    "intermediate_size": 1152,
    "max_position_embeddings": 8192,
}
ENCODERS: Mapping[str, Mapping[str, Any]] = {
    "BertModel": _BERT,
    "RobertaModel": _ROBERTA,
    "XLMRobertaModel": _ROBERTA,
    "ModernBertModel": _MODERN,
}
"""Supported encoders, with the defaults of the fields that a ``config.json`` may omit."""

LAYER_TYPES = ("full_attention", "sliding_attention")

Classifier = Literal["bert", "roberta", "modernbert"]

_KINDS: Mapping[str, Classifier] = {"BertModel": "bert", "RobertaModel": "roberta", "XLMRobertaModel": "roberta"}

_TENSOR_NAMES = (
    ("model.bert.", "model."),
    ("model.roberta.", "model."),
    ("model.embeddings.word_embeddings.", "model.embed_tokens."),
    ("model.embeddings.tok_embeddings.", "model.embed_tokens."),
    ("model.embeddings.LayerNorm.", "model.embeddings.norm."),
    ("model.encoder.layer.", "model.layers."),
    (".attention.self.query.", ".self_attn.q_proj."),
    (".attention.self.key.", ".self_attn.k_proj."),
    (".attention.self.value.", ".self_attn.v_proj."),
    (".attention.output.dense.", ".self_attn.o_proj."),
    (".attention.output.LayerNorm.", ".attn_norm."),
    (".intermediate.dense.", ".mlp.up_proj."),
    (".output.dense.", ".mlp.down_proj."),
    (".output.LayerNorm.", ".mlp_norm."),
    (".attn.Wqkv.", ".self_attn.qkv_proj."),
    (".attn.Wo.", ".self_attn.o_proj."),
    (".mlp.Wi.", ".mlp.gate_up_proj."),
    (".mlp.Wo.", ".mlp.down_proj."),
    ("norm.gamma", "norm.weight"),
    ("norm.beta", "norm.bias"),
)
_UNREAD = (
    "model.pooler.",
    "model.cls.",
    "model.lm_head.",
    "model.head.",
    "model.decoder.",
    "model.embeddings.position_ids",
)


class EncoderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What an encoder has besides the shape that it shares with decoders.

    Attributes:
        kind: the head of a classification: dense, tanh and a product (bert, roberta), or dense, activation, norm and a
            product (modernbert). It also decides the names of its tensors.
        norms_before: norms are before each sublayer, and one follows the last layer; otherwise after each residual sum.
        norm_bias: norms have biases.
        gated: the feed-forward layer multiplies the activation of one half of its first product by the other half.
        position_rows: rows of the table of learnt positions; 0: positions are rotary embeddings.
        first_position: the row of a text's first token.
        token_types: rows of the table of token types; 0: there is none.
        reach: per layer, the tokens on each side that a token attends to; 0: all.
        classifier_pooling: what a classification is made of: the hidden state of the first token, or the mean of all.
        classifier_activation, classifier_bias: of the dense layer of a classification.
    """

    kind: Classifier
    norm_eps: float
    norms_before: bool = False
    norm_bias: bool = True
    gated: bool = False
    position_rows: int = 0
    first_position: int = 0
    token_types: int = 0
    reach: list[int]
    classifier_pooling: Literal["cls", "mean"] = "cls"
    classifier_activation: str = "tanh"
    classifier_bias: bool = True


def encoder_settings(raw: dict[str, Any], architecture: str, where: str) -> dict[str, Any]:
    """Return the fields of ModelConfig of an encoder; ``where`` is the prefix of every error.

    Raises:
        ConfigError: an unsupported setting, or a field is missing, of a wrong type or out of range.
    """
    given = {name: value for name, value in raw.items() if value is not None}
    field = Fields({**ENCODERS[architecture], **given}, where)
    for name in ("is_decoder", "add_cross_attention", "is_encoder_decoder"):
        if field.flag(name):
            raise ConfigError(f"{where}: {name} true is not supported for {architecture}: only encoders are")
    if field.has("quantization_config"):
        raise ConfigError(f"{where}: quantization_config is not supported for {architecture}: use an unquantised model")
    hidden, heads = field.size("hidden_size"), field.size("num_attention_heads")
    if hidden % heads:
        raise ConfigError(f"{where}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    shape = {
        "architecture": architecture,
        "vocab_size": field.size("vocab_size", high=2**24),
        "hidden_size": hidden,
        "intermediate_size": field.size("intermediate_size"),
        "num_layers": field.size("num_hidden_layers", high=4096),
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": hidden // heads,
        "generates": False,
    }
    of_kind = _modernbert if architecture not in _KINDS else _bert
    return shape | of_kind(field, shape)


def _bert(field: Fields, shape: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of BERT and RoBERTa, whose positions begin after that of the padding token."""
    kind = _KINDS[shape["architecture"]]
    field.choice("position_embedding_type", field.raw.get("position_embedding_type", "absolute"), ("absolute",))
    rows = field.size("max_position_embeddings", high=2**31 - 1)
    first = 1 + field.size("pad_token_id", low=0, high=shape["vocab_size"] - 1) if kind == "roberta" else 0
    if rows < first + 2:
        raise ConfigError(
            f"{field.where}: max_position_embeddings must be at least {first + 2}, because the first token of a text "
            f"has position {first} (got {rows})"
        )
    encoder = EncoderConfig(
        kind=kind,
        norm_eps=field.number("layer_norm_eps", 1e-12),
        position_rows=rows,
        first_position=first,
        token_types=field.size("type_vocab_size"),
        reach=[0] * shape["num_layers"],
    )
    return {
        "max_position": rows - first,
        "activation": _activation(field, "hidden_act", tuple(ACTIVATIONS)),
        "qkv_bias": True,
        "o_bias": True,
        "mlp_bias": True,
        "encoder": encoder,
    }


def _modernbert(field: Fields, shape: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of ModernBERT, in which only some layers attend to all tokens."""
    layers, head_dim = shape["num_layers"], shape["head_dim"]
    if head_dim % 2:
        raise ConfigError(f"{field.where}: hidden_size / num_attention_heads must be even (got {head_dim})")
    rows = field.size("max_position_embeddings", high=2**31 - 1, low=2)
    every = field.size("global_attn_every_n_layers", default=3)
    default = ["sliding_attention" if layer % every else "full_attention" for layer in range(layers)]
    types = field.raw.get("layer_types", default)
    if not isinstance(types, list) or len(types) != layers or any(name not in LAYER_TYPES for name in types):
        raise ConfigError(
            f"{field.where}: layer_types must have full_attention or sliding_attention for each of the {layers} layers"
        )
    local = [layer for layer, name in enumerate(types) if name == "sliding_attention"]
    window = field.size("local_attention", default=128, low=2) // 2
    rope, local_rope = parse_ropes(_with_ropes(field), head_dim, head_dim, rows)
    bias = field.flag("attention_bias")
    encoder = EncoderConfig(
        kind="modernbert",
        norm_eps=field.number("norm_eps", 1e-5),
        norms_before=True,
        norm_bias=field.flag("norm_bias"),
        gated=True,
        reach=[window if layer in local else 0 for layer in range(layers)],
        classifier_pooling="mean" if _classifier_pooling(field) == "mean" else "cls",
        classifier_activation=_activation(field, "classifier_activation", tuple(ACTIVATIONS)),
        classifier_bias=field.flag("classifier_bias"),
    )
    return {
        "max_position": rows,
        "activation": _activation(field, "hidden_activation", GATED_ACTIVATIONS),
        "rope": rope,
        "local_rope": local_rope,
        "local_rope_layers": local if local_rope is not None else [],
        "qkv_bias": bias,
        "o_bias": bias,
        "mlp_bias": field.flag("mlp_bias"),
        "encoder": encoder,
    }


def _classifier_pooling(field: Fields) -> str:
    return field.choice("classifier_pooling", field.raw.get("classifier_pooling", "cls"), ("cls", "mean"))


def _activation(field: Fields, name: str, known: tuple[str, ...]) -> str:
    return ACTIVATIONS[field.choice(name, field.raw.get(name, "gelu"), known)]


def _with_ropes(field: Fields) -> Fields:
    """Return the fields with the rotary embeddings as transformers 5 stores them: one object for each type of layer."""
    given, scaling = field.part("rope_parameters").raw, field.part("rope_scaling").raw
    ropes = {}
    for name, old, theta in (
        ("full_attention", "global_rope_theta", 160_000.0),
        ("sliding_attention", "local_rope_theta", 10_000.0),
    ):
        own = given.get(name) or {}
        if not isinstance(own, dict):
            raise ConfigError(f"{field.where}: rope_parameters.{name} must be an object (got {printable(own)})")
        ropes[name] = {"rope_theta": field.number(old, theta), **scaling, **own}
    return Fields({**field.raw, "rope_parameters": ropes}, field.where)


def decoder_style(name: str) -> str:
    """Return the name that a tensor of an encoder would have in a decoder; other names are returned as they are.

    Args:
        name: a name that begins with ``model.``.
    """
    for old, new in _TENSOR_NAMES:
        name = name.replace(old, new)
    return name


def is_unread_head(name: str) -> bool:
    """Whether a tensor of an encoder's checkpoint may be left out: a head that the architecture does not use."""
    return name.startswith(_UNREAD)
