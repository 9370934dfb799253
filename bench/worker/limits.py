"""Limits of the device (memory bandwidth, matrix rate), measured with torch's operators in the same run."""

import torch

from quire.bench.worker.record import CaseResult, Limits, Size
from quire.bench.worker.timing import CallTimer

_BYTES = {"cuda": 1 << 32, "cpu": 1 << 28}
_PRODUCT = {"cuda": 8192, "cpu": 1024}
_DTYPES = {"cuda": (torch.bfloat16,), "cpu": (torch.float32, torch.bfloat16)}


def measure_limits(device: torch.device, clock: CallTimer, size: Size) -> tuple[Limits, list[CaseResult]]:
    """Measure the limits; return them, and the rows that report them."""
    dry = size == "dry"
    num_bytes = 1 << 16 if dry else _BYTES[device.type]
    read_s, copy_s = _stream_seconds(clock, num_bytes)
    limits = Limits(num_bytes / read_s, 2 * num_bytes / copy_s, {})
    rows = [
        CaseResult(f"read {num_bytes >> 20:,} MiB", "torch", read_s * 1e6, {"gb_per_s": limits.read / 1e9}),
        CaseResult(f"copy {num_bytes >> 20:,} MiB", "torch", copy_s * 1e6, {"gb_per_s": limits.copy / 1e9}),
    ]
    rates: dict[torch.dtype, float] = {}
    edge = 64 if dry else _PRODUCT[device.type]
    for dtype in _DTYPES[device.type]:
        seconds = _product_seconds(clock, edge, dtype)
        rates[dtype] = 2 * edge**3 / seconds
        name = str(dtype).removeprefix("torch.")
        rows.append(CaseResult(f"product {edge}³ {name}", "torch", seconds * 1e6, {"tflop_per_s": rates[dtype] / 1e12}))
    return Limits(limits.read, limits.copy, rates), rows


def _stream_seconds(clock: CallTimer, num_bytes: int) -> tuple[float, float]:
    """Return the seconds to read ``num_bytes``, by the faster of two reductions, and to copy them."""
    source = torch.ones(num_bytes // 4, dtype=torch.float32, device=clock.device)
    target = torch.empty_like(source)
    read_s = min(clock.best_seconds([source.sum]), clock.best_seconds([source.amax]))
    return read_s, clock.best_seconds([lambda: target.copy_(source)])


def _product_seconds(clock: CallTimer, edge: int, dtype: torch.dtype) -> float:
    # Random numbers: zeros need less power, so a GPU multiplies them faster.
    left, right = torch.randn(2, edge, edge, device=clock.device).to(dtype)
    return clock.best_seconds([lambda: left @ right])
