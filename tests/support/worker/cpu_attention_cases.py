"""Steps of the CPU backend over caches whose unwritten slots are NaN, with expected results in float64."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quire.worker_proc.attention.backend import AttentionSpec, StepBatch

OUTSIDE = 10**6
"""A block id outside every pool, for block-table entries that must not be read."""

Rows = list[tuple[int, int]]
"""(context length, new tokens) of each row."""


@dataclass
class Case:
    """Rows whose contexts are already written, and this step's tensors; ``key`` is None in layers with a shared
    cache."""

    batch: StepBatch
    cache: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor | None
    value: torch.Tensor | None
    spec: AttentionSpec
    expected: torch.Tensor


@dataclass(frozen=True)
class Ask:
    """Optional features of attention.

    ``k_scale``, ``v_scale``: scales of the KV heads, repeated if there are more. ``images``: first and end of each, as
    in ``last_keys_of``.
    """

    window: int = 0
    chunk: int = 0
    soft_cap: float = 0.0
    sinks: bool = False
    k_scale: tuple[float, ...] = ()
    v_scale: tuple[float, ...] = ()
    images: tuple[tuple[int, int], ...] = ()


def scales_of(given: tuple[float, ...], kv_heads: int) -> torch.Tensor | None:
    return torch.tensor([given[head % len(given)] for head in range(kv_heads)]) if given else None


def make_spec(heads: tuple[int, int, int], ask: Ask) -> AttentionSpec:
    num_heads, kv_heads, dim = heads
    return AttentionSpec(
        num_heads,
        kv_heads,
        dim,
        dim**-0.5,
        soft_cap=ask.soft_cap,
        sinks=torch.linspace(-1.0, 2.0, num_heads) if ask.sinks else None,
        k_scale=scales_of(ask.k_scale, kv_heads),
        v_scale=scales_of(ask.v_scale, kv_heads),
    )


def last_keys_of(rows: Rows, images: Iterable[tuple[int, int]]) -> npt.NDArray[np.int32]:
    """Return the last position that each new token sees. A row has the images that end in it."""
    found = [np.arange(context, context + new, dtype=np.int32) for context, new in rows]
    for own, (context, new) in zip(found, rows, strict=True):
        for first, end in images:
            if end <= context + new:
                own[max(0, first - context) : max(0, end - context)] = end - 1
    return np.concatenate(found)


def make_batch(rows: Rows, table: torch.Tensor, block_size: int, ask: Ask) -> StepBatch:
    query_lens = np.array([new for _, new in rows], dtype=np.int32)
    seq_lens = np.array([context + new for context, new in rows], dtype=np.int32)
    slots = []
    for row, (context, new) in enumerate(rows):
        position = torch.arange(context, context + new)
        slots.append(table[row][position // block_size].long() * block_size + position % block_size)
    return StepBatch(
        query_start_loc=torch.from_numpy(np.concatenate([[0], query_lens.cumsum()]).astype(np.int32)),
        seq_lens=torch.from_numpy(seq_lens),
        block_table=table,
        slot_mapping=torch.cat(slots),
        query_lens_cpu=query_lens,
        seq_lens_cpu=seq_lens,
        block_size=block_size,
        window=ask.window,
        chunk=ask.chunk,
        last_keys=last_keys_of(rows, ask.images) if ask.images else None,
    )


def make_case(
    rows: Rows,
    heads: tuple[int, int, int],
    block_size: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None = None,
    ask: Ask = Ask(),
    shared: bool = False,
) -> Case:
    """Return rows of standard normal keys and values; slots left of the visible ones are NaN or in no block."""
    num_heads, kv_heads, dim = heads
    stored_dtype = cache_dtype or dtype
    generator = torch.Generator().manual_seed(3)
    blocks = [-(-(context + new) // block_size) for context, new in rows]
    table = torch.full((len(rows), max(blocks) + 1), OUTSIDE, dtype=torch.int32)
    ids = torch.randperm(sum(blocks) + 2, generator=generator).int()[: sum(blocks)] + 1
    for row, own in enumerate(ids.split(blocks)):
        table[row, : len(own)] = own
    batch = make_batch(rows, table.clone(), block_size, ask)
    cache = empty_cache(sum(blocks) + 3, kv_heads, block_size, dim, stored_dtype)

    def random(count: int, width: int) -> torch.Tensor:
        return torch.randn(count, width, dim, generator=generator).to(dtype)

    spec = make_spec(heads, ask)
    new_keys, new_values, queries, expected = [], [], [], []
    for row, (context, new) in enumerate(rows):
        key, value, query = random(context + new, kv_heads), random(context + new, kv_heads), random(new, num_heads)
        visible = int(batch.first_visible[row])
        stored = [stored_as(x, scale, stored_dtype) for x, scale in ((key, spec.k_scale), (value, spec.v_scale))]
        position = torch.arange(visible, context + new if shared else context)
        put(cache, table[row], position, *(x[position] for x in stored))
        batch.block_table[row, : visible // block_size] = OUTSIDE
        wide = [
            x.double() * (1 if scale is None else scale[:, None])
            for x, scale in zip(stored, (spec.k_scale, spec.v_scale), strict=True)
        ]
        expected.append(attend_naively(query, wide[0], wide[1], context, spec, ask))
        new_keys.append(key[context:])
        new_values.append(value[context:])
        queries.append(query)
    pair = (None, None) if shared else (torch.cat(new_keys), torch.cat(new_values))
    return Case(batch, cache, torch.cat(queries), *pair, spec, torch.cat(expected))


def empty_cache(num_blocks: int, kv_heads: int, block_size: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a cache of NaN, except block 0, which is zeros as in the engine: nothing is ever written to it."""
    cache = torch.full((2, num_blocks, kv_heads, block_size, dim), float("nan")).to(dtype)
    raw(cache)[:, 0] = 0
    return cache


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return fp8 as bytes, which torch can index on the CPU."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def stored_as(x: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    most = torch.finfo(dtype).max
    return (x.float() / (1 if scale is None else scale[:, None])).clamp(-most, most).to(dtype)


def put(
    cache: torch.Tensor, table: torch.Tensor, position: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> None:
    """Write ``[tokens, kv_heads, dim]`` in the cache's dtype at the positions of a row."""
    size = cache.shape[3]
    blocks = table[position // size].long()
    for half, x in zip(raw(cache), (key, value), strict=True):
        half[blocks, :, position % size] = raw(x)


def attend_naively(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, context: int, spec: AttentionSpec, ask: Ask
) -> torch.Tensor:
    """Return attention of ``[new, heads, dim]`` over float64 ``[context + new, kv_heads, dim]``."""
    own = torch.arange(context, len(keys))[:, None]
    distance = torch.arange(len(keys)) - own
    group = spec.num_heads // spec.num_kv_heads
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys.repeat_interleave(group, 1)) * spec.scale
    if spec.soft_cap:
        scores = torch.tanh(scores / spec.soft_cap) * spec.soft_cap
    hidden = torch.arange(len(keys)) > torch.from_numpy(last_keys_of([(context, len(query))], ask.images))[:, None]
    if ask.window:
        hidden |= distance <= -ask.window
    if ask.chunk:
        hidden |= torch.arange(len(keys)) // ask.chunk != own // ask.chunk
    weights = scores.masked_fill(hidden, float("-inf")).exp()
    total = weights.sum(-1, keepdim=True)
    if spec.sinks is not None:
        total = total + spec.sinks.double().exp()[:, None, None]
    return torch.einsum("hqk,khd->qhd", weights / total, values.repeat_interleave(group, 1))


def run(backend: Any, case: Case) -> torch.Tensor:
    """Run one layer over a copy of the case's cache; the case can be run again."""
    return attend(backend, case, case.cache.clone())


def attend(backend: Any, case: Case, cache: torch.Tensor, plan: Any = None) -> torch.Tensor:
    """Run one layer without norms and rotation; ``plan``: by default the backend's plan of the case's batch."""
    parts = [part for part in (case.query, case.key, case.value) if part is not None]
    plan = backend.plan(case.batch) if plan is None else plan
    out: torch.Tensor = backend.attend(torch.cat(parts, 1), cache, plan, case.spec, None)
    return out
