"""The decoder that all families share: blocks of rotary attention and a gated MLP or experts.

Owns the weights and the arithmetic between token ids and logits. It knows nothing of requests, blocks and batches: the
attention backend reads and writes the KV cache, and gets a plan per layer.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from quire.kernels.attention.attention_tiles import AttentionShape
from quire.protocol.model.rope_config import RopeConfig
from quire.worker_proc.attention.backend import LayerAttention, Rotary
from quire.worker_proc.attention.rope import pair_axes, rope_table, rows_in_space
from quire.worker_proc.models.attention import Attention
from quire.worker_proc.models.embedding import Embedding, gather_vocabulary, vocabulary_of_rank
from quire.worker_proc.models.latent_attention import LatentAttention
from quire.worker_proc.models.linear import Linear
from quire.worker_proc.models.mlp import GatedMlp, SparseMlp
from quire.worker_proc.models.model import Inputs, Model, Outputs, scales_of
from quire.worker_proc.models.module import Module
from quire.worker_proc.models.query_scales import QueryScales, ScaledQueries
from quire.worker_proc.models.weight_slot import WeightSlot
from quire.worker_proc.models.weights import Build

_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
# Llama names this norm by its place after attention; it normalises the input of the MLP.
_NORMS_BEFORE = ("input_layernorm", "", "post_attention_layernorm", "")


class Decoder(Model):
    """One rank's share of a decoder-only transformer, for all families; its ModelConfig has their settings.

    Weights are allocated, not initialised: ``quire.worker_proc.startup.loader`` fills them through ``weight_slots``.

    Raises:
        ConfigError: the shape cannot be divided among the ranks.
    """

    def __init__(self, build: Build, max_position: int | None = None) -> None:
        """
        Args:
            max_position: positions that the rotary table covers; by default the model's.
        """
        super().__init__(build)
        config, dtype = build.config, build.dtype
        self.vocab = vocabulary_of_rank(build.parallel, config.vocab_size)
        table = build.vocabulary_linear("model.embed_tokens", self.vocab)
        # Rounded to the weights' dtype: Gemma was trained with sqrt(hidden_size) in bfloat16.
        multiplier = float(torch.tensor(config.embedding_multiplier, dtype=dtype))
        self.embed_tokens = Embedding(build, table, self.vocab, multiplier)
        self.layers = [DecoderLayer(build.inside(f"model.layers.{layer}"), layer) for layer in range(config.num_layers)]
        self._cache_sources = [config.cache_source(layer) for layer in range(config.num_layers)]
        self.norm = build.norm()
        self.lm_head: Linear | None = table if config.generates else None
        if config.generates and not config.tie_word_embeddings:
            self.lm_head = build.vocabulary_linear("lm_head", self.vocab)
        pooling = config.pooling
        self._label_token_ids = [] if pooling is None else pooling.label_token_ids
        has_labels = pooling is not None and "classify" in pooling.tasks and not self._label_token_ids
        self.score = build.label_linear("score", len(pooling.labels)) if pooling is not None and has_labels else None
        length = max_position or config.max_position
        self.rope = self._table(config.rope, length)
        local = config.local_rope
        self.local_rope = None if local is None else self._table(local, length, local=True)
        self._axes = None
        if config.vision is not None and config.vision.mrope_section:
            sections, interleaved = config.vision.mrope_section, config.vision.mrope_interleaved
            self._axes = pair_axes(sections, self.rope.shape[-1] // 2, interleaved=interleaved).to(build.device)
        scale = config.query_scale
        self.query_scales = None if scale is None else QueryScales(scale, length, build.device)

    def attention_shape(self, layer: int) -> AttentionShape:
        spec = self.layers[layer].attention.spec
        return spec.shape(self.build.activation_dtype)

    def __call__(
        self, inputs: Inputs, kv_caches: Sequence[torch.Tensor], plans: Sequence[Any], backend: LayerAttention
    ) -> Outputs:
        """As ``Model.__call__``, writing keys and values.

        A layer that reads another layer's cache uses that layer's cache and plan; its own entries are ignored.
        """
        rotary = self._rotary(self.rope, inputs.positions)
        local = rotary if self.local_rope is None else self._rotary(self.local_rope, inputs.positions)
        rotaries = {"": rotary, "local": local, "none": None}
        attends = dict.fromkeys(rotaries, backend)
        if self.query_scales is not None:
            attends["none"] = ScaledQueries(backend, self.query_scales.of(inputs.positions))
        residual = self.embed_tokens(inputs.token_ids)
        tokens = None
        if inputs.given_embeddings is not None:
            tokens, rows = inputs.given_embeddings
            residual.index_copy_(0, tokens, rows.to(residual.dtype))
        pending: torch.Tensor | None = None
        wanted, entered = inputs.auxiliary_layers, {}
        for index, (layer, source) in enumerate(zip(self.layers, self._cache_sources, strict=True)):
            if index in wanted:
                entered[index] = residual.clone() if pending is None else residual + pending
            kind, cache, plan = layer.rope, kv_caches[source], plans[source]
            pending = layer(residual, pending, cache, plan, attends[kind], rotaries[kind])
            if tokens is not None and index < len(inputs.added_rows):
                residual.index_add_(0, tokens, inputs.added_rows[index].to(residual.dtype))
        return Outputs(join(self.build, residual, pending, self.norm), [entered[index] for index in wanted])

    def _rotary(self, table: torch.Tensor, positions: torch.Tensor) -> Rotary:
        if positions.dim() == 1 or self._axes is None:
            return Rotary(table, positions)
        own = rows_in_space(table, positions, self._axes)
        return Rotary(own, torch.arange(positions.shape[1], device=positions.device))

    def set_kv_scales(self, scales: Mapping[int, tuple[torch.Tensor, torch.Tensor]]) -> None:
        for layer, source in zip(self.layers, self._cache_sources, strict=True):
            layer.attention.set_kv_scales(*scales[source])

    def kv_meaning(self) -> list[Any]:
        return scales_of(layer.attention.spec for layer in self.layers)

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        assert self.lm_head is not None, "the model has no head for tokens"
        return self.lm_head(hidden)

    def logits_of(self, scores: torch.Tensor) -> torch.Tensor:
        config = self.config
        if config.logits_scaling != 1.0:
            scores = scores / config.logits_scaling
        if config.final_soft_cap:
            scores = torch.tanh(scores / config.final_soft_cap) * config.final_soft_cap
        return gather_vocabulary(self.build.parallel, scores, config.vocab_size)

    def classify(self, hidden: torch.Tensor) -> torch.Tensor:
        """As ``Model.classify``.

        With ``label_token_ids`` it is the logit of a token, less that of the other one if there are two: the sigmoid of
        the difference is the probability of the last token among the two.
        """
        if self._label_token_ids:
            logits = self.logits(hidden)
            *other, last = [logits[:, token : token + 1] for token in self._label_token_ids]
            return last - other[0] if other else last.contiguous()
        assert self.score is not None, "the model has no head for labels"
        return self.score(hidden)

    def prepack(self, *, deterministic: bool = False) -> bool:
        packed = super().prepack(deterministic=deterministic)
        self.embed_tokens.prepack()
        return packed

    def _slots(self) -> dict[str, WeightSlot]:
        """Return the slots. With tied embeddings ``lm_head.weight`` has none: the loader compares it with these."""
        slots = self.embed_tokens.table.weight_slots() | {"model.norm.weight": self.build.norm_slot(self.norm)}
        if self.lm_head is not None and not self.config.tie_word_embeddings:
            slots |= self.lm_head.weight_slots()
        if self.score is not None:
            slots |= self.score.weight_slots()
        for index, layer in enumerate(self.layers):
            slots |= {f"model.layers.{index}.{name}": slot for name, slot in layer.weight_slots().items()}
        return slots

    def _table(self, rope: RopeConfig, length: int, *, local: bool = False) -> torch.Tensor:
        """Return the table of the layers in ``local_rope_layers``, or of the others."""
        config = self.config
        layer = next((i for i in range(config.num_layers) if (i in config.local_rope_layers) == local), 0)
        head_dim = config.kv_shape(layer)[1] if config.latent is None else config.latent.rope_dim
        return rope_table(rope, head_dim, length, self.build.device).to(self.build.activation_dtype)


class DecoderLayer(Module):
    """One block: attention and feed-forward, with norms before, after, or on both sides of each.

    Attributes:
        rope: rotary table of this layer's queries and keys: ``""`` (the model's), ``local`` or ``none``.
    """

    def __init__(self, build: Build, layer: int) -> None:
        config = build.config
        self.build = build
        self.rope = "none" if layer in config.no_rope_layers else "local" if layer in config.local_rope_layers else ""
        self.attention = Attention(build, layer) if config.latent is None else LatentAttention(build)
        moe = config.moe
        self.mlp = SparseMlp(build, moe) if moe is not None and layer in moe.layers else GatedMlp(build)
        before, after = config.norms != "after", config.norms != "before"
        self.pre_attention_norm = build.norm() if before else None
        self.post_attention_norm = build.norm() if after else None
        self.pre_mlp_norm = build.norm() if before else None
        self.post_mlp_norm = build.norm() if after else None

    def __call__(
        self,
        residual: torch.Tensor,
        pending: torch.Tensor | None,
        kv_cache: torch.Tensor,
        plan: Any,
        backend: LayerAttention,
        rotary: Rotary | None,
    ) -> torch.Tensor:
        """Run the block, updating the residual stream in place except for its last addition.

        The caller passes the result to the next block as ``pending``. So every addition and the norm that follows it
        are one operation, across blocks too.

        Args:
            residual: ``[num_tokens, hidden_size]``.
            pending: output of the previous block that is not added yet, of the same shape, or None.

        Returns:
            This block's output that is not added yet.
        """
        build = self.build
        x = join(build, residual, pending, self.pre_attention_norm)
        x = self._norm_and_scale(self.attention(x, kv_cache, plan, backend, rotary), self.post_attention_norm)
        x = join(build, residual, x, self.pre_mlp_norm)
        return self._norm_and_scale(self.mlp(x), self.post_mlp_norm)

    def _norm_and_scale(self, x: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        config = self.build.config
        if norm is not None:
            x = self.build.ops.rms_norm(x, norm, config.rms_norm_eps)
        return x if config.residual_multiplier == 1.0 else x * config.residual_multiplier

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Slots of this layer's checkpoint tensors, by name under ``model.layers.N.``."""
        slots = self.attention.weight_slots() | self.mlp.weight_slots()
        config = self.build.config
        names = config.norm_names or (_NORMS_BEFORE if config.norms == "before" else _NORMS)
        norms = (self.pre_attention_norm, self.post_attention_norm, self.pre_mlp_norm, self.post_mlp_norm)
        for name, weight in zip(names, norms, strict=True):
            if weight is not None:
                slots[f"{name}.weight"] = self.build.norm_slot(weight)
        return slots


def join(build: Build, residual: torch.Tensor, pending: torch.Tensor | None, norm: torch.Tensor | None) -> torch.Tensor:
    """Add ``pending`` to the residual stream in place, and return the sum, normalised if ``norm`` is given."""
    eps = build.config.rms_norm_eps
    if norm is None:
        return residual if pending is None else residual.add_(pending)
    if pending is None:
        return build.ops.rms_norm(residual, norm, eps)
    return build.ops.add_rms_norm(pending, residual, norm, eps)
