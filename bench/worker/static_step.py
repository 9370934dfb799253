"""The baseline of a decode step: the same weights and kernels with a static dense cache and torch's attention.

It has no block tables, scheduling or varying lengths, only one replayed graph. The additional time of a paged and
scheduled step is the cost of paging and scheduling.
"""

from typing import Any

import torch
import torch.nn.functional as F

from quire.bench.worker.timing import Call
from quire.kernels.cache.fused_cache_write import fused_cache_write
from quire.worker_proc.attention.backend import AttentionSpec, Rotary
from quire.worker_proc.attention.prologue import cache_write
from quire.worker_proc.attention.triton_backend import TritonBackend
from quire.worker_proc.models.decoder import Decoder
from quire.worker_proc.models.model import Inputs


class StaticBackend(TritonBackend):
    """Attention over a dense cache ``[2, num_rows, length, num_kv_heads, head_dim]``, which is always read completely.

    A plan is the slot mapping of the step's tokens.
    """

    name = "static"

    def attend(
        self, qkv: torch.Tensor, kv_cache: torch.Tensor, plan: Any, spec: AttentionSpec, rotary: Rotary | None
    ) -> torch.Tensor:
        query = fused_cache_write(cache_write(qkv, kv_cache, plan, spec, rotary))
        keys, values = kv_cache.transpose(2, 3)
        grouped = query.view(len(query), spec.num_kv_heads, -1, spec.head_dim)
        return F.scaled_dot_product_attention(grouped, keys, values, scale=spec.scale).flatten(1, 2)


def static_step(model: Decoder, num_rows: int, length: int, dtype: torch.dtype, device: torch.device) -> list[Call]:
    """Return a greedy step of ``num_rows`` rows with ``length`` tokens (including the step's), ready to be captured."""
    config = model.config
    backend = StaticBackend()
    shape = backend.kv_cache_shape(num_rows, length, model.attention_shape(0).num_kv_heads, config.head_dim)
    caches = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]
    slots = torch.arange(num_rows, device=device) * length + length - 1
    positions = torch.full((num_rows,), length - 1, dtype=torch.int64, device=device)
    tokens = torch.zeros(num_rows, dtype=torch.int64, device=device)
    inputs = Inputs(tokens, positions)
    plans = [slots] * config.num_layers

    def step() -> None:
        hidden = model(inputs, caches, plans, backend).hidden
        tokens.copy_(model.logits(hidden).argmax(-1))

    return [step]
