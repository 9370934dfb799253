"""Tiny random checkpoints of any causal model type of transformers, and transformers' greedy tokens of them."""

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

LAYERS = 4
VOCAB = 128
TRIALS = 12
PROMPT_LENGTHS = (5, 21, 70)
NUM_TOKENS = 8
PROMPT_TOKENS = (3, 100)
"""Bounds of the tokens of prompts. Those below and above are padding, ends, and the ids of images."""

LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers", "encoder_layers")
LAYER_COUNTS += ("num_decoder_layers", "num_encoder_layers", "num_blocks", "depth")

SIZES: dict[str, int] = dict.fromkeys(LAYER_COUNTS, LAYERS) | {
    name: size
    for size, names in {
        4: "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads"
        " encoder_attention_heads num_decoder_attention_heads num_encoder_attention_heads swa_num_attention_heads"
        " linear_num_heads linear_num_value_heads index_n_heads num_query_groups mamba_num_heads"
        " num_experts num_local_experts n_routed_experts moe_num_experts",
        2: "num_key_value_heads num_kv_heads kv_n_heads swa_num_key_value_heads linear_num_key_heads"
        " num_experts_per_tok num_experts_per_token moe_k moe_topk moe_top_k num_global_key_value_heads"
        " num_kv_shared_layers index_topk_blocks",
        1: "n_group topk_group num_expert_group n_shared_experts num_shared_experts n_groups",
        64: "hidden_size d_model n_embd emb_dim embedding_size embedding_dim word_embed_proj_dim input_embedding_size"
        " output_embedding_size attention_hidden_size backbone_hidden_size out_hidden_size vision_output_dim"
        " lru_width hidden_size_global adapter_in_dim adapter_out_dim adapter_input_size",
        16: "head_dim swa_head_dim global_head_dim dim_head d_head kv_channels attention_head_size attention_head_dim"
        " v_head_dim qk_nope_head_dim linear_head_dim linear_key_head_dim linear_value_head_dim index_head_dim"
        " mamba_head_dim mamba_d_head kv_lora_rank ssm_state_size state_size time_step_rank mamba_dt_rank mamba_d_state"
        " sliding_window attention_chunk_size window_size sliding_window_size attention_window_size local_attention"
        " index_topk index_block_size",
        8: "mamba_n_heads o_lora_rank qk_rope_head_dim rotary_dim hidden_size_per_layer_input laurel_rank",
        24: "qk_head_dim q_lora_rank",
        96: "intermediate_size ffn_dim n_inner dff dim_ff feed_forward_size decoder_ffn_dim encoder_ffn_dim"
        " ffn_hidden_size intermediate_size_mlp mlp_dim dense_intermediate_size d_inner",
        32: "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size shared_intermediate_size"
        " shared_experts_intermediate_size moe_shared_expert_intermediate_size router_hidden_size",
        256: "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions model_max_length"
        " context_length encoder_hash_byte_group_vocab",
        VOCAB: "mamba_d_ssm unpadded_vocab_size vocab_size vocab_size_per_layer_input decoder_vocab_size",
    }.items()
    for name in names.split()
}
"""Value of a number in a configuration, by its name, in each configuration that sets it."""

_SHARED = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 0}
_EQUAL_LAYERS = {"per_layer_config": {}, "head_dim": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
_CONVOLUTIONS = {"num_hidden_layers": LAYERS, "layer_types": ["conv", "full_attention"] * 2}
_INDEXER = dict.fromkeys(("indexer_head_dim", "indexer_budget"), 16) | {"indexer_compress_ratio": 4, "head_dim": 16}
_INDEXER |= {"indexer_n_heads": 2, "indexer_kv_heads": 1}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},  # by default it has no attention
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},  # no default
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},  # read there, but without default
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},  # no default
    "dory": {  # it counts attention and MLPs as layers
        "layer_types": ["sliding_attention", "mlp", "full_attention", "mlp"] * 2,
        "num_hidden_layers": 8,
        "n_input_layers": 2,
        "n_recurrent_layers": 4,
        "n_output_layers": 2,
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},  # no default
    "dots3_note": {"text_config": _EQUAL_LAYERS},  # layers by number, of the large model
    "dots3_note_text": _EQUAL_LAYERS,
    "gemma4_assistant": {"text_config": _SHARED},  # the default is invalid
    "gemma4_unified_assistant": {"text_config": _SHARED},
    "granitemoehybrid": {"num_hidden_layers": LAYERS, "layer_types": ["linear_attention", "full_attention"] * 2},
    "hunyuan_v1_dense": {"head_dim": 16},  # no default
    "hunyuan_v1_moe": {"head_dim": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},  # of the first four, none has attention
    "lfm2": _CONVOLUTIONS,  # as in checkpoints; by default it has none
    "lfm2_moe": _CONVOLUTIONS,
    "mamba2": {"num_heads": 8, "head_dim": 16, "hidden_size": 64},  # twice the hidden size
    # As in checkpoints; by default all layers have full attention.
    "minimax_m3_vl_text": {"num_hidden_layers": LAYERS, "layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
    "ministral": {"head_dim": 16},  # no default
    "moshi": {"sliding_window": 256},  # its masks have no window, and its cache would drop keys after 16
    "nemotron": {"num_key_value_heads": 2},  # no default
    "qwen4_exp": {"text_config": _INDEXER},  # no default
    "qwen4_exp_text": _INDEXER,
    "reformer": {"axial_pos_embds_dim": [32, 32], "axial_pos_shape": [16, 16]},  # hidden size and positions
    "xlstm": {"qk_dim_factor": 1.0},  # the shape of its state in the cache of transformers
    "xmod": {"default_language": "en_XX"},  # no default
    "zamba": {"attention_hidden_size": 128, "attention_head_dim": 32},  # twice the hidden size
    "zamba2": {"attention_hidden_size": 128, "attention_head_dim": 32},
    "zaya": {"num_experts_per_tok": 1},  # the only value that it has
}
"""Fields of a type that no rule for all types gives, each with its reason."""


@dataclass(frozen=True)
class Reference:
    """Prompts, and the tokens that transformers' own generate, with its own cache, gives each of them alone."""

    prompts: list[list[int]]
    tokens: list[list[int]]
    margin: float
    """Smallest lead of a chosen token over the next best, in standard deviations of its logits."""

    @property
    def num_distinct(self) -> int:
        return len(set(itertools.chain(*self.tokens)))


def tiny_config(model_type: str, **changes: Any) -> Any:
    """Return the default configuration of a type with small sizes, and each kind of layer that the default has.

    Args:
        changes: fields with other values.
    """
    kind = CONFIG_MAPPING[model_type]
    overrides = OVERRIDES.get(model_type, {})
    small = _small(kind(**overrides).to_dict(), itertools.count(VOCAB - 1, -1))
    for name, value in overrides.items():
        small[name] = small[name] | value if name in small and isinstance(value, dict) else value
    return kind(**(small | changes))


def _small(fields: dict[str, Any], image_ids: "itertools.count[int]") -> dict[str, Any]:
    """Return the fields of a configuration that must change to make it small."""
    num_layers = next((fields[name] for name in LAYER_COUNTS if fields.get(name)), 0)
    small: dict[str, Any] = {}
    for name, value in fields.items():
        if name.endswith("_config") and "model_type" in (value or ()):
            small[name] = {"model_type": value["model_type"]} | _small(value, image_ids)
        elif name == "is_decoder":  # the same classes are encoders without it
            small[name] = True
        elif name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            small[name] = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}[name]
        elif name.endswith(("_token_id", "_token_index")) and isinstance(value, int) and value > PROMPT_TOKENS[0]:
            small[name] = next(image_ids)
        elif isinstance(value, list) and len(value) == num_layers and num_layers:
            one = SIZES.get(name)
            kinds = [one or each for at, each in enumerate(value) if each not in value[:at]]
            small[name] = list(itertools.islice(itertools.cycle(kinds), LAYERS))
        elif name in SIZES and value and type(value) is int:
            small[name] = SIZES[name]
    if "kv_lora_rank" in small:  # of a latent each head has keys of its own, and the rotated part is a head's width
        small |= {name: SIZES[as_] for name, as_ in MLA.items() if name in small}
    return small


STDS = ((0.25, 0.25), (0.5, 0.5), (0.25, 0.03))
"""Standard deviations of matrices and of embeddings, tried in turn"""
LEAST_DISTINCT = 6
LEAST_MARGIN = 5e-3

MLA = {"num_key_value_heads": "num_attention_heads", "head_dim": "qk_rope_head_dim"}


def make_tiny(folder: Path, model_type: str, **changes: Any) -> Any:
    """Save a checkpoint of random weights in float32, and return its model. ``changes``: as of ``tiny_config``."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(model_type, **changes), dtype=torch.float32).eval()
    _draw(model, STDS[0])
    model.save_pretrained(folder)
    return model


def make_tiny_model(model_type: str, folder: Path) -> Reference:
    """Save a checkpoint of random weights in float32 and return what transformers answers, having read it back.

    The weights are redrawn until tokens differ and each leads the next best clearly, so that an equal answer means
    something and another order of sums cannot change it.
    """
    config = tiny_config(model_type)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    for seed in range(TRIALS):
        torch.manual_seed(seed)
        _draw(model, STDS[seed % len(STDS)])
        found = _reference(model, seed)
        if found.num_distinct >= LEAST_DISTINCT and found.margin > LEAST_MARGIN:
            break
    model.save_pretrained(folder)
    read = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return _reference(read, seed)


def _draw(model: torch.nn.Module, stds: tuple[float, float]) -> None:
    embedding = model.get_input_embeddings().weight
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.requires_grad:  # a table of sines is not in the file
                continue
            if parameter.dim() > 1:
                parameter.normal_(std=stds[parameter is embedding])
                parameter.sub_(parameter.mean(-1, keepdim=True)).sub_(parameter.mean(-2, keepdim=True))
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.05)


def _reference(model: Any, seed: int) -> Reference:
    torch.manual_seed(seed)
    model.generation_config = GenerationConfig(pad_token_id=0)
    prompts = [torch.randint(*PROMPT_TOKENS, (length,)).tolist() for length in PROMPT_LENGTHS]
    tokens, margin = [], float("inf")
    for prompt in prompts:
        ids = torch.tensor([prompt])
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            output_scores=True,
            return_dict_in_generate=True,
        )
        tokens.append(found.sequences[0, len(prompt) :].tolist())
        scores = torch.cat(found.scores)
        if not bool(scores.isfinite().any(-1).all()) or bool(scores.isnan().any()):
            raise ValueError("logits are not finite")
        first, second = scores.topk(2, -1).values.unbind(-1)
        margin = min(margin, float(((first - second) / scores.std(-1)).min()))
    return Reference(prompts, tokens, margin)
