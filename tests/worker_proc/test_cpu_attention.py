"""The CPU backend against attention written out row by row, over caches whose unwritten slots are NaN."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from quire.worker_proc.attention import cpu_plan
from quire.worker_proc.attention.backend import AttentionBackend, AttentionSpec, StepBatch
from quire.worker_proc.attention.cpu import CpuBackend

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}

# (context, new tokens) of each row.
STEPS: dict[str, list[tuple[int, int]]] = {
    "one decode": [(9, 1)],
    "first tokens": [(0, 1), (0, 1)],
    "steady decode": [(20, 1), (17, 1), (31, 1), (22, 1)],
    "ragged decode": [(5, 1), (700, 1), (31, 1), (0, 1), (650, 1), (90, 1)],
    "whole prompts": [(0, 13), (0, 2), (0, 13)],
    "chunks": [(7, 7), (16, 16), (1, 3)],
    "long chunk over tiles": [(50, 300), (3, 256)],
    "mixed": [(40, 1), (0, 11), (12, 5), (900, 1), (0, 1), (16, 1), (13, 6)],
}
HEADS = [(4, 4, 8), (4, 2, 16), (6, 1, 8), (9, 3, 64)]


@dataclass
class Case:
    """Rows with their contexts already written, and this step's tensors."""

    batch: StepBatch
    cache: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    expected: torch.Tensor
    spec: AttentionSpec


def _batch(rows: list[tuple[int, int]], table: torch.Tensor, block_size: int) -> StepBatch:
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
    )


def _naive(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, context: int, scale: float) -> torch.Tensor:
    """``[new, heads, dim]`` against ``[context + new, kv_heads, dim]`` in float64, one head and query at a time."""
    out = torch.empty(query.shape, dtype=torch.float64)
    group = query.shape[1] // keys.shape[1]
    for i in range(query.shape[0]):
        for head in range(query.shape[1]):
            seen = slice(0, context + i + 1)
            k, v = keys[seen, head // group].double(), values[seen, head // group].double()
            out[i, head] = torch.softmax(k @ query[i, head].double() * scale, 0) @ v
    return out


def _case(rows: list[tuple[int, int]], heads: tuple[int, int, int], block_size: int, dtype: torch.dtype) -> Case:
    backend = CpuBackend()
    num_heads, kv_heads, dim = heads
    spec = AttentionSpec(num_heads, kv_heads, dim, dim**-0.5)
    generator = torch.Generator().manual_seed(3)
    blocks = [-(-(context + new) // block_size) for context, new in rows]
    # Entries that mean nothing hold an id far outside the pool; two blocks of nobody hold NaN as well.
    # Block 0 is zeros, as in the engine: nothing is ever written to it.
    table = torch.full((len(rows), max(blocks) + 1), 10**6, dtype=torch.int32)
    ids = torch.randperm(sum(blocks) + 2, generator=generator).int()[: sum(blocks)] + 1
    for row, own in enumerate(ids.split(blocks)):
        table[row, : len(own)] = own
    cache = torch.full(backend.kv_cache_shape(sum(blocks) + 3, block_size, kv_heads, dim), float("nan"), dtype=dtype)
    cache[:, 0] = 0.0

    def random(count: int, width: int) -> torch.Tensor:
        return torch.randn(count, width, dim, generator=generator).to(dtype)

    keys = [random(context + new, kv_heads) for context, new in rows]
    values = [random(context + new, kv_heads) for context, new in rows]
    queries = [random(new, num_heads) for _, new in rows]
    before = [(0, context) for context, _ in rows]
    written = torch.cat([k[:context] for k, (context, _) in zip(keys, rows, strict=True)])
    if len(written):
        plan = backend.plan(_batch(before, table, block_size))
        old_values = torch.cat([v[:context] for v, (context, _) in zip(values, rows, strict=True)])
        backend.forward(random(len(written), num_heads), written, old_values, cache, plan, spec)
    expected = [
        _naive(q, k, v, context, spec.scale) for q, k, v, (context, _) in zip(queries, keys, values, rows, strict=True)
    ]
    return Case(
        _batch(rows, table, block_size),
        cache,
        torch.cat(queries),
        torch.cat([k[context:] for k, (context, _) in zip(keys, rows, strict=True)]),
        torch.cat([v[context:] for v, (context, _) in zip(values, rows, strict=True)]),
        torch.cat(expected),
        spec,
    )


def _by_slot(cache: torch.Tensor) -> torch.Tensor:
    """``[2, slots, kv_heads, head_dim]`` of a cache."""
    return cache.transpose(2, 3).flatten(1, 2)


def _run(case: Case) -> torch.Tensor:
    backend: AttentionBackend = CpuBackend()
    plan = backend.plan(case.batch)
    return backend.forward(case.query, case.key, case.value, case.cache, plan, case.spec)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("step", [name for name in STEPS if name != "long chunk over tiles"])
def test_equals_attention_row_by_row(
    step: str, heads: tuple[int, int, int], block_size: int, dtype: torch.dtype
) -> None:
    case = _case(STEPS[step], heads, block_size, dtype)
    out = _run(case)
    assert out.dtype is dtype and out.shape == case.query.shape
    torch.testing.assert_close(out.double(), case.expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_a_chunk_longer_than_a_tile_of_queries() -> None:
    case = _case(STEPS["long chunk over tiles"], (2, 1, 8), 16, torch.float32)
    torch.testing.assert_close(_run(case).double(), case.expected, atol=2e-5, rtol=2e-5)


def test_keys_and_values_are_written_where_the_slots_say_and_nowhere_else() -> None:
    case = _case(STEPS["mixed"], (4, 2, 16), 4, torch.float32)
    before = case.cache.clone()
    _run(case)
    keys, values = _by_slot(case.cache)
    assert torch.equal(keys[case.batch.slot_mapping], case.key)
    assert torch.equal(values[case.batch.slot_mapping], case.value)
    untouched = torch.ones(len(keys), dtype=torch.bool)
    untouched[case.batch.slot_mapping] = False
    for now, old in zip((keys, values), _by_slot(before), strict=True):
        torch.testing.assert_close(now[untouched], old[untouched], rtol=0, atol=0, equal_nan=True)


def test_padding_tokens_are_not_written_and_come_out_finite() -> None:
    case = _case([(9, 1), (14, 1)], (4, 2, 16), 4, torch.float32)
    before = case.cache.clone()
    padded = [torch.cat([x, torch.full((3, *x.shape[1:]), float("nan"))]) for x in (case.query, case.key, case.value)]
    slots = torch.cat([case.batch.slot_mapping, torch.full((3,), -1)])
    batch = StepBatch(
        case.batch.query_start_loc,
        case.batch.seq_lens,
        case.batch.block_table,
        slots,
        case.batch.query_lens_cpu,
        case.batch.seq_lens_cpu,
        4,
    )
    backend = CpuBackend()
    out = backend.forward(*padded, case.cache, backend.plan(batch), case.spec)
    torch.testing.assert_close(out[:2].double(), case.expected, atol=2e-5, rtol=2e-5)
    assert torch.equal(out[2:], torch.zeros(3, 4, 16))
    changed = ~torch.isclose(_by_slot(before), _by_slot(case.cache), equal_nan=True).flatten(2).all(2).all(0)
    assert torch.equal(changed.nonzero().view(-1), case.batch.slot_mapping.sort().values)


def test_a_bfloat16_cache_serves_float32_activations() -> None:
    case = _case(STEPS["mixed"], (4, 2, 16), 16, torch.bfloat16)
    case.query, case.key, case.value = case.query.float(), case.key.float(), case.value.float()
    out = _run(case)
    assert out.dtype is torch.float32 and case.cache.dtype is torch.bfloat16
    torch.testing.assert_close(out.double(), case.expected, atol=2e-5, rtol=2e-5)


def test_one_plan_serves_several_layers() -> None:
    case = _case(STEPS["mixed"], (4, 2, 16), 16, torch.float32)
    backend = CpuBackend()
    plan = backend.plan(case.batch)
    caches = [case.cache.clone(), case.cache.clone()]
    outs = [backend.forward(case.query, case.key, case.value, cache, plan, case.spec) for cache in caches]
    assert torch.equal(outs[0], outs[1])
    torch.testing.assert_close(caches[0], caches[1], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("spread", [1, 10, 4000])
def test_tiles_hold_every_row_once_and_bound_padding_and_size(spread: int) -> None:
    lengths = np.random.default_rng(0).integers(1, 1 + spread, 200)
    token_bytes = 2 * 3 * 64 * 4
    order, tiles = cpu_plan._cut_tiles(lengths, token_bytes)
    assert sorted(np.concatenate([order[rows] for rows in tiles]).tolist()) == list(range(200))
    for rows in tiles:
        members = lengths[order[rows]]
        padded = int(members.max()) * len(members) * token_bytes
        assert padded <= members.sum() * token_bytes * cpu_plan.PADDED_WORK + cpu_plan.TILE_OVERHEAD_BYTES
        assert len(members) == 1 or padded <= cpu_plan.TILE_BYTES_PER_THREAD * torch.get_num_threads()
    assert len(tiles) < 20 + lengths.sum() * token_bytes / cpu_plan.TILE_BYTES_PER_THREAD * 1.5


def test_rows_that_fit_one_tile_keep_their_order() -> None:
    order, tiles = cpu_plan._cut_tiles(np.array([5, 9, 7]), 1536)
    assert order.tolist() == [0, 1, 2] and tiles == [slice(0, 3)]


def test_a_steady_batch_in_many_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_plan, "TILE_BYTES_PER_THREAD", 1 << 14)
    case = _case([(20 + 7 * i % 60, 1) for i in range(12)], (4, 2, 16), 16, torch.float32)
    torch.testing.assert_close(_run(case).double(), case.expected, atol=2e-5, rtol=2e-5)
