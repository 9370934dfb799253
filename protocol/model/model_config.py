"""A checkpoint's ``config.json``, read once and checked, for every process.

Field names differ between transformers 4 and 5 (``rope_theta`` and ``rope_scaling`` against ``rope_parameters``,
``torch_dtype`` against ``dtype``); both are read. ``families.py`` has the differences between families.
"""

import math
from pathlib import Path
from typing import Any, Literal

import msgspec

from quire.protocol.errors import ConfigError, printable
from quire.protocol.model.checkpoint_links import check_links
from quire.protocol.model.chunked_config import QueryScale, parse_chunked
from quire.protocol.model.config_fields import Fields, read_json, token_ids
from quire.protocol.model.encoder_config import (
    ACTIVATIONS,
    ENCODERS,
    EncoderConfig,
    encoder_settings,
)
from quire.protocol.model.families import (
    FAMILIES,
    Family,
    Head,
    cache_sources,
    family_of,
    layer_types,
    layer_windows,
    rotation_free,
)
from quire.protocol.model.gguf_file import is_gguf, read_gguf
from quire.protocol.model.gguf_model import end_tokens, model_settings
from quire.protocol.model.latent_config import LatentConfig, parse_latent
from quire.protocol.model.measured_config import MeasuredConfig, measured_settings
from quire.protocol.model.pooling_config import PoolingConfig
from quire.protocol.model.pooling_files import read_pooling, scores_by_tokens
from quire.protocol.model.quantisation import parse_quantisation, quant_method
from quire.protocol.model.rope_config import RopeConfig, parse_ropes, yarn_factor
from quire.protocol.model.vision_config import VISION_FAMILIES, VisionConfig, read_vision, text_settings
from quire.protocol.model.weight_format import WeightFormat

SUPPORTED_ARCHITECTURES = (*FAMILIES, *ENCODERS)
DTYPES = ("bfloat16", "float16", "float32")
_ACTIVATIONS = ("silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh")


class MoeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Feed-forward layers that route each token to a few experts.

    Attributes:
        intermediate_size: width of one expert.
        layers: indices of the layers with experts; the others are dense.
        renormalise: the weights of the selected experts add up to 1: the softmax is over their scores only.
        bias: the router and the experts' projections have biases.
        activation: as in ``ModelConfig``, or swiglu_oai (gpt-oss).
        mxfp4: the checkpoint stores the experts in blocks of 32 four-bit numbers.
        sigmoid: scores are sigmoids, to which the checkpoint has a bias for the choice alone; otherwise softmaxes.
        num_groups, top_groups: equal groups of experts, and those with the best experts, of which experts are chosen.
        scaling_factor: factor on the weights of the selected experts.
        shared_width: width of a dense layer beside the experts, for all tokens; 0: none.
        scales_inputs: experts are chosen by their scores, whose sigmoids multiply the experts' inputs, not the outputs.
    """

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    layers: list[int]
    renormalise: bool = True
    bias: bool = False
    activation: str = "silu"
    mxfp4: bool = False
    sigmoid: bool = False
    num_groups: int = 1
    top_groups: int = 1
    scaling_factor: float = 1.0
    shared_width: int = 0
    scales_inputs: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether experts are chosen by their softmaxes alone."""
        return not (self.sigmoid or self.scales_inputs) and self.num_groups == 1 and self.scaling_factor == 1.0

    def divides_among(self, ranks: int) -> bool:
        """Whether ranks can share the experts' width: evenly, or in MXFP4 in whole blocks, one or more each."""
        if self.shared_width % ranks:
            return False
        return self.intermediate_size // 32 >= ranks if self.mxfp4 else self.intermediate_size % ranks == 0


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a model as scheduler, worker and front end need it, without weights.

    Attributes:
        architecture: name of the causal language model of the family, also if the checkpoint has another head.
        rope: rotary embedding of all layers except ``local_rope_layers``, which use ``local_rope``, and
            ``no_rope_layers``.
        qk_norm: normalisation of queries and keys: per head, over the projection's whole width, per head without a
            weight in the layers with rotary embedding (unit), or none.
        activation: silu, gelu or gelu_tanh.
        norms: position of the norms: before each sublayer, after it (before the residual sum), or both.
        norm_offset: offset added to stored norm weights.
        attention_scale: factor on the scores; None: ``head_dim ** -0.5``.
        attention_soft_cap, final_soft_cap: caps of scores and logits, ``cap * tanh(x / cap)``; 0: none.
        logits_scaling: divisor of the logits.
        attention_sinks: each head has a learnt score without a value (gpt-oss).
        windows: per layer, the tokens that a token attends to, itself included; 0: all. Empty: all in every layer.
        kv_shapes: per layer, the numbers of KV heads and of dimensions of each head. Empty: ``num_kv_heads`` and
            ``head_dim`` in every layer.
        cache_sources: per layer, the layer that owns the KV cache it reads. A layer writes only its own. Empty: each
            reads its own.
        fp8_kv_cache: the checkpoint is meant for an fp8 KV cache, and may have its scales.
        weight_format: format of the linear layers, if they are quantised; ``checkpoint.with_stored_format`` completes
            it from the files.
        generates: it has a head for tokens, so that requests may sample.
        pooling: how it makes vectors and scores; None: it does not.
        norm_names: a layer's norms in the checkpoint, without ``.weight``: before and after attention, before and after
            the MLP; "" where there is none. Empty: as Llama names them, or with other ``norms`` Gemma 2.
        interleaved_rope: neighbouring dimensions of queries and keys rotate with each other, not those of two halves.
        encoder: what makes it an encoder, whose tokens attend to all tokens of their prompt, so that it keeps no KV;
            None: a decoder.
        transformers: the class of transformers that computes it; None: Quire's own decoder or encoder.
        latent: its attention is over latents, one per token, of ``head_dim`` numbers and one KV head; None: over keys
            and values.
        extra_layers: layers after the last one, which predict further tokens and are not read.
        vision: what its vision tower means for prompts; None: it reads text only.
        unread_vision: the checkpoint has a vision part that is not loaded.
        chunks: per layer without a window, the tokens of a chunk: a token attends to none before the beginning of its
            chunk (Llama 4); 0: none. Empty: none in any layer.
        query_scale: scales the queries of ``no_rope_layers`` by their positions; None: nothing does.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    max_position: int = 2048
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: Literal["", "head", "width", "unit"] = ""
    dtype: str = "bfloat16"
    eos_token_ids: list[int] = []
    local_rope: RopeConfig | None = None
    local_rope_layers: list[int] = []
    no_rope_layers: list[int] = []
    activation: str = "silu"
    norms: Literal["before", "after", "both"] = "before"
    norm_offset: float = 0.0
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_scale: float | None = None
    attention_soft_cap: float = 0.0
    final_soft_cap: float = 0.0
    logits_scaling: float = 1.0
    attention_sinks: bool = False
    windows: list[int] = []
    cache_sources: list[int] = []
    moe: MoeConfig | None = None
    fp8_kv_cache: bool = False
    kv_shapes: list[tuple[int, int]] = []
    weight_format: WeightFormat | None = None
    generates: bool = True
    pooling: PoolingConfig | None = None
    encoder: EncoderConfig | None = None
    norm_names: list[str] = []
    interleaved_rope: bool = False
    transformers: MeasuredConfig | None = None
    latent: LatentConfig | None = None
    extra_layers: int = 0
    vision: VisionConfig | None = None
    unread_vision: bool = False
    chunks: list[int] = []
    query_scale: QueryScale | None = None

    @property
    def implementation(self) -> str:
        """What computes the model, for people: ``native``, or ``transformers`` with its version."""
        return "native" if self.transformers is None else f"transformers {self.transformers.version}"

    @property
    def has_states(self) -> bool:
        """Whether some layers keep recurrent states."""
        return self.transformers is not None and bool(self.transformers.states)

    def window(self, layer: int) -> int:
        return self.windows[layer] if self.windows else 0

    def chunk(self, layer: int) -> int:
        return self.chunks[layer] if self.chunks else 0

    def kv_shape(self, layer: int) -> tuple[int, int]:
        """Return a layer's number of KV heads and their dimension, which its queries have too."""
        return self.kv_shapes[layer] if self.kv_shapes else (self.num_kv_heads, self.head_dim)

    @property
    def all_kv_shapes(self) -> list[tuple[int, int]]:
        """The distinct shapes of all layers."""
        return sorted({self.kv_shape(layer) for layer in range(self.num_layers)})

    def cache_source(self, layer: int) -> int:
        return self.cache_sources[layer] if self.cache_sources else layer


def load_model_config(folder: Path, measured: MeasuredConfig | None = None) -> ModelConfig:
    """Read ``config.json``, and ``generation_config.json`` for further end-of-text tokens, of a checkpoint directory.

    Args:
        measured: layout of the class of transformers that is to compute it; None: Quire's own code.

    Raises:
        ConfigError: one line that names the file and the problem.
    """
    if is_gguf(folder):
        return _gguf_config(folder)
    path = config_file(folder)
    raw = read_json(path)
    eos = token_ids(raw.get("eos_token_id"), f"{path}: eos_token_id")
    if isinstance(raw.get("text_config"), dict):
        eos += token_ids(raw["text_config"].get("eos_token_id"), f"{path}: text_config.eos_token_id")
    generation = folder / "generation_config.json"
    if generation.is_file():
        eos += token_ids(read_json(generation).get("eos_token_id"), f"{generation}: eos_token_id")
    if measured is None:
        config = parse_model_config(raw, str(path), eos)
    else:
        config = _measured_config(raw, str(path), eos, measured)
    if eos and max(eos) >= config.vocab_size:
        raise ConfigError(f"{path}: eos_token_id {max(eos)} is not in a vocabulary of {config.vocab_size}")
    pooling = read_pooling(folder, raw, config)
    return config if pooling is None else msgspec.structs.replace(config, pooling=pooling)


def config_file(folder: Path) -> Path:
    """Return the path of a checkpoint's ``config.json``.

    Raises:
        ConfigError: it does not exist, or a file of the folder is a link that leads out of it.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder with a checkpoint")
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"{folder} is not a checkpoint: config.json not found")
    check_links(folder)
    return path


def named_architecture(raw: dict[str, Any]) -> str:
    """Return the class that ``config.json`` names first, or ""."""
    named = raw.get("architectures")
    return named[0] if isinstance(named, list) and named and isinstance(named[0], str) else ""


def is_native(architecture: str) -> bool:
    """Whether Quire has code of its own for an architecture, with any head."""
    return architecture in VISION_FAMILIES or family_of(architecture)[0] in SUPPORTED_ARCHITECTURES


def _measured_config(raw: dict[str, Any], where: str, eos: list[int], measured: MeasuredConfig) -> ModelConfig:
    inner = raw.get("text_config")
    own = {name: value for name, value in raw.items() if value is not None}
    fields = Fields({**(inner if isinstance(inner, dict) else {}), **own}, where)
    dtype, architecture = _dtype(fields), named_architecture(raw)
    settings = measured_settings(measured)
    form, fp8_kv_cache = parse_quantisation(raw, architecture, where)
    settings |= {"weight_format": form, "fp8_kv_cache": fp8_kv_cache}
    return ModelConfig(architecture=architecture, dtype=dtype, eos_token_ids=sorted(set(eos)), **settings)


def _gguf_config(path: Path) -> ModelConfig:
    file = read_gguf(path)
    eos = end_tokens(file)
    config = parse_model_config(model_settings(file), str(path), eos)
    if eos and max(eos) >= config.vocab_size:
        raise ConfigError(
            f"{path}: tokenizer.ggml.eos_token_id {max(eos)} is not in a vocabulary of {config.vocab_size}"
        )
    # The offset is added already in such a file.
    return msgspec.structs.replace(config, norm_offset=0.0)


def parse_model_config(raw: dict[str, Any], where: str, eos_token_ids: list[int] | None = None) -> ModelConfig:
    """Return a ModelConfig from the decoded ``config.json``; ``where`` is the prefix of every error.

    Raises:
        ConfigError: unsupported architecture or feature, or a field is missing, of a wrong type or out of range.
    """
    architecture, head = _architecture(raw, where)
    if architecture in ENCODERS:
        dtype, eos = _dtype(Fields(raw, where)), sorted(set(eos_token_ids or []))
        return ModelConfig(**encoder_settings(raw, architecture, where), dtype=dtype, eos_token_ids=eos)
    family = FAMILIES[architecture]
    weight_format, fp8_kv_cache = parse_quantisation(raw, architecture, where)
    field, named = _merged(raw, family, where), named_architecture(raw)
    vision = read_vision(raw, named, field)
    if field.raw.get("use_bidirectional_attention"):
        raise ConfigError(f"{where}: use_bidirectional_attention is not supported")
    if not field.flag("is_causal", default=True):
        raise ConfigError(f"{where}: is_causal false (attention in both directions) is not supported for decoders")
    if field.has("clip_qkv"):
        raise ConfigError(f"{where}: clip_qkv is not supported: it must be null")
    hidden, heads = field.size("hidden_size"), field.size("num_attention_heads")
    num_layers = field.size("num_hidden_layers", high=4096)
    latent = parse_latent(field, heads) if family.latent else None
    own, whole = _kv_shapes(field, hidden, heads) if latent is None else ((1, latent.width),) * 2
    kv_heads, head_dim = own
    max_position = field.size("max_position_embeddings", default=2048, high=2**31 - 1)
    rotated = (whole[1], head_dim) if latent is None else (latent.rope_dim,) * 2
    rope, local_rope = parse_ropes(field, *rotated, max_position)
    types = layer_types(family, field, num_layers)
    bias = field.flag("attention_bias")
    moe = _moe(field, num_layers, architecture, family) if family.experts else None
    return ModelConfig(
        architecture=architecture,
        vocab_size=field.size("vocab_size", high=2**24),
        hidden_size=hidden,
        intermediate_size=field.size("intermediate_size"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=field.number("rms_norm_eps", 1e-6),
        rope=rope,
        local_rope=local_rope,
        local_rope_layers=[i for i, name in enumerate(types) if local_rope and name == "sliding_attention"],
        no_rope_layers=rotation_free(family, field, types),
        max_position=max_position,
        tie_word_embeddings=field.flag("tie_word_embeddings"),
        qkv_bias=bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=field.flag("attention_out_bias", bias) if family.o_bias is None else family.o_bias,
        mlp_bias=field.flag("mlp_bias"),
        dtype=_dtype(field),
        eos_token_ids=sorted(set(eos_token_ids or [])),
        windows=_unless_trivial(layer_windows(family, field, types, max_position)),
        cache_sources=cache_sources(field, types),
        moe=moe if moe is not None and moe.layers else None,
        fp8_kv_cache=fp8_kv_cache,
        weight_format=weight_format,
        kv_shapes=[] if whole == own else [own if name == "sliding_attention" else whole for name in types],
        generates=head == "tokens",
        extra_layers=field.size("num_nextn_predict_layers", default=0, low=0, high=64) if family.gate else 0,
        vision=vision,
        unread_vision=named in VISION_FAMILIES and vision is None,
        **_scales(field, family, hidden)
        | ({} if latent is None else _latent_settings(field, latent, rope))
        | (parse_chunked(field, types, rope, max_position) if family.chunked else {})
        | dict(family.model_settings),
    )


def _architecture(raw: dict[str, Any], where: str) -> tuple[str, Head]:
    """Return the causal language model of the family, and the head that the checkpoint has."""
    named = raw.get("architectures")
    architecture = named[0] if isinstance(named, list) and named else None
    if isinstance(architecture, str) and architecture in VISION_FAMILIES:
        return text_settings(raw, architecture, where)[0], "tokens"
    name, head = family_of(architecture) if isinstance(architecture, str) else ("", "tokens")
    if name not in SUPPORTED_ARCHITECTURES:
        raise ConfigError(
            f"{where}: architecture {printable(architecture)} is not supported by Quire's own code{_own_code(raw)}: "
            f"docs/models.md has the list; --model-impl transformers serves most others"
        )
    return name, "tokens" if scores_by_tokens(raw) else head


def _own_code(raw: dict[str, Any]) -> str:
    """Extend the error for an unsupported architecture if the checkpoint has code of its own."""
    return " (code named by auto_map is never run)" if raw.get("auto_map") else ""


def _merged(raw: dict[str, Any], family: Family, where: str) -> Fields:
    """Overlay the decoder's own fields on those beside it, and both on the family's defaults, under the names that
    other families have for them. A null is kept: it means none.
    """
    nested: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    if (named := named_architecture(raw)) in VISION_FAMILIES:
        _, defaults, nested = text_settings(raw, named, where)
    own = {name: value for name, value in nested.items() if value is not None or name not in raw}
    merged = {**family.defaults, **defaults, **raw, **own}
    return Fields(merged | {ours: merged[name] for ours, name in family.fields.items() if name in merged}, where)


def _kv_shapes(field: Fields, hidden: int, heads: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the KV heads and their dimension in layers with a window, and in the others."""
    if not field.has("head_dim") and hidden % heads:
        raise ConfigError(f"{field.where}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    own = _kv_shape(field, heads, ("num_key_value_heads", heads), ("head_dim", max(hidden // heads, 1)))
    return own, _kv_shape(field, heads, ("num_global_key_value_heads", own[0]), ("global_head_dim", own[1]))


def _latent_settings(field: Fields, latent: LatentConfig, rope: RopeConfig) -> dict[str, Any]:
    """Return what latent attention adds. DeepSeek scales the scores where yarn scales cosines and sines elsewhere."""
    scaling = field.part("rope_parameters" if field.has("rope_parameters") else "rope_scaling")
    stretched = rope.kind != "default" and scaling.raw.get("mscale_all_dim")
    factor = yarn_factor(rope.factor, scaling.number("mscale_all_dim", 1.0)) if stretched else 1.0
    return {
        "latent": latent,
        "attention_scale": latent.key_dim**-0.5 * factor**2,
        "interleaved_rope": field.flag("rope_interleave"),
    }


def _kv_shape(field: Fields, heads: int, count: tuple[str, int], dim: tuple[str, int]) -> tuple[int, int]:
    """Return the number of KV heads and their dimension, from the fields with these names and defaults."""
    kv_heads, head_dim = field.size(count[0], default=count[1]), field.size(dim[0], default=dim[1], high=1024)
    if heads % kv_heads:
        raise ConfigError(f"{field.where}: num_attention_heads {heads} is not a multiple of {count[0]} {kv_heads}")
    if head_dim % 2:
        raise ConfigError(f"{field.where}: {dim[0]} {head_dim} must be even")
    return kv_heads, head_dim


def _dtype(field: Fields) -> str:
    return field.choice("dtype", field.raw.get("dtype") or field.raw.get("torch_dtype") or "float32", DTYPES)


def _activation(field: Fields) -> str:
    # The first Gemma configs have hidden_act gelu, but were trained with the function of hidden_activation.
    name = "hidden_activation" if field.has("hidden_activation") else "hidden_act"
    return ACTIVATIONS[field.choice(name, field.raw.get(name) or "silu", _ACTIVATIONS)]


def _scales(field: Fields, family: Family, hidden: int) -> dict[str, Any]:
    """Return multipliers, caps and the activation."""
    scalar = field.optional_number("query_pre_attn_scalar")
    scale = field.optional_number("attention_multiplier")
    depth, width = field.optional_number("scale_depth"), field.optional_number("dim_model_base")  # MiniCPM
    return {
        "qk_norm": "head" if field.flag("use_qk_norm") else "",
        "activation": _activation(field),
        "attention_scale": scalar**-0.5 if scalar else scale,
        "attention_soft_cap": field.optional_number("attn_logit_softcapping") or 0.0,
        "final_soft_cap": field.optional_number("final_logit_softcapping") or 0.0,
        "embedding_multiplier": math.sqrt(hidden)
        if family.scaled_embedding
        else field.number("embedding_multiplier", 1.0),
        "residual_multiplier": depth / math.sqrt(field.size("num_hidden_layers"))
        if depth
        else field.number("residual_multiplier", 1.0),
        "logits_scaling": hidden / width if width else field.number("logits_scaling", 1.0),
    }


def _moe(field: Fields, num_layers: int, architecture: str, family: Family) -> MoeConfig:
    names = ("num_experts", "num_local_experts")
    count = field.size(names[0] if field.has(names[0]) else names[1], high=2**16)
    chosen = field.size("num_experts_per_tok", high=count)
    dense = _dense_layers(field, num_layers)
    step = field.size("decoder_sparse_step", default=1)
    gpt_oss = architecture == "GptOssForCausalLM"
    if gpt_oss and (field.number("swiglu_alpha", 1.702), field.number("swiglu_limit", 7.0)) != (1.702, 7.0):
        raise ConfigError(
            f"{field.where}: swiglu_alpha and swiglu_limit must be 1.702 and 7: the kernels support no other values"
        )
    return MoeConfig(
        num_experts=count,
        num_experts_per_token=chosen,
        intermediate_size=field.size("moe_intermediate_size", default=field.size("intermediate_size")),
        layers=[layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0]
        if family.gate != "inputs" or not field.has("moe_layers")
        else sorted(set(field.integers("moe_layers", high=num_layers - 1))),
        renormalise=field.flag("norm_topk_prob", default=True),
        bias=gpt_oss,
        activation="swiglu_oai" if gpt_oss else _activation(field),
        mxfp4=gpt_oss and quant_method(field.raw) == "mxfp4",
        **_gate(field, family, count, chosen),
    )


def _dense_layers(field: Fields, num_layers: int) -> set[int]:
    if field.size("moe_layer_freq", default=1) != 1:
        raise ConfigError(f"{field.where}: moe_layer_freq must be 1: only first_k_dense_replace layers may be dense")
    types = field.raw.get("mlp_layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != num_layers:
            raise ConfigError(f"{field.where}: mlp_layer_types must be a list of {num_layers} names")
        known = [field.choice("mlp_layer_types", name, ("dense", "sparse")) for name in types]
        return {layer for layer, name in enumerate(known) if name == "dense"}
    first = min(field.size("first_k_dense_replace", default=0, low=0), num_layers)
    return {*range(first), *field.integers("mlp_only_layers", high=num_layers - 1)}


def _gate(field: Fields, family: Family, count: int, chosen: int) -> dict[str, Any]:
    """Return how experts are chosen, and the width of the dense layer beside them."""
    if not family.gate:
        return {}
    if family.gate == "inputs":
        return {"scales_inputs": True, "shared_width": field.size("moe_intermediate_size")}
    field.choice("scoring_func", field.raw.get("scoring_func") or family.gate, (family.gate,))
    grouped = family.gate == "sigmoid"
    if not grouped:
        methods = ("greedy", "group_limited_greedy")
        grouped = field.choice("topk_method", field.raw.get("topk_method") or "greedy", methods) != "greedy"
        if field.flag("norm_topk_prob"):
            raise ConfigError(f"{field.where}: norm_topk_prob must be false with scoring_func softmax")
    groups = field.size("n_group", default=1, high=count) if grouped else 1
    best = field.size("topk_group", default=1, high=groups) if grouped else 1
    size = count // groups
    if count % groups or chosen > best * size or (family.gate == "sigmoid" and size < 2):
        raise ConfigError(
            f"{field.where}: n_group {groups} and topk_group {best} must divide {count} experts into equal groups of "
            f"two or more, and leave at least num_experts_per_tok ({chosen})"
        )
    shared = field.size("n_shared_experts", default=0, low=0, high=count)
    return {
        "sigmoid": family.gate == "sigmoid",
        "num_groups": groups,
        "top_groups": best,
        "scaling_factor": field.number("routed_scaling_factor", 1.0),
        "shared_width": shared * field.size("moe_intermediate_size") if shared else 0,
    }


def _unless_trivial(windows: list[int]) -> list[int]:
    return windows if any(windows) else []
