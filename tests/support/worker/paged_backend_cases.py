"""Cases that every attention backend over a paged library must pass, including rows that end at a page boundary."""

import dataclasses
from typing import Any

import torch
from cpu_attention_cases import OUTSIDE, Ask, Case, Rows, attend, raw
from dense_attention import DenseBackend

from quire.worker_proc.attention.backend import AttentionSpec, Rotary

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3}

STEPS: dict[str, Rows] = {
    "one decode": [(9, 1)],
    "steady decode": [(20, 1), (300, 1), (0, 1), (23, 1)],
    "whole prompts": [(0, 13), (0, 2), (0, 13)],
    "mixed": [(40, 1), (0, 11), (11, 5), (270, 1), (0, 1), (256, 6)],
}
PLAIN = Ask()
ASKS = {
    "plain": PLAIN,
    "window of one": Ask(window=1),
    "wide window": Ask(window=260),
    "window and cap": Ask(window=17, soft_cap=3.0),
}


def in_pages(case: Case) -> Case:
    """Return the cache in the libraries' layout; hidden positions of a row's first visible block are written."""
    cache, batch = raw(case.cache).transpose(2, 3).contiguous(), case.batch
    for row, first in enumerate(batch.first_visible.tolist()):
        cache[:, batch.block_table[row, first // batch.block_size], : first % batch.block_size] = 50
    return dataclasses.replace(case, cache=cache.view(case.cache.dtype))


def check(backend: Any, case: Case, plan: Any = None) -> None:
    out = attend(backend, case, case.cache, plan)
    assert out.dtype is case.query.dtype and out.shape == case.query.shape
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(out.double().cpu(), case.expected, atol=tolerance, rtol=tolerance)


def check_attend(backend: Any, case: Case) -> None:
    """Run norms, rotation, cache write and attention; layers with queries alone read the existing cache."""
    qkv, spec, rotary = projection(case)
    caches = [case.cache.nan_to_num(0.0) for _ in range(2)]
    dense = DenseBackend()
    case.batch.block_table[case.batch.block_table == OUTSIDE] = 0
    out = backend.attend(qkv.clone(), caches[0], backend.plan(case.batch), spec, rotary)
    expected = dense.attend(qkv.clone(), caches[1], dense.plan(case.batch), spec, rotary)
    torch.testing.assert_close(out, expected, atol=4e-3, rtol=4e-3)
    torch.testing.assert_close(caches[0], caches[1], atol=4e-3, rtol=4e-3)
    queries = backend.attend(qkv[:, : spec.num_heads].clone(), caches[0], backend.plan(case.batch), spec, rotary)
    torch.testing.assert_close(queries, out)


def projection(case: Case) -> tuple[torch.Tensor, AttentionSpec, Rotary]:
    """Inputs of ``attend`` for a layer with head norms and rotation."""
    generator = torch.Generator().manual_seed(5)
    spec, tokens = case.spec, len(case.query)
    width = spec.num_heads + 2 * spec.num_kv_heads
    qkv = torch.randn(tokens, width, spec.head_dim, generator=generator).half()
    weights = [1 + 0.1 * torch.randn(spec.head_dim, generator=generator).half() for _ in range(2)]
    angles = torch.randn(400, spec.head_dim // 2, generator=generator)
    sines = torch.cat([-angles.sin(), angles.sin()], -1)
    table = torch.stack([torch.cat([angles.cos(), angles.cos()], -1), sines]).half()
    rows = zip(case.batch.query_lens_cpu.tolist(), case.batch.seq_lens_cpu.tolist(), strict=True)
    positions = torch.cat([torch.arange(total - new, total) for new, total in rows])
    return qkv, dataclasses.replace(spec, q_norm=weights[0], k_norm=weights[1]), Rotary(table, positions)


def on_gpu(case: Case) -> Case:
    """Unused table entries are the null block, as in the engine."""
    batch = case.batch
    batch.block_table[batch.block_table == OUTSIDE] = 0
    fields = ("query_start_loc", "seq_lens", "block_table", "slot_mapping")
    moved = dataclasses.replace(batch, **{field: getattr(batch, field).cuda() for field in fields})
    tensors = {field: getattr(case, field).cuda() for field in ("cache", "query", "key", "value")}
    return dataclasses.replace(case, batch=moved, **tensors)
