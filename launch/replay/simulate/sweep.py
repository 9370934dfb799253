"""The same workload under many settings, side by side in processes of their own."""

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

from quire.launch.replay.formats.options import LoadOptions
from quire.launch.replay.report.summary import summary
from quire.protocol.errors import ConfigError

MOST_RUNS = 4096
MOST_PROCESSES = 61
"""More do not help one trace, and some systems allow no more."""


@dataclass(frozen=True, slots=True)
class SweepTask:
    """What all runs of a sweep have in common; crosses to other processes.

    Attributes:
        path, format, options: as of ``load_workload``.
        settings: ``--set`` key to its text.
        cost: as ``--cost`` has it.
        run: keywords of ``run_workload``, but ``progress``.
    """

    path: Path
    format: str
    options: LoadOptions
    settings: Mapping[str, str] = field(default_factory=dict)
    cost: str | None = None
    run: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SweepRow:
    """One run: the values that are its own, and its ``summary``; or why it failed."""

    values: dict[str, str]
    figures: dict[str, Any] | None
    error: str = ""


def sweep(
    task: SweepTask,
    axes: Sequence[tuple[str, Sequence[str]]],
    jobs: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[SweepRow]:
    """All combinations of the axes' values, the last axis changing fastest, whichever ends first.

    Args:
        axes: key of ``--set``, each once, and the texts of its values.
        jobs: processes at a time; None: one per core.
        progress: told of the runs that have ended, and of how many there are.

    Raises:
        ConfigError: more runs than anyone can want. What is wrong with one run is in its row.
    """
    points = _points(axes)
    jobs = min(jobs or len(os.sched_getaffinity(0)), len(points), MOST_PROCESSES)
    others = set(multiprocessing.active_children())
    with _pool(jobs) as pool:
        try:
            runs = [pool.submit(run_point, task, point) for point in points]
            return _in_order(points, runs, progress)
        except BaseException:  # Ctrl-C above all: nobody waits for runs whose results nobody wants
            pool.shutdown(wait=False, cancel_futures=True)
            for child in set(multiprocessing.active_children()) - others:
                child.terminate()
            raise


def run_point(task: SweepTask, values: Mapping[str, str]) -> SweepRow:
    """One run of a sweep, in this process."""
    from quire.launch.replay.formats.detect import load_workload
    from quire.launch.replay.simulate.whatif import prepare, run_workload

    try:
        workload = load_workload(task.path, task.format, task.options)
        setup, cost = prepare(workload, {**task.settings, **values}, task.cost)
        return SweepRow(dict(values), summary(run_workload(workload, setup, cost, **task.run)))
    except ConfigError as error:
        return SweepRow(dict(values), None, str(error))
    except Exception as error:  # the other runs are worth something all the same
        traceback.print_exc()
        return SweepRow(dict(values), None, f"{type(error).__name__}: {error}")


def _points(axes: Sequence[tuple[str, Sequence[str]]]) -> list[dict[str, str]]:
    keys = [key for key, _ in axes]
    points = [dict(zip(keys, values, strict=True)) for values in itertools.product(*(values for _, values in axes))]
    if len(points) > MOST_RUNS:
        raise ConfigError(f"--sweep: {len(points)} combinations; at most {MOST_RUNS} can be run at once")
    return points


def _pool(jobs: int) -> ProcessPoolExecutor:
    """Spawned, not forked: a parent may have threads."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(jobs, mp_context=context, initializer=_enter_child)


def _enter_child() -> None:
    """Ctrl-C in a terminal reaches every process, and is the parent's to handle; whatever ends it ends this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "a run of a sweep has been started by nobody"
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
            rows.append(
                SweepRow(point, None, "its process was killed; the machine may be short of memory: fewer --jobs")
            )
        if progress is not None:
            progress(len(rows), len(runs))
    return rows
