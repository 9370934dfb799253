"""The forward pass that all kinds of steps share: the model, its attention backend, and its KV caches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from quire.kernels.attention.attention_tiles import AttentionShape
from quire.protocol.model.kv_layout import KVGroup
from quire.worker_proc.attention.backend import AttentionBackend, StepBatch
from quire.worker_proc.batch.group_tables import MultiGroupBlockTable
from quire.worker_proc.execute.routed_experts import RoutedExpertTable
from quire.worker_proc.models.model import Inputs, Model

_NO_LENGTHS = np.zeros(0, np.int32)
"""Host lengths of a ``StepBatch`` whose lengths are only on the device."""


@dataclass(frozen=True, slots=True)
class Forward:
    """All memory belongs to the runner.

    Attributes:
        kv_caches: one per layer; layers that share a cache have the same. Empty without groups.
        group_of_layer: index into ``groups`` of each layer; empty without groups.
        experts: keeps the experts of each position; None: they are not kept.
    """

    model: Model
    backend: AttentionBackend
    tables: MultiGroupBlockTable
    groups: Sequence[KVGroup]
    kv_caches: Sequence[torch.Tensor]
    group_of_layer: Sequence[int]
    experts: RoutedExpertTable | None

    @classmethod
    def of(
        cls,
        model: Model,
        backend: AttentionBackend,
        tables: MultiGroupBlockTable,
        groups: Sequence[KVGroup],
        caches: Mapping[int, torch.Tensor],
        experts: RoutedExpertTable | None,
    ) -> "Forward":
        """Connect the layers to their groups. ``caches``: by layer that owns one."""
        group_of = {layer: index for index, group in enumerate(groups) for layer in group.layers}
        sources = [model.config.cache_source(layer) for layer in range(model.config.num_layers)] if groups else []
        caches_of_layers = [caches[source] for source in sources]
        groups_of_layers = [group_of[source] for source in sources]
        return cls(model, backend, tables, groups, caches_of_layers, groups_of_layers, experts)

    def shapes(self) -> list[tuple[AttentionShape, ...]]:
        """Return the shapes of the queries in each group's layers."""
        shape_of = self.model.attention_shape
        return [tuple(dict.fromkeys(shape_of(layer) for layer in group.layers)) for group in self.groups]

    def hidden(self, inputs: Inputs, plans: Sequence[Any]) -> torch.Tensor:
        """Run the model, and return ``[num_tokens, hidden_size]``. ``plans``: one per group, or one without groups."""
        layer_plans = [plans[group] for group in self.group_of_layer] if self.groups else plans
        return self.model(inputs, self.kv_caches, layer_plans, self.backend).hidden

    def keep_experts(self, batches: Sequence[StepBatch]) -> None:
        """Keep the experts that ``hidden`` has chosen, if they are kept. ``batches``: its tokens, per group."""
        if self.experts is not None:
            self.experts.store(batches[self.experts.group].slot_mapping)

    def logits_of_decode(
        self,
        inputs: Inputs,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        slot_mapping: torch.Tensor,
        max_query_len: int = 1,
    ) -> torch.Tensor:
        """Run rows ``0 .. len(seq_lens) - 1`` with few tokens each, from inputs on the device alone.

        Args:
            slot_mapping: int64 ``[num_groups, num_tokens]``.

        Returns:
            Logits of all tokens, float32 ``[num_tokens, vocab_size]``.
        """
        batches = [
            StepBatch(
                query_start_loc=query_start_loc,
                seq_lens=seq_lens,
                block_table=table.device_copy[: len(seq_lens)],
                slot_mapping=slots,
                query_lens_cpu=_NO_LENGTHS,
                seq_lens_cpu=_NO_LENGTHS,
                block_size=table.block_size,
                window=group.sliding_window,
                chunk=group.chunk,
            )
            for table, group, slots in zip(self.tables.tables, self.groups, slot_mapping, strict=True)
        ]
        plans = [self.backend.plan_decode(batch, max_query_len) for batch in batches]
        hidden = self.hidden(inputs, plans)
        self.keep_experts(batches)
        return self.model.logits(hidden)
