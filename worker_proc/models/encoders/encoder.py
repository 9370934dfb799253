"""The encoder that BERT, RoBERTa, XLM-RoBERTa and ModernBERT share."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from quire.protocol.model.rope_config import RopeConfig
from quire.worker_proc.attention.backend import LayerAttention, Rotary
from quire.worker_proc.attention.rope import rope_table
from quire.worker_proc.attention.whole_rows import RowsPart, RowsPlan
from quire.worker_proc.models.encoders.classifier import Classifier
from quire.worker_proc.models.encoders.layer import EncoderLayer, Norm
from quire.worker_proc.models.model import Inputs, Model, Outputs
from quire.worker_proc.models.module import Module
from quire.worker_proc.models.weight_slot import WeightSlot
from quire.worker_proc.models.weights import Build


class Embeddings(Module):
    """The first residual stream: embeddings of tokens and, except for ModernBERT, of positions and token types."""

    def __init__(self, build: Build) -> None:
        config, encoder = build.config, build.config.encoder
        assert encoder is not None
        hidden = config.hidden_size
        self._build, self._first = build, encoder.first_position
        self.tokens = build.weight(config.vocab_size, hidden)
        self.positions = build.weight(encoder.position_rows, hidden) if encoder.position_rows else None
        self.types = build.weight(encoder.token_types, hidden) if encoder.token_types else None
        self.norm = Norm(build, "model.embeddings.norm", encoder.norm_eps, bias=encoder.norm_bias)

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, token_types: torch.Tensor | None
    ) -> torch.Tensor:
        """Map ``[num_tokens]`` to new ``[num_tokens, hidden_size]``. ``token_types``: None if all are 0."""
        dtype = self._build.activation_dtype
        x = F.embedding(token_ids, self.tokens).to(dtype)
        if self.types is not None:
            # All tokens are of one type if the model has no second one (RoBERTa).
            if token_types is None or len(self.types) == 1:
                x += self.types[0]
            else:
                x += F.embedding(token_types, self.types)
        if self.positions is not None:
            x += F.embedding(self._rows(token_ids, positions), self.positions)
        return self.norm(x)

    def _rows(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the row of ``self.positions`` of each token.

        RoBERTa numbers the tokens of a prompt without those that equal the padding token, which share a row before it.
        """
        if not self._first:
            return positions
        padding = self._first - 1
        counts = token_ids != padding
        before = torch.cumsum(counts, 0) - counts.long()
        begins = torch.arange(len(positions), device=positions.device) - positions
        return torch.where(counts, before - before[begins] + self._first, padding)

    def weight_slots(self) -> dict[str, WeightSlot]:
        tables = {
            "model.embed_tokens": self.tokens,
            "model.embeddings.position_embeddings": self.positions,
            "model.embeddings.token_type_embeddings": self.types,
        }
        slots = {
            f"{name}.weight": WeightSlot(of.data, tuple(of.shape)) for name, of in tables.items() if of is not None
        }
        return slots | self.norm.weight_slots()


class Encoder(Model):
    """An encoder and, if the model classifies, its head. One rank holds all of it.

    Weights are allocated, not initialised: ``quire.worker_proc.startup.loader`` fills them through ``weight_slots``.
    """

    def __init__(self, build: Build, max_position: int | None = None) -> None:
        """
        Args:
            max_position: as for ``Decoder``.
        """
        super().__init__(build)
        config = build.config
        encoder, pooling = config.encoder, config.pooling
        assert encoder is not None
        self._pools_first = pooling is not None and pooling.pooling == "cls"
        self.embeddings = Embeddings(build)
        self.layers = [EncoderLayer(build, layer) for layer in range(config.num_layers)]
        self.final_norm: Norm | None = None
        if encoder.norms_before:
            self.final_norm = Norm(build, "model.final_norm", encoder.norm_eps, bias=encoder.norm_bias)
        self.classifier: Classifier | None = None
        if pooling is not None and "classify" in pooling.tasks:
            self.classifier = Classifier(build, len(pooling.labels))
        self._tables: dict[str, torch.Tensor] = {}
        if not encoder.position_rows:
            length = max_position or config.max_position
            ropes = {"": config.rope, "local": config.local_rope or config.rope}
            self._tables = {name: self._table(rope, length) for name, rope in ropes.items()}

    def _table(self, rope: RopeConfig, length: int) -> torch.Tensor:
        return rope_table(rope, self.config.head_dim, length, self.build.device)

    def __call__(
        self, inputs: Inputs, kv_caches: Sequence[torch.Tensor], plans: Sequence[Any], backend: LayerAttention
    ) -> Outputs:
        """As ``Model.__call__``, of whole rows.

        If the model pools the first token and the step needs no others, the last layer computes only what these need,
        and the hidden states of other tokens are 0.
        """
        assert not kv_caches, "an encoder has no KV cache"
        assert inputs.is_plain, "an encoder computes tokens alone, and returns no layer's inputs"
        plan: RowsPlan = plans[0]
        types = plan.token_types
        firsts_only = self._pools_first and not plan.every_token
        made = [
            self._part(
                inputs.token_ids[part.tokens],
                inputs.positions[part.tokens],
                None if types is None else types[part.tokens],
                part,
                backend,
                firsts_only,
            )
            for part in plan.parts
        ]
        return Outputs(made[0] if len(made) == 1 else torch.cat(made))

    def _part(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        token_types: torch.Tensor | None,
        part: RowsPart,
        backend: LayerAttention,
        firsts_only: bool,
    ) -> torch.Tensor:
        rotaries = {name: Rotary(table, positions) for name, table in self._tables.items()}
        residual, pending = self.embeddings(token_ids, positions, token_types), None
        for layer in self.layers:
            last = firsts_only and layer is self.layers[-1]
            rotary = rotaries.get(layer.rope)
            residual, pending = layer(residual, pending, part, backend, rotary, firsts_only=last)
        if self.final_norm is not None:
            assert pending is not None
            residual = self.final_norm(pending, residual)
        if not firsts_only:
            return residual
        return residual.new_zeros(len(token_ids), residual.shape[1]).index_copy_(0, part.firsts, residual)

    def classify(self, hidden: torch.Tensor) -> torch.Tensor:
        assert self.classifier is not None, "the model has no head for labels"
        return self.classifier(hidden)

    def _slots(self) -> dict[str, WeightSlot]:
        """Return the slots, by the names of ``encoder_config.decoder_style``."""
        slots = self.embeddings.weight_slots()
        for index, layer in enumerate(self.layers):
            slots |= {f"model.layers.{index}.{name}": slot for name, slot in layer.weight_slots().items()}
        for part in (self.final_norm, self.classifier):
            slots |= {} if part is None else part.weight_slots()
        return slots
