"""Runs one workload under many settings, in parallel processes."""

import itertools
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.protocol.errors import ConfigError
from quire.protocol.process.host_limits import usable_cpus
from quire.protocol.process.log import first_line
from quire.replay.formats.options import LoadOptions
from quire.replay.report.figures import attained_share
from quire.replay.report.summary import summary

MAX_RUNS = 4096
MAX_PROCESSES = 61
"""More processes do not help one trace, and some systems allow no more."""


@dataclass(frozen=True, slots=True)
class SweepTask:
    """The common part of all runs of a sweep; pickled to the processes.

    Attributes:
        path, format, options: arguments of ``load_workload``.
        settings: texts by ``--set`` key.
        cost: the ``--cost`` text.
        run: keyword arguments of ``run_workload`` except ``progress``.
        targets: most seconds by name of a latency; rows then have the share of requests that meet all (``attained``).
    """

    path: Path
    format: str
    options: LoadOptions
    settings: Mapping[str, str] = field(default_factory=dict)
    cost: str | None = None
    run: Mapping[str, Any] = field(default_factory=dict)
    targets: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SweepRow:
    """One run of a sweep: its values and its ``summary``, or the error if it failed."""

    values: dict[str, str]
    figures: dict[str, Any] | None
    error: str = ""


def sweep(
    task: SweepTask,
    axes: Sequence[tuple[str, Sequence[str]]],
    jobs: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[SweepRow]:
    """Run all combinations of the axes' values; rows are in order, with the last axis changing fastest.

    Args:
        axes: (``--set`` key, texts of its values), each key once.
        jobs: number of processes, 1: this one; None: one per usable CPU.
        progress: called with the number of finished runs and their total.

    Raises:
        ConfigError: more than ``MAX_RUNS`` combinations. The error of a single run is in its row.
    """
    return run_points(task, points_of(axes), jobs, progress)


def run_points(
    task: SweepTask,
    points: Sequence[dict[str, str]],
    jobs: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[SweepRow]:
    """Do one run with each of ``points``, texts by ``--set`` key; see ``sweep``."""
    jobs = min(jobs or usable_cpus(), len(points), MAX_PROCESSES)
    if jobs == 1:
        rows = []
        for point in points:
            rows.append(run_point(task, point))
            if progress is not None:
                progress(len(rows), len(points))
        return rows
    others = set(multiprocessing.active_children())
    with _pool(jobs) as pool:
        try:
            runs = [pool.submit(run_point, task, point) for point in points]
            return _in_order(points, runs, progress)
        except BaseException:  # usually Ctrl-C: end the runs instead of waiting for them
            pool.shutdown(wait=False, cancel_futures=True)
            for child in set(multiprocessing.active_children()) - others:
                child.terminate()
            raise


def run_point(task: SweepTask, values: Mapping[str, str]) -> SweepRow:
    """Do one run of a sweep in this process."""
    from quire.replay.formats.detect import load_workload
    from quire.replay.simulate.whatif import prepare, run_workload

    try:
        workload = load_workload(task.path, task.format, task.options)
        setup, cost = prepare(workload, values, task.cost, task.settings)
        record = run_workload(workload, setup, cost, **task.run)
        figures = summary(record)
        if task.targets:
            figures["attained"] = attained_share(record, task.targets)
        return SweepRow(dict(values), figures)
    except ConfigError as error:
        return SweepRow(dict(values), None, str(error))
    except Exception as error:  # the other runs are still useful
        traceback.print_exc()
        return SweepRow(dict(values), None, f"{type(error).__name__}: {first_line(str(error))}")


def points_of(axes: Sequence[tuple[str, Sequence[str]]]) -> list[dict[str, str]]:
    """Return all combinations of the axes' values. Raises ConfigError if there are more than ``MAX_RUNS``."""
    keys = [key for key, _ in axes]
    points = [dict(zip(keys, values, strict=True)) for values in itertools.product(*(values for _, values in axes))]
    if len(points) > MAX_RUNS:
        raise ConfigError(f"--sweep has {len(points)} combinations; at most {MAX_RUNS} are allowed: remove some values")
    return points


def _pool(jobs: int) -> ProcessPoolExecutor:
    """Return a pool of spawned processes; forking is unsafe because the parent may have threads."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(jobs, mp_context=context, initializer=_enter_child)


def _enter_child() -> None:
    """Ignore Ctrl-C, which a terminal sends to every process and the parent handles, and end with the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "sweep process without a parent"
    parent.join()
    os._exit(1)


def _in_order(
    points: Sequence[dict[str, str]], runs: Sequence[Future[SweepRow]], progress: Callable[[int, int], None] | None
) -> list[SweepRow]:
    rows = []
    for point, run in zip(points, runs, strict=True):
        try:
            rows.append(run.result())
        except BrokenProcessPool:
            rows.append(SweepRow(point, None, "the process was killed, possibly for lack of memory: reduce --jobs"))
        if progress is not None:
            progress(len(rows), len(runs))
    return rows
