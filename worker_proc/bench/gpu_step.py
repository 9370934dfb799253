"""Whole decode steps on a GPU: against their floor, launched one kernel at a time, and over a static cache."""

from dataclasses import dataclass
from functools import partial

import torch

from quire.protocol.model.kv_layout import kv_layout
from quire.protocol.model.model_config import ModelConfig
from quire.worker_proc.bench.record import Bench, Limits, OutOfTime, describe, free_memory
from quire.worker_proc.bench.static_step import static_step
from quire.worker_proc.bench.step_driver import BLOCK_SIZE, StepDriver, dummy_model, sized
from quire.worker_proc.models.decoder import Decoder

OURS, EAGER, STATIC = "ours", "ours, eager", "static cache, one graph"


@dataclass(frozen=True, slots=True)
class Steps:
    """How many are timed; rows have room for all of them."""

    warm_up: int
    timed: int
    replays: int

    @property
    def room(self) -> int:
        return 2 * (self.warm_up + self.timed) + self.replays + 8


def decode_step(bench: Bench) -> None:
    """llama-3.1-8b at 1,024 tokens."""
    model_config = sized(bench.models["llama-3.1-8b"], bench.size)
    batches = bench.pick(full=(1, 32, 128), quick=(1, 128), dry=(2,))
    length, steps = bench.pick(full=(1024, Steps(8, 48, 32)), quick=(1024, Steps(4, 24, 16)), dry=(12, Steps(1, 1, 1)))
    model = dummy_model(model_config, bench.dtype, bench.device, length + steps.room)
    driver = StepDriver(model, bench.dtype, bench.device, max(batches), length + steps.room)
    for graphs in (False, True):
        if graphs:
            driver.empty()
            driver.runner.warm_up(lambda text: None)
        for rows in batches:
            _require_time(bench)
            driver.fill(rows, length)
            driver.steady(steps.warm_up)
            times = driver.steady(steps.timed)
            floor = floor_s(model_config, rows, length + steps.room // 2, bench.dtype, bench.limits)
            name = f"{rows} x {length:,}"
            if not graphs:
                bench.note(name, EAGER, times.wall, cpu_us=times.cpu * 1e6)
                continue
            figures = {"of_floor": floor / times.wall, "floor_us": floor * 1e6, "cpu_us": times.cpu * 1e6}
            bench.note(name, OURS, times.wall, **figures, **_device_figures(driver, rows, steps.replays))
    driver.empty()
    del driver
    free_memory(bench.device)
    _static_steps(bench, model, batches, length + steps.room // 2, length)


def _static_steps(bench: Bench, model: Decoder, batches: tuple[int, ...], length: int, called: int) -> None:
    """``length``: what ours had in the middle of its steps; ``called``: as its rows are named."""
    for rows in batches:
        _require_time(bench)
        make = partial(static_step, model, rows, length, bench.dtype, bench.device)
        bench.measure(f"{rows} x {called:,}", STATIC, make)
        free_memory(bench.device)


def _device_figures(driver: StepDriver, rows: int, replays: int) -> dict[str, float]:
    """What the graph alone takes; nothing where there is none. The runner's rows are stale afterwards."""
    steady = driver.runner.steady
    if steady is None or not driver.has_graphs:
        return {}
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    begun.record()
    for _ in range(replays):
        steady.graphs.run(rows, sampling=True)
    ended.record()
    ended.synchronize()
    return {"graph_us": float(begun.elapsed_time(ended)) * 1000 / replays}


def floor_s(model: ModelConfig, rows: int, length: int, dtype: torch.dtype, limits: Limits) -> float:
    """What no step can beat: each weight read once, or multiplied at the matrix rate where that takes longer; and
    each row's keys and values read once. The two are different kernels, and add."""
    heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    layer = [
        model.hidden_size * heads,
        model.num_heads * model.head_dim * model.hidden_size,
        2 * model.hidden_size * model.intermediate_size,
        model.hidden_size * model.intermediate_size,
    ]
    sizes = layer * model.num_layers + [model.hidden_size * model.vocab_size]
    rate = max(limits.matmul.values())
    products = sum(max(size * dtype.itemsize / limits.read, 2 * size * rows / rate) for size in sizes)
    layout = kv_layout(model, BLOCK_SIZE, str(dtype).removeprefix("torch."))
    per_token = layout.token_bytes * sum(len(group.layers) for group in layout.groups)
    return products + rows * length * per_token / limits.read


def steady_step(bench: Bench) -> None:
    """The worker's CPU time per step, which a model's size does not change, and how much of the time the GPU works."""
    model_config = sized(bench.models["qwen3-0.6b"], bench.size)
    batches = bench.pick(full=(1, 64, 256), quick=(1, 256), dry=(2,))
    length, steps = bench.pick(full=(512, Steps(8, 96, 32)), quick=(512, Steps(4, 32, 16)), dry=(8, Steps(1, 1, 1)))
    model = dummy_model(model_config, bench.dtype, bench.device, length + steps.room)
    driver = StepDriver(model, bench.dtype, bench.device, max(batches), length + steps.room)
    driver.runner.warm_up(lambda text: None)
    for rows in batches:
        _require_time(bench)
        driver.fill(rows, length)
        driver.steady(steps.warm_up)
        times = driver.steady(steps.timed)
        figures = {"cpu_us": times.cpu * 1e6}
        floor = floor_s(model_config, rows, length + steps.room // 2, bench.dtype, bench.limits)
        figures |= {"of_floor": floor / times.wall}
        if bench.device.type == "cuda":
            figures |= _busy_figures(driver, steps)
        figures |= _device_figures(driver, rows, steps.replays)
        bench.note(f"{rows} x {length:,}", OURS, times.wall, **figures)


def _busy_figures(driver: StepDriver, steps: Steps) -> dict[str, float]:
    """The share of a stretch of steady steps in which some kernel ran, by torch's profiler; nothing if that fails."""
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
    """How much of the time from the first begin to the last end lies in some span; ``spans`` by their begins."""
    covered, reached = 0.0, spans[0][0]
    for begun, ended in spans:
        covered += max(0.0, ended - max(begun, reached))
        reached = max(reached, ended)
    return covered / max(reached - spans[0][0], 1e-9)


def _require_time(bench: Bench) -> None:
    if bench.out_of_time:
        raise OutOfTime
