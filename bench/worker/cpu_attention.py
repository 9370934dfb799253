"""Paged attention on a CPU: Quire's C++, Quire's implementation with torch's operators, and a simple loop."""

import dataclasses
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from quire.bench.worker.gpu_attention import prefill_flops
from quire.bench.worker.paged_case import HeadShape, PagedCase, make_case
from quire.bench.worker.record import Bench
from quire.bench.worker.timing import Call
from quire.worker_proc.attention.backend import AttentionSpec, SharedPrefix
from quire.worker_proc.attention.cpu import CpuBackend

SMOLLM, SMALL = HeadShape(9, 3, 64), HeadShape(16, 8, 64)
QWEN, LLAMA = HeadShape(16, 8, 128), HeadShape(32, 8, 128)
OWN_TOKENS = 16
"""Tokens of each row after a shared prefix."""

CACHES = (torch.float32, torch.bfloat16)
"""Dtypes of the KV cache; queries are float32, like the worker's activations."""


def cpu_attention(bench: Bench) -> None:
    """Measure decoding, whose work is one read of each key and value."""
    for rows, length in bench.pick(full=((32, 1024), (1, 32768)), quick=((32, 1024),), dry=((2, 40),)):
        for heads in bench.pick(full=(SMOLLM, SMALL), quick=(SMOLLM,), dry=(SMOLLM,)):
            for dtype in CACHES:
                num_bytes = heads.key_bytes(rows * length, dtype)
                case = make_case(
                    [1] * rows,
                    [length] * rows,
                    heads,
                    dtype,
                    bench.device,
                    bench.clock.copies(num_bytes),
                    query_dtype=torch.float32,
                    head_major=True,
                )
                name = f"{rows} x {length:,}, {heads}, {_name(dtype)}"
                for implementation, calls in _implementations(case, spec_of(heads)).items():
                    bench.measure(name, implementation, partial(list, calls), read=num_bytes)


def cpu_shared_prefix(bench: Bench) -> None:
    """Measure decoding of rows that share a prefix, with one pass over it and row by row, alternating."""
    native = CpuBackend()
    if "native," not in native.describe():
        return
    cases = bench.pick(
        full=((64, 8192), (64, 1024), (64, 256), (8, 8192), (8, 1024), (2, 8192), (2, 1024), (2, 256)),
        quick=((64, 8192),),
        dry=((2, 256),),
    )
    for rows, length in cases:
        for heads in bench.pick(full=(SMOLLM, QWEN, LLAMA), quick=(SMOLLM,), dry=(SMOLLM,)):
            for dtype in CACHES:
                case = make_case(
                    [1] * rows,
                    [length + OWN_TOKENS] * rows,
                    heads,
                    dtype,
                    bench.device,
                    1,
                    query_dtype=torch.float32,
                    head_major=True,
                )
                (table,) = case.tables
                table[:, : length // heads.block_size] = table[0, : length // heads.block_size]
                batch = case.batch(table)
                shared = dataclasses.replace(batch, prefixes=(SharedPrefix(np.arange(rows), length),))
                calls = [
                    partial(native.attend, case.query, case.kv_cache, native.plan(each), spec_of(heads), None)
                    for each in (shared, batch)
                ]
                bench.compare(f"{rows} x {length:,}, {heads}, {_name(dtype)}", ("quire", "row by row"), calls)


def cpu_prefill(bench: Bench) -> None:
    """Measure the prefill of a prompt without cached blocks."""
    length = bench.pick(full=512, quick=512, dry=20)
    for heads in bench.pick(full=(SMOLLM, SMALL), quick=(SMOLLM,), dry=(SMOLLM,)):
        case = make_case([length], [length], heads, torch.float32, bench.device, 1, head_major=True)
        flops = prefill_flops(1, length, length, heads)
        name = f"1 x {length:,}, {heads}, float32"
        for implementation, calls in _implementations(case, spec_of(heads)).items():
            bench.measure(name, implementation, partial(list, calls), flops=flops, dtype=torch.float32)


def spec_of(heads: HeadShape) -> AttentionSpec:
    return AttentionSpec(heads.num_heads, heads.num_kv_heads, heads.head_dim, heads.head_dim**-0.5)


def _implementations(case: PagedCase, spec: AttentionSpec) -> dict[str, list[Call]]:
    native, plain = CpuBackend(), CpuBackend(native=False)
    found = {} if "native," not in native.describe() else {"quire": _backend(native, case, spec)}
    return found | {
        "quire, torch": _backend(plain, case, spec),
        "gather and SDPA": [partial(gather_and_attend, case, table) for table in case.tables],
    }


def _backend(backend: CpuBackend, case: PagedCase, spec: AttentionSpec) -> list[Call]:
    """Return a layer's attention calls. The plan is built here once; in the engine once per step."""
    plans = [backend.plan(case.batch(table)) for table in case.tables]
    return [partial(backend.attend, case.query, case.kv_cache, plan, spec, None) for plan in plans]


def gather_and_attend(case: PagedCase, table: torch.Tensor) -> torch.Tensor:
    """Gather each request's blocks and call torch's attention. Returns ``[num_tokens, num_heads, head_dim]``."""
    out = torch.empty_like(case.query)
    start = 0
    for row, (count, length) in enumerate(zip(case.query_lens_cpu.tolist(), case.seq_lens_cpu.tolist(), strict=True)):
        blocks = table[row, : -(-length // case.heads.block_size)]
        gathered = case.kv_cache[:, blocks].transpose(1, 2).flatten(2, 3)[:, :, :length].to(case.query.dtype)
        query = case.query[start : start + count].transpose(0, 1).unsqueeze(0)
        keys, values = gathered.unsqueeze(1)
        attended = F.scaled_dot_product_attention(query, keys, values, is_causal=count > 1, enable_gqa=True)
        out[start : start + count] = attended[0].transpose(0, 1)
        start += count
    return out


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
