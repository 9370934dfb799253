"""Whole decode steps on a GPU: compared with a lower bound, with eager launches, and with a static cache."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from quire.bench.worker.cpu_layers import layer_shapes
from quire.bench.worker.record import Bench, Limits, describe, free_memory
from quire.bench.worker.static_step import static_step
from quire.bench.worker.step_driver import BLOCK_SIZE, DriverTimes, StepDriver, dummy_model, sized
from quire.bench.worker.timing import elapsed
from quire.kernels.common.triton_runtime import require_launchable
from quire.protocol.model.kv_layout import kv_layout
from quire.protocol.model.model_config import ModelConfig
from quire.worker_proc.attention.triton_backend import TritonBackend
from quire.worker_proc.models.decoder import Decoder
from quire.worker_proc.models.triton_ops import TritonOps

QUIRE, EAGER, STATIC = "quire", "quire, eager", "static cache, one graph"


@dataclass(frozen=True, slots=True)
class Steps:
    """Numbers of steps; rows have room for all of them."""

    warm_up: int
    timed: int
    replays: int

    @property
    def room(self) -> int:
        return 2 * (self.warm_up + self.timed) + self.replays + 8


def decode_step(bench: Bench) -> None:
    """Measure decode steps of llama-3.1-8b at 1,024 tokens."""
    batches = bench.pick(full=(1, 32, 128), quick=(1, 128), dry=(2,))
    length, steps = bench.pick(full=(1024, Steps(8, 48, 32)), quick=(1024, Steps(4, 24, 16)), dry=(12, Steps(1, 1, 1)))
    model, driver = _make("llama-3.1-8b", bench, max(batches), length + steps.room)
    for name, _, times, _ in _timed(bench, model, driver, batches, length, steps):
        bench.note(name, EAGER, times.wall, cpu_us=times.cpu * 1e6)
    driver.empty()
    driver.runner.warm_up()
    for name, rows, times, floor in _timed(bench, model, driver, batches, length, steps):
        figures = {"of_floor": floor / times.wall, "floor_us": floor * 1e6, "cpu_us": times.cpu * 1e6}
        bench.note(name, QUIRE, times.wall, **figures, **_device_figures(driver, rows, steps.replays))
    driver.empty()
    del driver
    free_memory(bench.device)
    for rows in batches:
        bench.require_time()
        # The mean length of Quire's rows over the measured steps.
        make = partial(static_step, model, rows, length + steps.room // 2, bench.dtype, bench.device)
        bench.measure(f"{rows} x {length:,}", STATIC, make)
        free_memory(bench.device)


def _make(name: str, bench: Bench, max_rows: int, max_len: int) -> tuple[Decoder, StepDriver]:
    require_launchable(bench.device.type)
    model = dummy_model(sized(bench.models[name], bench.size), bench.dtype, bench.device, max_len, TritonOps())
    return model, StepDriver(model, bench.dtype, bench.device, TritonBackend(max_rows), max_rows, max_len)


def _timed(
    bench: Bench, model: Decoder, driver: StepDriver, batches: tuple[int, ...], length: int, steps: Steps
) -> Iterator[tuple[str, int, DriverTimes, float]]:
    """Yield (case, rows, a step's times, its floor in seconds) for each batch, while the driver holds the batch."""
    for rows in batches:
        bench.require_time()
        driver.fill(rows, length)
        driver.steady(steps.warm_up)
        times = driver.steady(steps.timed)
        floor = floor_s(model.config, rows, length + steps.room // 2, bench.dtype, bench.limits)
        yield f"{rows} x {length:,}", rows, times, floor


def _device_figures(driver: StepDriver, rows: int, replays: int) -> dict[str, float]:
    """Time the CUDA graph alone; empty without graphs. The runner's rows are stale afterwards."""
    steady = driver.runner.steady
    if steady is None or not driver.has_graphs:
        return {}
    graphs = steady.graphs

    def replay() -> None:
        for _ in range(replays):
            graphs.run(rows, sampling=True)

    return {"graph_us": elapsed(replay) * 1e6 / replays}


def floor_s(model: ModelConfig, rows: int, length: int, dtype: torch.dtype, limits: Limits) -> float:
    """Return a lower bound of a step's time.

    Each weight is read once, or multiplied at the matrix rate if that takes longer. Each row's keys and values are read
    once. These are separate kernels, so their times add.
    """
    sizes = [outputs * inputs for outputs, inputs in layer_shapes(model)] * model.num_layers
    sizes.append(model.hidden_size * model.vocab_size)
    rate = max(limits.matmul.values())
    products = sum(max(size * dtype.itemsize / limits.read, 2 * size * rows / rate) for size in sizes)
    layout = kv_layout(model, BLOCK_SIZE, str(dtype).removeprefix("torch."))
    per_token = sum(layout.token_bytes(group) * len(group.layers) for group in layout.groups)
    return products + rows * length * per_token / limits.read


def steady_step(bench: Bench) -> None:
    """Measure the worker's CPU time per step, which is independent of the model's size, and the GPU's utilisation."""
    batches = bench.pick(full=(1, 64, 256), quick=(1, 256), dry=(2,))
    length, steps = bench.pick(full=(512, Steps(8, 96, 32)), quick=(512, Steps(4, 32, 16)), dry=(8, Steps(1, 1, 1)))
    model, driver = _make("qwen3-0.6b", bench, max(batches), length + steps.room)
    driver.runner.warm_up()
    for name, rows, times, floor in _timed(bench, model, driver, batches, length, steps):
        figures = {"cpu_us": times.cpu * 1e6, "of_floor": floor / times.wall}
        if bench.device.type == "cuda":
            figures |= _busy_figures(driver, steps)
        figures |= _device_figures(driver, rows, steps.replays)
        bench.note(name, QUIRE, times.wall, **figures)


def _busy_figures(driver: StepDriver, steps: Steps) -> dict[str, float]:
    """Return the share of time in which a kernel ran, over steady decode steps; empty if torch's profiler fails."""
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            driver.steady(steps.timed)
            torch.cuda.synchronize()
        spans = sorted(
            (event.time_range.start, event.time_range.end)
            for event in profile.events()
            if event.device_type.name == "CUDA"
        )
    except RuntimeError as error:
        print(f"no profile: {describe(error)}", flush=True)
        return {}
    return {} if not spans else {"busy_share": covered_share(spans)}


def covered_share(spans: list[tuple[float, float]]) -> float:
    """Return the share of the time from the first start to the last end that lies in a span.

    ``spans`` are sorted by start.
    """
    covered, reached = 0.0, spans[0][0]
    for start, end in spans:
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered / max(reached - spans[0][0], 1e-9)
