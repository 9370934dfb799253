"""Copies of KV blocks between a GPU and pinned memory, and their parts."""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from quire.bench.worker.record import Bench
from quire.kernels.cache.block_copy import CacheSet
from quire.kernels.cache.block_staging import bytes_of_block, gather_blocks, scatter_blocks
from quire.protocol.model.kv_layout import kv_layout
from quire.worker_proc.transfers.gpu import GpuCopier

BLOCK_SIZE = 16


def gpu_transfer(bench: Bench) -> None:
    """Measure gathering and scattering blocks in random order, then whole copies in turn with plain ones.

    torch needs a call for the keys and one for the values of each layer.
    """
    model = bench.models["smollm2-135m" if bench.size == "dry" else "llama-3.1-8b"]
    layout = kv_layout(model, BLOCK_SIZE, "bfloat16")
    pool = bench.pick(full=2000, quick=1000, dry=4)
    num_layers = bench.pick(full=model.num_layers, quick=model.num_layers, dry=1)
    shape = (2, pool, layout.block_bytes // (4 * model.num_layers))
    caches = CacheSet.of([torch.zeros(shape, dtype=torch.bfloat16, device=bench.device) for _ in range(num_layers)])
    for count in bench.pick(full=(1, 4, 64), quick=(4,), dry=(2,)):
        case = f"{count} blocks, {count * bytes_of_block(caches) / 2**20:.0f} MiB"
        ids = torch.randperm(pool - 1, device=bench.device)[:count] + 1
        _measure_kernel(bench, caches, ids, case)
        if bench.device.type == "cuda":
            _measure_copies(bench, caches, ids, case)


def _measure_kernel(bench: Bench, caches: CacheSet, ids: torch.Tensor, case: str) -> None:
    staging = torch.empty((len(ids), bytes_of_block(caches)), dtype=torch.uint8, device=bench.device)
    halves = [half for cache in caches.caches for half in cache]
    parts = [torch.empty_like(half[: len(ids)]) for half in halves]

    def torch_gather() -> None:
        for half, part in zip(halves, parts, strict=True):
            torch.index_select(half, 0, ids, out=part)

    def torch_scatter() -> None:
        for half, part in zip(halves, parts, strict=True):
            half.index_copy_(0, ids, part)

    moved = 2 * staging.nbytes
    calls: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "gather": (partial(gather_blocks, caches, ids, staging), torch_gather),
        "scatter": (partial(scatter_blocks, caches, ids, staging), torch_scatter),
    }
    for name, (own, torch_call) in calls.items():
        bench.measure(f"{name} {case}", "quire", lambda own=own: [own], moved=moved)  # type: ignore[misc]
        bench.measure(f"{name} {case}", "torch", lambda call=torch_call: [call], moved=moved)  # type: ignore[misc]


def _measure_copies(bench: Bench, caches: CacheSet, ids: torch.Tensor, case: str) -> None:
    copier = GpuCopier([caches], len(ids) * bytes_of_block(caches))
    lines = torch.empty((len(ids), bytes_of_block(caches)), dtype=torch.uint8, pin_memory=True)
    buffer, numbers = torch.empty_like(lines, device=bench.device), ids.cpu().numpy().astype(np.int64)

    def plain(target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(bench.device)

    calls: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "to the host": (partial(copier.store, 0, numbers, lines), partial(plain, lines, buffer)),
        "to the GPU": (partial(copier.load, 0, numbers, lines), partial(plain, buffer, lines)),
    }
    for name, pair in calls.items():
        bench.require_time()
        for implementation, seconds in zip(("quire", "plain copy"), bench.clock.alternating(pair), strict=True):
            bench.note(f"{name} {case}", implementation, seconds, gb_per_s=lines.nbytes / seconds / 1e9)
