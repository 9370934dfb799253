"""A roofline cost model: each kernel takes the time of its products or of its bytes, whichever is longer."""

from collections import Counter

from quire.protocol.errors import ConfigError
from quire.protocol.model.kv_layout import DTYPE_BYTES
from quire.protocol.model.model_config import ModelConfig
from quire.replay.costs.chips import Chip
from quire.replay.costs.pairs import decode_pairs, prefill_pairs
from quire.replay.costs.sizes import (
    attention_weights,
    expert_layers,
    expert_weight_bytes,
    layer_shapes,
    linear_weight_bytes,
    num_experts_read,
    room_for_kv,
)
from quire.replay.run.step_shape import StepShape

UTILIZATION = 0.9
"""Share of a chip's memory that an engine uses."""


class ModelOnChips:
    """A model on one chip, or split across several."""

    def __init__(self, model: ModelConfig, chip: Chip, tensor_parallel_size: int) -> None:
        """Raises ConfigError if the heads cannot be split across that many ranks."""
        check_split(model, tensor_parallel_size)
        self._model, self._chip, self._ranks = model, chip, tensor_parallel_size
        self._bytes = DTYPE_BYTES[model.dtype]
        self._weight_bytes = linear_weight_bytes(model)
        self._on = f"on {chip.name}" + (f" x {tensor_parallel_size}" if tensor_parallel_size > 1 else "")

    @property
    def kv_bytes(self) -> int:
        return room_for_kv(self._model, self._chip.memory_bytes * UTILIZATION, self._ranks)

    @property
    def host_bandwidth(self) -> float:
        """Bytes per second between a chip and host memory, one way."""
        return self._chip.host_bandwidth


class Roofline(ModelOnChips):
    """Counts products and bytes of weights, KV and hidden states, and two all-reduces per layer.

    Heads and intermediate widths are split across the ranks, hidden states are not. Tokens choose experts uniformly and
    independently, so that few tokens read few experts. Windows bound contexts, for decodes their mean context; chunks
    do at half their length, which is what their tokens see on average.
    """

    def __init__(self, model: ModelConfig, chip: Chip, tensor_parallel_size: int = 1) -> None:
        """
        Raises:
            ConfigError: the heads cannot be split across the ranks, or the chip has no figure for the model's dtype.
        """
        super().__init__(model, chip, tensor_parallel_size)
        self._flops = chip.flops_of(model.dtype)
        self._streamed = chip.bandwidth * chip.memory_efficiency
        shapes = layer_shapes(model)
        self._shapes = Counter(shapes)
        reaches = [model.window(layer) or -(-model.chunk(layer) // 2) for layer in range(len(shapes))]
        self._attention = Counter((reach, *shape[:2]) for reach, shape in zip(reaches, shapes, strict=True))
        self._by_tokens: dict[int, float] = {}
        self._by_samples: dict[int, float] = {}

    def describe(self) -> str:
        model = self._model
        shape = f"{model.num_layers} layers and hidden size {model.hidden_size}"
        return f"roofline: {model.architecture} with {shape} {self._on}"

    def seconds(self, step: StepShape) -> float:
        tokens, samples = step.num_tokens, max(step.num_samples, 1)
        by_tokens = self._by_tokens.get(tokens)
        if by_tokens is None:
            by_tokens = self._by_tokens[tokens] = self._token_seconds(tokens)
        by_samples = self._by_samples.get(samples)
        if by_samples is None:
            by_samples = self._by_samples[samples] = self._head_seconds(samples)
        return by_tokens + by_samples + self._attention_seconds(step)

    def _token_seconds(self, tokens: int) -> float:
        """Return the seconds of all layers without attention, and without the output projection."""
        model, ranks = self._model, self._ranks
        hidden, inner = model.hidden_size, model.intermediate_size / ranks
        dense = self._product(tokens, hidden, 2 * inner) + self._product(tokens, inner, hidden)
        with_experts = expert_layers(model)
        total = (model.num_layers - with_experts) * dense
        if with_experts:
            total += with_experts * self._expert_seconds(tokens)
        for (kv_heads, head_dim, own), layers in self._shapes.items():
            queries, keys = self._query_width(head_dim), self._key_width(kv_heads, head_dim) * own
            around = self._product(tokens, hidden, queries + 2 * keys) + self._product(tokens, queries, hidden)
            if model.latent is not None:  # the projections are several narrow ones
                around = self._product(tokens, hidden, attention_weights(model) / model.num_layers / hidden / ranks)
            passed = self._stream(tokens * (8 * hidden + 3 * inner + 2 * queries + 2 * keys), kernels=4)
            total += layers * (around + passed)
        exchange = self._chip.link.all_reduce(tokens * hidden * self._bytes, ranks)
        return total + 2 * model.num_layers * exchange + self._stream(2 * tokens * hidden, kernels=2)

    def _head_seconds(self, samples: int) -> float:
        width = self._model.vocab_size / self._ranks
        return self._product(samples, self._model.hidden_size, width, plain=True) + self._stream(
            3 * samples * width, kernels=2
        )

    def _expert_seconds(self, tokens: int) -> float:
        """Return the seconds of one layer's experts; only experts that some token chose are read."""
        model, moe = self._model, self._model.moe
        assert moe is not None
        chosen = moe.num_experts_per_token
        read = num_experts_read(model, tokens)
        weights = 3 * model.hidden_size * moe.intermediate_size / self._ranks
        products = 2 * tokens * chosen * weights / (self._flops * self._chip.gemm_efficiency)
        passed = 2 * tokens * chosen * model.hidden_size * self._bytes
        streamed = (read * weights * expert_weight_bytes(model) + passed) / self._streamed
        router = self._product(tokens, model.hidden_size, moe.num_experts, plain=True)
        return max(products, streamed) + router + 3 * self._chip.kernel_seconds

    def _attention_seconds(self, step: StepShape) -> float:
        total = 0.0
        for (window, kv_heads, head_dim), layers in self._attention.items():
            pairs, read = 0.0, decode_pairs(step.num_decodes, step.decode_context, window)
            decode_products = read
            for chunk, before in step.prefills:
                pairs += prefill_pairs(chunk, before, window)
                read += min(before, window or before) + chunk
            latent = self._model.latent  # each is read once, as key and value
            of_keys = 2.0 if latent is None else 1.0 + latent.rank / latent.width
            products = 2 * of_keys * self._query_width(head_dim) * (pairs + decode_products)
            at_peak = products / (self._flops * self._chip.attention_efficiency)
            parts = 2 if latent is None else 1
            streamed = parts * self._key_width(kv_heads, head_dim) * read * self._bytes / self._streamed
            total += layers * (max(at_peak, streamed) + self._chip.kernel_seconds)
        return total

    def _query_width(self, head_dim: int) -> float:
        """Return the width of one rank's queries."""
        return self._model.num_heads * head_dim / self._ranks

    def _key_width(self, kv_heads: int, head_dim: int) -> float:
        """Return the width of one rank's keys: at least one head, which several ranks may share."""
        return max(kv_heads / self._ranks, 1) * head_dim

    def _product(self, rows: float, inner: float, columns: float, *, plain: bool = False) -> float:
        """Return the seconds of a (rows, inner) by (inner, columns) matrix product; ``plain``: never quantised."""
        products = 2 * rows * inner * columns / (self._flops * self._chip.gemm_efficiency)
        weights = inner * columns * (self._bytes if plain else self._weight_bytes)
        streamed = (weights + (rows * inner + rows * columns) * self._bytes) / self._streamed
        return max(products, streamed) + self._chip.kernel_seconds

    def _stream(self, numbers: float, kernels: int) -> float:
        """Return the seconds of kernels that only read and write."""
        return numbers * self._bytes / self._streamed + kernels * self._chip.kernel_seconds


def check_split(model: ModelConfig, tensor_parallel_size: int) -> None:
    """Raise ConfigError unless the heads can be split evenly across the ranks."""
    ranks = tensor_parallel_size
    if ranks < 1 or model.num_heads % ranks:
        raise ConfigError(f"tensor_parallel_size={ranks} does not divide the {model.num_heads} attention heads")
    for kv_heads, _ in model.all_kv_shapes:
        if kv_heads % ranks and ranks % kv_heads:
            raise ConfigError(f"tensor_parallel_size={ranks} neither divides nor is a multiple of {kv_heads} KV heads")
