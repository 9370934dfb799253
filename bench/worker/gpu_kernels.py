"""The smaller kernels of a step: cache write, norms, gates, sampling."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from quire.bench.worker.paged_case import HeadShape
from quire.bench.worker.record import Bench, free_memory
from quire.bench.worker.timing import Call
from quire.kernels.cache.fused_cache_write import CacheWrite, fused_cache_write
from quire.kernels.dense.gated_activation import gate
from quire.kernels.dense.rms_norm import add_rms_norm, rms_norm
from quire.kernels.sampling.sampling import sample
from quire.kernels.sampling.sampling_noise import uniform
from quire.kernels.sampling.sampling_stats import row_statistics

BLOCK_SIZE = 16


def cache_write(bench: Bench) -> None:
    """Measure rotating a step's queries and keys and writing keys and values to their slots; torch only writes."""
    heads = bench.pick(full=HeadShape(32, 8, 128), quick=HeadShape(32, 8, 128), dry=HeadShape(4, 2, 32))
    for num_tokens in bench.pick(full=(8192, 256, 1), quick=(8192,), dry=(9,)):
        _cache_writes(bench, num_tokens, heads)
        free_memory(bench.device)


def _cache_writes(bench: Bench, num_tokens: int, heads: HeadShape) -> None:
    dtype, device = bench.dtype, bench.device
    written = heads.key_bytes(num_tokens, dtype)
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    cache_shape = (2, num_blocks, BLOCK_SIZE, heads.num_kv_heads, heads.head_dim)
    caches = [torch.zeros(cache_shape, dtype=dtype, device=device) for _ in range(bench.clock.copies(2 * written))]
    slots = torch.randperm(num_blocks * BLOCK_SIZE, device=device)[:num_tokens]
    num_projected = heads.num_heads + 2 * heads.num_kv_heads
    qkv = torch.randn(num_tokens, num_projected, heads.head_dim, device=device).to(dtype)
    key, value = qkv[:, heads.num_heads :].chunk(2, 1)
    name = f"{num_tokens:,} tokens, {heads}"
    calls = [partial(_torch_write, key, value, cache, slots) for cache in caches]
    bench.measure(name, "torch", partial(list, calls), moved=2 * written)
    table = torch.randn(2, num_tokens, heads.head_dim, device=device).to(dtype)
    positions = torch.arange(num_tokens, device=device)

    def fused(cache: torch.Tensor) -> torch.Tensor:
        return fused_cache_write(
            CacheWrite(qkv, heads.num_heads, cache, slots, rotary_table=table, positions=positions)
        )

    bench.measure(f"{name}, rotated", "quire", lambda: _each(fused, caches), moved=2 * qkv.nbytes + table.nbytes)


def _torch_write(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    flat = cache.flatten(1, 2)
    flat[0].index_copy_(0, slots, key)
    flat[1].index_copy_(0, slots, value)


def _each(run: Callable[[torch.Tensor], object], tensors: Sequence[torch.Tensor]) -> list[Call]:
    return [partial(run, x) for x in tensors]


def ops(bench: Bench) -> None:
    """Measure norms and gates of a llama-3.1-8b layer."""
    width, inner = bench.pick(full=(4096, 14336), quick=(4096, 14336), dry=(64, 96))
    for num_tokens in bench.pick(full=(1, 128, 8192), quick=(128,), dry=(3,)):
        _norms(bench, num_tokens, width)
        _gates(bench, num_tokens, inner)
        free_memory(bench.device)


def _inputs(bench: Bench, *shape: int) -> list[torch.Tensor]:
    """Return enough input tensors to exceed the device's cache."""
    copies = bench.clock.copies(torch.Size(shape).numel() * bench.dtype.itemsize)
    return [torch.randn(shape, device=bench.device).to(bench.dtype) for _ in range(copies)]


def _norms(bench: Bench, num_tokens: int, width: int) -> None:
    xs = _inputs(bench, num_tokens, width)
    weight = torch.ones(width, dtype=bench.dtype, device=bench.device)
    residual = torch.zeros_like(xs[0])
    name, moved = f"rms_norm {num_tokens:,} x {width:,}", 2 * xs[0].nbytes
    bench.measure(name, "quire", lambda: _each(lambda x: rms_norm(x, weight, 1e-5), xs), moved=moved)
    bench.measure(name, "torch", lambda: _each(lambda x: F.rms_norm(x, (width,), weight, 1e-5), xs), moved=moved)

    def torch_add(x: torch.Tensor) -> None:
        residual.add_(x)
        F.rms_norm(residual, (width,), weight, 1e-5)

    name, moved = f"add_rms_norm {num_tokens:,} x {width:,}", 4 * xs[0].nbytes
    bench.measure(name, "quire", lambda: _each(lambda x: add_rms_norm(x, residual, weight, 1e-5), xs), moved=moved)
    bench.measure(name, "torch", lambda: _each(torch_add, xs), moved=moved)


def _gates(bench: Bench, num_tokens: int, inner: int) -> None:
    xs = _inputs(bench, num_tokens, 2 * inner)
    name, moved = f"silu gate {num_tokens:,} x {inner:,}", xs[0].nbytes * 3 // 2
    bench.measure(name, "quire", lambda: _each(lambda x: gate(x, "silu"), xs), moved=moved)
    bench.measure(name, "torch", lambda: _each(lambda x: F.silu(x[:, :inner]) * x[:, inner:], xs), moved=moved)


def sampling(bench: Bench) -> None:
    """Measure sampling: greedy, by temperature, and with top-k and top-p, for which torch sorts."""
    vocab = bench.pick(full=128256, quick=128256, dry=300)
    for rows in bench.pick(full=(1, 128, 256), quick=(128,), dry=(1,)):
        logits = 3 * torch.randn(rows, vocab, device=bench.device)
        _sampling_rows(bench, logits)
        del logits
        free_memory(bench.device)


def _sampling_rows(bench: Bench, logits: torch.Tensor) -> None:
    rows, device = len(logits), bench.device
    seeds = torch.arange(rows, device=device)
    ones, zeros = torch.ones(rows, device=device), torch.zeros(rows, device=device)
    none = torch.zeros(rows, dtype=torch.int32, device=device)

    def quire_call(top_k: torch.Tensor, top_p: torch.Tensor, cut: bool) -> Call:
        def call() -> None:
            statistics = row_statistics(logits)
            noise = uniform(seeds, seeds)
            sample(logits, noise, ones, top_k, top_p, zeros, any_top_k=cut, any_top_p=cut, statistics=statistics)

        return call

    name, read = f"{rows} x {logits.shape[1]:,}", logits.nbytes
    bench.measure(f"{name}, greedy", "quire", lambda: [lambda: row_statistics(logits)], read=read)
    bench.measure(f"{name}, greedy", "torch", lambda: [lambda: logits.argmax(-1)], read=read)
    bench.measure(f"{name}, temperature", "quire", lambda: [quire_call(none, ones, False)], read=read)
    bench.measure(f"{name}, temperature", "torch", lambda: [lambda: _torch_draw(logits.softmax(-1))], read=read)
    bench.measure(
        f"{name}, top-k 50 and top-p 0.9", "quire", lambda: [quire_call(none + 50, ones * 0.9, True)], read=read
    )
    bench.measure(
        f"{name}, top-k 50 and top-p 0.9", "torch", lambda: [lambda: _torch_cut(logits)], read=read, graph=False
    )


def _torch_draw(shares: torch.Tensor) -> torch.Tensor:
    """Draw by exponential noise, which needs no synchronisation with the host."""
    return (shares / torch.empty_like(shares).exponential_()).argmax(-1)


def _torch_cut(logits: torch.Tensor) -> torch.Tensor:
    best, order = logits.sort(dim=-1, descending=True)
    shares = best[:, :50].softmax(-1)
    shares = shares.masked_fill(shares.cumsum(-1) - shares >= 0.9, 0.0)
    return order.gather(-1, _torch_draw(shares).unsqueeze(-1))
