"""Paged attention on a GPU: decoding over a grid of shapes, an uneven batch, and prefill."""

from collections.abc import Sequence
from functools import partial

import torch.nn.functional as F

from quire.bench.worker.paged_case import HeadShape, PagedCase, make_case
from quire.bench.worker.record import Bench, free_memory
from quire.bench.worker.timing import Call
from quire.kernels.attention.attention_decode import allocate_decode, plan_decode
from quire.kernels.attention.attention_plan import AttentionPlan, plan_attention
from quire.kernels.attention.attention_tiles import AttentionShape
from quire.kernels.attention.paged_attention import prepare_attention
from quire.kernels.common.fp8 import as_bits

LLAMA = HeadShape(32, 8, 128)
TINY = HeadShape(4, 2, 32)

_LLAMA_LENGTHS = {
    1: (1024, 8192, 32768, 131072),
    8: (1024, 8192, 32768),
    32: (1024, 8192),
    64: (1024, 8192),
    128: (1024, 8192),
    256: (1024,),
}
# (rows, tokens per row, heads)
DECODE = [(rows, length, LLAMA) for rows, lengths in _LLAMA_LENGTHS.items() for length in lengths] + [
    (32, 8192, HeadShape(32, 8, 128, 32)),
    (32, 8192, HeadShape(32, 8, 128, 64)),
    (64, 1024, HeadShape(16, 8, 128)),
    (256, 1024, HeadShape(16, 8, 128)),
    (64, 2048, HeadShape(9, 3, 64)),
    (32, 4096, HeadShape(64, 8, 64)),
]
QUICK_DECODE = [(1, 8192, LLAMA), (32, 1024, LLAMA), (64, 8192, LLAMA), (128, 8192, LLAMA), (256, 1024, LLAMA)]

# (rows, computed tokens per row, all tokens per row)
PREFILL = [(1, 512, 512), (1, 2048, 2048), (4, 2048, 2048), (1, 8192, 8192), (1, 2048, 16384)]
QUICK_PREFILL = [(1, 2048, 2048), (1, 2048, 16384)]


def decode(case: PagedCase) -> list[Call]:
    """Return the launches of one layer, with a plan as a captured step builds it once for all layers."""
    buffers = allocate_decode(_shape(case), len(case.seq_lens), case.query.device)
    return _attend(case, plan_decode(buffers, case.query_start_loc, case.seq_lens))


def prefill(case: PagedCase) -> list[Call]:
    """Return the launches of one layer, with a plan from the lengths on the host."""
    return _attend(case, plan_attention(case.query_lens_cpu, case.seq_lens_cpu, _shape(case), case.query.device))


def _attend(case: PagedCase, plan: AttentionPlan) -> list[Call]:
    rows = (case.query_start_loc, case.seq_lens, plan, case.heads.head_dim**-0.5)
    prepared = [prepare_attention(case.query, case.kv_cache, table, *rows) for table in case.tables]
    return [partial(attend, case.query, as_bits(case.kv_cache)) for attend in prepared]


def _shape(case: PagedCase) -> AttentionShape:
    heads = case.heads
    return AttentionShape(heads.num_heads, heads.num_kv_heads, heads.head_dim, case.query.dtype)


def dense_decode(case: PagedCase) -> list[Call]:
    """Return calls of torch's attention over contiguous keys, with a group's heads in the query dimension."""
    query = case.query.view(len(case.query), case.heads.num_kv_heads, -1, case.heads.head_dim)
    dense = [case.dense(copy).transpose(2, 3) for copy in range(len(case.tables))]
    return [partial(F.scaled_dot_product_attention, query, keys, values) for keys, values in dense]


def decode_attention(bench: Bench) -> None:
    shapes = bench.pick(full=DECODE, quick=QUICK_DECODE, dry=[(2, 32, TINY)])
    for rows, length, heads in shapes:
        num_bytes = heads.key_bytes(rows * length, bench.dtype)
        case = _decode_case(bench, [length] * rows, heads)
        name = f"{rows} x {length:,}, {heads}, blocks of {heads.block_size}"
        for implementation, make in ({"quire": decode, "SDPA, dense": dense_decode} | bench.rivals).items():
            bench.measure(name, implementation, partial(make, case), read=num_bytes)
        del case
        free_memory(bench.device)


def uneven_attention(bench: Bench) -> None:
    """Compare one long row beside short ones with the same number of equal rows and the same total of keys."""
    long, short, count = bench.pick(full=(131072, 4096, 31), quick=(131072, 4096, 31), dry=(32, 16, 1))
    heads = bench.pick(full=LLAMA, quick=LLAMA, dry=TINY)
    total = long + short * count
    batches = {
        f"1 x {long:,} and {count} x {short:,}": [long] + [short] * count,
        f"{count + 1} x {total // (count + 1):,}": [total // (count + 1)] * (count + 1),
    }
    results = []
    for name, lens in batches.items():
        case = _decode_case(bench, lens, heads)
        num_bytes = heads.key_bytes(sum(lens), bench.dtype)
        results.append(bench.measure(name, "quire", partial(decode, case), read=num_bytes))
        del case
        free_memory(bench.device)
    uneven, even = results
    if uneven.us and even.us:
        uneven.figures["times_even"] = uneven.us / even.us


def prefill_attention(bench: Bench) -> None:
    shapes = bench.pick(full=PREFILL, quick=QUICK_PREFILL, dry=[(1, 10, 10)])
    heads = bench.pick(full=LLAMA, quick=LLAMA, dry=TINY)
    for rows, query_len, length in shapes:
        case = make_case([query_len] * rows, [length] * rows, heads, bench.dtype, bench.device, 1)
        flops = prefill_flops(rows, query_len, length, heads)
        name = f"{rows} x {query_len:,} of {length:,}, {heads}"
        bench.measure(name, "quire", partial(prefill, case), flops=flops, dtype=bench.dtype)
        if query_len == length:
            bench.measure(name, "SDPA, dense", partial(dense_prefill, case), flops=flops, dtype=bench.dtype)
        del case
        free_memory(bench.device)


def prefill_flops(rows: int, query_len: int, length: int, heads: HeadShape) -> float:
    """Return the floating point operations of both products, over the keys visible to each query."""
    pairs = query_len * length - query_len * (query_len - 1) // 2
    return 4.0 * rows * pairs * heads.num_heads * heads.head_dim


def dense_prefill(case: PagedCase) -> list[Call]:
    rows = len(case.seq_lens_cpu)
    query = case.query.view(rows, -1, *case.query.shape[1:]).transpose(1, 2)
    keys, values = case.dense(0).transpose(2, 3)
    return [partial(F.scaled_dot_product_attention, query, keys, values, is_causal=True, enable_gqa=True)]


def _decode_case(bench: Bench, lens: Sequence[int], heads: HeadShape) -> PagedCase:
    copies = bench.clock.copies(heads.key_bytes(sum(lens), bench.dtype))
    return make_case([1] * len(lens), lens, heads, bench.dtype, bench.device, copies)
