"""Memory for a model's weights and activations, derived from its shape."""

from quire.protocol.config import EngineConfig
from quire.protocol.model.kv_layout import DTYPE_BYTES, KVLayout
from quire.protocol.model.model_config import ModelConfig

MAX_STEP_TOKENS = 8192
"""Tokens of the largest step for which activation memory is reserved."""


MXFP4_BYTES = 17 / 32
"""Bytes of one weight in MXFP4: 32 have four bits each, and a scale of one byte. Workers keep them packed."""


def layer_shapes(model: ModelConfig) -> list[tuple[int, int, bool]]:
    """Return each layer's number of KV heads, head dimension, and whether it has keys and values of its own."""
    return [(*model.kv_shape(i), model.cache_source(i) == i) for i in range(model.num_layers)]


def attention_weights(model: ModelConfig) -> int:
    """Return the number of parameters of all layers' attention projections."""
    latent, heads = model.latent, model.num_heads
    if latent is not None:
        rows = heads * latent.key_dim  # of queries, from their own latent or the hidden state
        query = latent.query_rank * (model.hidden_size + rows) if latent.query_rank else model.hidden_size * rows
        wide = latent.rank * heads * (latent.nope_dim + latent.value_dim)
        ends = model.hidden_size * (latent.width + heads * latent.value_dim)
        return model.num_layers * (query + wide + ends)
    widths = sum(2 * model.num_heads * dim + 2 * kv_heads * dim * own for kv_heads, dim, own in layer_shapes(model))
    return model.hidden_size * widths


def expert_layers(model: ModelConfig) -> int:
    return len(model.moe.layers) if model.moe is not None else 0


def num_experts_read(model: ModelConfig, num_tokens: int) -> float:
    """Return the expected number of one layer's experts that some token chooses, uniformly and independently."""
    if model.moe is None:
        return 0.0
    missed = 1.0 - model.moe.num_experts_per_token / model.moe.num_experts
    return float(model.moe.num_experts * (1.0 - missed**num_tokens))


def num_parameters(model: ModelConfig) -> int:
    """Return the number of parameters without norms and biases."""
    total = attention_weights(model) + _dense_weights(model) + _expert_weights(model)
    if model.moe is not None:
        total += expert_layers(model) * model.moe.num_experts * model.hidden_size
    embeddings = 1 if model.tie_word_embeddings else 2
    return total + embeddings * model.vocab_size * model.hidden_size


def expert_weight_bytes(model: ModelConfig) -> float:
    """Return the bytes of one weight of an expert."""
    return MXFP4_BYTES if model.moe is not None and model.moe.mxfp4 else linear_weight_bytes(model)


def linear_weight_bytes(model: ModelConfig) -> float:
    """Return the bytes of one weight of a layer's projections; routers and the head are never quantised."""
    form = model.weight_format
    return DTYPE_BYTES[model.dtype] if form is None else form.bytes_per_weight


def weight_bytes(model: ModelConfig) -> float:
    """Return the bytes of all weights of ``num_parameters``."""
    experts, linear = _expert_weights(model), attention_weights(model) + _dense_weights(model)
    plain = num_parameters(model) - experts - linear
    projections = linear * linear_weight_bytes(model) + experts * expert_weight_bytes(model)
    return plain * DTYPE_BYTES[model.dtype] + projections


def activation_bytes(model: ModelConfig, tensor_parallel_size: int, num_tokens: int = MAX_STEP_TOKENS) -> int:
    """Return the peak bytes of a step: hidden states, the widest layer's activations, and a batch's logits."""
    width = max(model.intermediate_size * 3 // tensor_parallel_size, 4 * model.hidden_size)
    logits = min(num_tokens, 256) * model.vocab_size * 4 // tensor_parallel_size
    return num_tokens * (2 * model.hidden_size + width) * DTYPE_BYTES[model.dtype] + logits


def room_for_kv(model: ModelConfig, memory_bytes: float, tensor_parallel_size: int) -> int:
    """Return the bytes left for KV over all ranks after weights and activations; ``memory_bytes`` is per rank."""
    weights = weight_bytes(model) / tensor_parallel_size
    left = memory_bytes - weights - activation_bytes(model, tensor_parallel_size)
    return max(int(left * tensor_parallel_size), 0)


def _dense_weights(model: ModelConfig) -> int:
    """Return the number of parameters of all feed-forward layers without experts, and of those beside experts."""
    shared = expert_layers(model) * (0 if model.moe is None else model.moe.shared_width)
    dense = (model.num_layers - expert_layers(model)) * model.intermediate_size
    return 3 * model.hidden_size * (dense + shared)


def _expert_weights(model: ModelConfig) -> int:
    """Return the number of parameters of all experts, without routers."""
    if model.moe is None:
        return 0
    return expert_layers(model) * model.moe.num_experts * 3 * model.hidden_size * model.moe.intermediate_size


def simulated_slots(config: EngineConfig, layout: KVLayout, pool_bytes: int) -> int:
    """Return the slots of recurrent states beside a pool of this size, slot 0 included; 0 for models without."""
    if not layout.states:
        return 0
    return 1 + (config.state_slots or layout.num_slots(pool_bytes, config.max_num_seqs))
