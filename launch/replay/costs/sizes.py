"""Memory for a model's weights and activations, derived from its shape."""

from quire.protocol.model.kv_layout import DTYPE_BYTES
from quire.protocol.model.model_config import ModelConfig

MAX_STEP_TOKENS = 8192
"""Tokens of the largest step for which activation memory is reserved."""


def attention_weights(model: ModelConfig) -> int:
    """Return the number of parameters of one layer's attention projections."""
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    return model.hidden_size * (2 * queries + 2 * keys)


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
    dense = 3 * model.hidden_size * model.intermediate_size
    total = model.num_layers * attention_weights(model) + (model.num_layers - expert_layers(model)) * dense
    if model.moe is not None:
        expert = 3 * model.hidden_size * model.moe.intermediate_size
        total += expert_layers(model) * model.moe.num_experts * (expert + model.hidden_size)
    embeddings = 1 if model.tie_word_embeddings else 2
    return total + embeddings * model.vocab_size * model.hidden_size


def activation_bytes(model: ModelConfig, tensor_parallel_size: int, num_tokens: int = MAX_STEP_TOKENS) -> int:
    """Return the peak bytes of a step: hidden states, the widest layer's activations, and a batch's logits."""
    width = max(model.intermediate_size * 3 // tensor_parallel_size, 4 * model.hidden_size)
    logits = min(num_tokens, 256) * model.vocab_size * 4 // tensor_parallel_size
    return num_tokens * (2 * model.hidden_size + width) * DTYPE_BYTES[model.dtype] + logits


def room_for_kv(model: ModelConfig, memory_bytes: float, tensor_parallel_size: int) -> int:
    """Return the bytes left for KV over all ranks after weights and activations; ``memory_bytes`` is per rank."""
    weights = num_parameters(model) * DTYPE_BYTES[model.dtype] / tensor_parallel_size
    left = memory_bytes - weights - activation_bytes(model, tensor_parallel_size)
    return max(int(left * tensor_parallel_size), 0)
