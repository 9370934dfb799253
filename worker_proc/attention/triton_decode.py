"""Plans of Triton attention for steps whose lengths are only on the device, for use in captured graphs."""

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch

from quire.kernels.attention.attention_decode import DecodeBuffers, allocate_decode, plan_decode
from quire.kernels.attention.attention_plan import AttentionPlan
from quire.kernels.attention.attention_tiles import AttentionShape, next_power_of_two
from quire.worker_proc.attention.backend import StepBatch
from quire.worker_proc.attention.layer_launches import LayerLaunches


class DecodeBufferPool:
    """Buffers for plans: one set per layer shape, window or chunk, and query length, shared by all steps and graphs."""

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._made: dict[tuple[AttentionShape, int, int, int], DecodeBuffers] = {}

    def of(self, shape: AttentionShape, batch: StepBatch, device: torch.device, max_query_len: int) -> DecodeBuffers:
        key = (shape, batch.window, batch.chunk, max_query_len)
        if key not in self._made:
            tile = next_power_of_two(max_query_len)
            self._made[key] = allocate_decode(shape, self._max_rows, device, max_query_len=tile)
        return self._made[key]


@dataclass(slots=True)
class DecodePlan:
    """``TritonPlan`` for rows of few tokens: one launch at the first layer of each shape, no copy and no wait."""

    batch: StepBatch
    pool: DecodeBufferPool
    max_query_len: int = 1
    launches: dict[Hashable, LayerLaunches] = field(default_factory=dict)
    _plans: dict[AttentionShape, AttentionPlan] = field(default_factory=dict)

    def of_layer(self, shape: AttentionShape, num_tokens: int) -> AttentionPlan:
        if shape not in self._plans:
            batch = self.batch
            buffers = self.pool.of(shape, batch, batch.seq_lens.device, self.max_query_len)
            self._plans[shape] = plan_decode(
                buffers, batch.query_start_loc, batch.seq_lens, window=batch.window, chunk=batch.chunk
            )
        return self._plans[shape]
