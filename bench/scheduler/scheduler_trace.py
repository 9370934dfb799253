"""Section ``trace`` of ``quire bench scheduler``: cost of recording a trace per steady step, over all threads.

Alternates two equal runs, one with a trace and one without; both keep the event log. On a shared machine the difference
is mostly noise, so the journal's time in the loop's thread and the CPU time of the writer thread are also measured
directly. The direct figures leave out hashing of blocks that become full, about 0.2 us per block.
"""

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from quire.bench.scheduler.scheduler_rig import BLOCK_SIZE, Rig, now_ns, uncollected
from quire.protocol.config import FIRST_WORKER_EPOCH
from quire.protocol.model.kv_layout import kv_layout
from quire.scheduler_proc.trace.event_log import TraceHeader
from quire.scheduler_proc.trace.journal import Journal
from quire.scheduler_proc.trace.lines import Result, StepDecision, decode_line

UNIT = 16
"""Steps in which every request gets one new block, and lines are encoded about once."""


@dataclass(frozen=True, slots=True)
class TraceSizes:
    """``chunks`` chunks of ``steps`` steps alternate with and without trace. Figures are medians over units of ``UNIT``
    steps."""

    batch: int = 256
    prompt_len: int = 512
    steps: int = 320
    chunks: int = 12
    names: tuple[str, ...] = ("trace.jsonl", "trace.jsonl.zst")


class JournalRig(Rig):
    """A Rig that steps like the scheduler's loop, with a journal.

    Attributes:
        journal_ns: CPU time of this thread in the journal since the last reset.
    """

    def __init__(self, sizes: TraceSizes, trace: str) -> None:
        per_request = (sizes.prompt_len + sizes.steps * (sizes.chunks + 2)) // BLOCK_SIZE + 4
        num_blocks = sizes.batch * per_request
        super().__init__(num_blocks, sizes.batch, async_scheduling=True)
        self.journal_ns = 0
        config = msgspec.structs.replace(self.config, trace=trace)
        self.journal = Journal(config, time.monotonic)
        layout = kv_layout(self.config.model, BLOCK_SIZE, "bfloat16")
        self.scheduler = self.journal.begin(TraceHeader(config, layout, num_blocks))

    def fill_staggered(self, sizes: TraceSizes) -> None:
        """Add requests of staggered lengths, so that a sixteenth of them need a block in every step."""
        for index in range(sizes.batch):
            self.add(self.prompt(sizes.prompt_len + index % BLOCK_SIZE), 1 << 20)
        for _ in range(40 + sizes.batch * sizes.prompt_len // self.config.max_num_batched_tokens):
            self.run_step()

    def run_step(self) -> None:
        """Schedule a step and apply the previous result."""
        scheduler, journal = self.scheduler, self.journal
        now = time.monotonic()
        start = time.thread_time_ns()
        journal.before_step()
        spent = time.thread_time_ns() - start
        diff = scheduler.schedule(now)
        assert diff is not None
        frames = self._steps.encode(FIRST_WORKER_EPOCH, 0, diff)
        decisions = scheduler.decisions.take()
        start = time.thread_time_ns()
        journal.note(decisions)
        journal.decided(now, diff, frames)
        spent += time.thread_time_ns() - start
        self._in_flight.append(self._execute(frames))
        if len(self._in_flight) == self.config.pipeline_depth:
            result = self._in_flight.popleft()
            scheduler.consume(result)
            start = time.thread_time_ns()
            journal.consumed(0, frames, result)
            spent += time.thread_time_ns() - start
            for _, message in scheduler.take_messages():
                self._replies.encode(FIRST_WORKER_EPOCH, 0, message)
        start = time.thread_time_ns()
        journal.pause()
        self.journal_ns += spent + time.thread_time_ns() - start


def measure_trace(sizes: TraceSizes) -> dict[str, Any]:
    """Return microseconds of CPU per step, for each kind of trace file."""
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        return {name: _measure(sizes, Path(folder) / name) for name in sizes.names}


def _measure(sizes: TraceSizes, path: Path) -> dict[str, float]:
    rigs = {"with": JournalRig(sizes, str(path)), "without": JournalRig(sizes, "")}
    for rig in rigs.values():
        rig.fill_staggered(sizes)
    whole: dict[str, list[float]] = {"with": [], "without": []}
    thread: dict[str, list[float]] = {"with": [], "without": []}
    with uncollected():
        writer_start = rigs["with"].journal.writer_cpu_ns()
        for chunk in range(sizes.chunks):
            for name in sorted(rigs, reverse=bool(chunk % 2)):
                for _ in range(sizes.steps // UNIT):
                    rig, start = rigs[name], now_ns()
                    rig.journal_ns = 0
                    for _ in range(UNIT):
                        rig.run_step()
                    whole[name].append((now_ns() - start) / UNIT / 1e3)
                    thread[name].append(rig.journal_ns / UNIT / 1e3)
        rigs["with"].journal.idle()
    recorded_steps = sizes.steps * sizes.chunks
    writer_us = (rigs["with"].journal.writer_cpu_ns() - writer_start) / recorded_steps / 1e3
    lost = rigs["with"].journal.num_lost_lines
    for rig in rigs.values():
        rig.journal.close()
    figures = {"by_difference_us": _typical(whole), "loop_thread_us": _typical(thread), "writer_thread_us": writer_us}
    figures |= {"loop_thread_p10_us": _typical(thread, 10), "step_without_us": median(whole["without"])}
    return {name: round(value, 2) for name, value in figures.items()} | _per_step(sizes, path) | {"lost_lines": lost}


def _typical(samples: dict[str, list[float]], parts: int = 2) -> float:
    """Return the median with trace minus the median without; for other ``parts``, of the quantile 1 / ``parts``."""
    found = {name: sorted(values)[len(values) // parts] for name, values in samples.items()}
    return found["with"] - found["without"]


def _per_step(sizes: TraceSizes, path: Path) -> dict[str, float]:
    """Return bytes of the file per recorded step; for a plain file, bytes of the lines of a steady step, after checking
    that these lines do not name the unchanged requests."""
    if path.suffix == ".zst":
        return {"file_bytes": round(path.stat().st_size / (sizes.steps * sizes.chunks), 1)}
    steady = path.read_bytes().splitlines()[-3 * sizes.steps :]
    lines = [decode_line(raw) for raw in steady]
    results = [line for line in lines if isinstance(line, Result)]
    assert results and all(line.handles is None for line in results)
    steps = sum(isinstance(line, StepDecision) for line in lines)
    return {"line_bytes": round(sum(len(raw) + 1 for raw in steady) / steps, 1)}
