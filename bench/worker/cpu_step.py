"""Whole decode steps on a CPU: from recorded plans, and launched call by call."""

import torch

from quire.bench.worker.record import Bench
from quire.bench.worker.step_driver import StepDriver, dummy_model, sized
from quire.bench.worker.timing import elapsed_on_host
from quire.kernels.cpu.native.library import load_native
from quire.worker_proc.attention.cpu import CpuBackend
from quire.worker_proc.models.cpu_ops import CpuOps

WARM_UP = 3


def cpu_step(bench: Bench) -> None:
    """Measure steps of requests that decode, alternating; the smallest time of a few rounds of each kind."""
    native = load_native()
    if native is None:
        bench.note("decode step", "no compiler", None)
        return
    batches = bench.pick(full=(1, 8, 32), quick=(1, 32), dry=(2,))
    length, steps, rounds = bench.pick(full=(256, 24, 5), quick=(256, 8, 3), dry=(8, 1, 1))
    room = 2 * rounds * (WARM_UP + steps + 2)
    model = dummy_model(
        sized(bench.models["smollm2-135m"], bench.size), torch.bfloat16, bench.device, length + room, CpuOps(native)
    )
    model.prepack()
    drivers = {
        name: StepDriver(
            model, torch.bfloat16, bench.device, CpuBackend(), max(batches), length + room, eager=name == "quire, eager"
        )
        for name in ("quire, recorded", "quire, eager")
    }
    for rows in batches:
        times: dict[str, list[float]] = {name: [] for name in drivers}
        for driver in drivers.values():
            driver.fill(rows, length)
        for _ in range(rounds):
            bench.require_time()
            for name, driver in drivers.items():
                driver.steady(WARM_UP)
                times[name].append(driver.steady(steps).wall)
        figures = {}
        plan = drivers["quire, recorded"].runner.passes.plan(rows)
        if plan is not None:
            figures["plan_us"] = min(elapsed_on_host(plan.run) for _ in range(steps)) * 1e6
            figures["python_us"] = min(times["quire, recorded"]) * 1e6 - figures["plan_us"]
            profiles = [plan.profile() for _ in range(steps)]
            figures |= {f"{name}_us": min(each[name] for each in profiles) * 1e6 for name in profiles[0]}
        for name, found in times.items():
            bench.note(f"{rows} x {length}", name, min(found), **(figures if name == "quire, recorded" else {}))
