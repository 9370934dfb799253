"""Section ``churn``: arrivals, finishes and preemptions in a nearly full block pool, with the process's garbage
collection policy."""

import gc
import importlib.util
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from quire.bench.scheduler.churn_trace import churn_trace
from quire.bench.scheduler.scheduler_rig import Rig, now_ns, summary
from quire.protocol.errors import ConfigError
from quire.scheduler_proc.process.garbage_collection import Collector

SEED = 11

ChurnTrace = Callable[..., list[list[tuple[list[int], int]]]]


@dataclass(frozen=True, slots=True)
class ChurnLoad:
    """One run: ``rate`` arrivals per step, plus ``initial`` at the first step."""

    steps: int
    rate: float
    initial: int
    num_blocks: int
    max_num_seqs: int


@dataclass(frozen=True, slots=True)
class ChurnSizes:
    """``trace_from``: the peer's driver, whose ``churn_trace`` makes the arrivals of ``usual``; "" for Quire's own."""

    trace_from: str = ""
    usual: ChurnLoad = ChurnLoad(steps=2000, rate=1.3, initial=320, num_blocks=9000, max_num_seqs=256)
    large: ChurnLoad = ChurnLoad(steps=1000, rate=5.2, initial=1300, num_blocks=36_000, max_num_seqs=1024)


def measure_churn(sizes: ChurnSizes, steady_decode: bool = True) -> dict[str, Any]:
    usual, large = sizes.usual, sizes.large
    if sizes.trace_from:
        trace = load_churn_trace(Path(sizes.trace_from))(SEED, usual.steps, usual.rate)
    else:
        trace = churn_trace(SEED, usual.steps, usual.rate, usual.initial)
    out = {
        name: run_churn(trace, usual, async_scheduling, steady_decode)
        for name, async_scheduling in (("sync", False), ("async", True))
    }
    trace = churn_trace(SEED, large.steps, large.rate, large.initial)
    out[f"async_{large.max_num_seqs}"] = run_churn(trace, large, True, steady_decode)
    return out


def load_churn_trace(path: Path) -> ChurnTrace:
    """Import the file and return its function ``churn_trace``.

    Raises:
        ConfigError: the file cannot be imported or has no such function.
    """
    spec = importlib.util.spec_from_file_location("churn_trace_source", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        found: ChurnTrace = module.churn_trace
    except (OSError, SyntaxError, ImportError, AttributeError) as error:
        raise ConfigError(f"{path}: cannot import churn_trace: {error}") from None
    return found


@dataclass(slots=True)
class _Counted:
    schedule: list[int] = field(default_factory=list)
    update: list[int] = field(default_factory=list)
    both: list[int] = field(default_factory=list)
    added_ns: int = 0
    num_added: int = 0
    finished: int = 0
    running: int = 0
    tokens: int = 0
    usage: list[float] = field(default_factory=list)


def run_churn(trace: Any, load: ChurnLoad, async_scheduling: bool, steady_decode: bool = True) -> dict[str, Any]:
    """Run one load and return its figures. Garbage collections by the process's policy count in the update."""
    rig = Rig(load.num_blocks, load.max_num_seqs, async_scheduling=async_scheduling, steady_decode=steady_decode)
    counted = _Counted()
    collector = Collector()
    collector.start()
    try:
        with collection_pauses() as pauses:
            for index, arrivals in enumerate(trace):
                _churn_step(rig, arrivals, counted, collector)
                if index % 50 == 0:
                    known = rig.scheduler.statistics()
                    counted.usage.append(1 - known.num_free_blocks / known.num_usable_blocks)
    finally:
        collector.stop()
    figures = _figures(counted, len(trace), rig.scheduler.statistics().num_preemptions)
    return figures | {"gc": _pause_figures(pauses)}


def _churn_step(rig: Rig, arrivals: Any, counted: _Counted, collector: Collector) -> None:
    for prompt, max_tokens in arrivals:
        counted.added_ns += rig.add(np.array(prompt, np.int32), max_tokens, collector.after_message)[1]
        counted.num_added += 1
    step = rig.step(after=collector.after_step)
    counted.schedule.append(step.schedule_ns)
    if step.update_ns is not None:
        counted.update.append(step.update_ns)
        counted.both.append(step.schedule_ns + step.update_ns)
    counted.finished += sum(len(outputs.ended) for outputs in step.outputs)
    if step.diff is not None:
        counted.running += rig.worker.num_active
        counted.tokens += rig.worker.num_tokens


def _figures(counted: _Counted, steps: int, preemptions: int) -> dict[str, Any]:
    """Return the figures. A request is built, hashed and queued in ``consume``: the times are not separable."""
    busy = (sum(counted.schedule) + sum(counted.update) + counted.added_ns) / 1e9
    return {
        "steps": steps,
        "scheduler_seconds_incl_request_build": round(busy, 3),
        "steps_per_s_incl_request_build": round(steps / busy, 1),
        "requests_per_s_incl_request_build": round(counted.finished / busy, 1),
        "requests_finished": counted.finished,
        "preemptions": preemptions,
        "requests_added": counted.num_added,
        "mean_running": round(counted.running / steps, 1),
        "mean_scheduled_tokens": round(counted.tokens / steps, 1),
        "median_kv_usage": round(statistics.median(counted.usage), 3),
        "build_and_add_mean_us": round(counted.added_ns / counted.num_added / 1e3, 2),
        "schedule": summary(counted.schedule),
        "update_from_output": summary(counted.update),
        "both": summary(counted.both),
    }


Pauses = dict[int, list[int]]
"""Nanoseconds of each collection, by generation."""


@contextmanager
def collection_pauses() -> Iterator[Pauses]:
    """Record every garbage collection in the ``with`` block."""
    pauses: Pauses = {}
    start = 0

    def note(phase: str, info: dict[str, int]) -> None:
        nonlocal start
        if phase == "start":
            start = now_ns()
        else:
            pauses.setdefault(info["generation"], []).append(now_ns() - start)

    gc.callbacks.append(note)
    try:
        yield pauses
    finally:
        gc.callbacks.remove(note)


def _pause_figures(pauses: Pauses) -> dict[str, Any]:
    every = [spent for spans in pauses.values() for spent in spans]
    return {
        "max_pause_ms": round(max(every, default=0) / 1e6, 3),
        "total_ms": round(sum(every) / 1e6, 3),
        "collections": {str(generation): len(spans) for generation, spans in sorted(pauses.items())},
    }
