"""Exact replay of a recorded trace, with a record of the run."""

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec
import numpy as np

from quire.protocol.errors import ConfigError
from quire.replay.recorded.exact import replay_lines
from quire.replay.recorded.reader import TraceLine, TraceReader
from quire.replay.recorded.recorded_settings import recorded_settings
from quire.replay.run.collector import RunCollector
from quire.replay.run.run_record import RequestRun, RunRecord
from quire.replay.run.step_shape import StepShape
from quire.scheduler_proc.requests.reasons import Decision
from quire.scheduler_proc.scheduler import Scheduler
from quire.scheduler_proc.trace.decision_log import DecisionLog
from quire.scheduler_proc.trace.lines import Arrival, Header, Lost, Result, StepDecision

Progress = Callable[[float, int], None]
"""Called from time to time with the recorded time in seconds and the number of finished requests."""

_PROGRESS_EVERY = 1024


def replay_trace(path: Path, *, lenient: bool = False, progress: Progress | None = None) -> RunRecord:
    """Replay the trace at ``path`` exactly and return the record of the recorded run, up to the first difference.

    The record's ``decisions_equal``, None if no step was compared, and ``first_difference`` are the verdict.

    Args:
        lenient: stop at the first missing or damaged line instead of raising; the lines before it are compared.

    Raises:
        ConfigError: the trace cannot be read, or lines of it are missing.
    """
    began = time.perf_counter()
    reader = TraceReader(path, lenient=lenient, keep_altered=True)
    header = reader.header
    record = RunRecord(
        title=f"{path.name}: as recorded",
        source=str(path),
        cost="as recorded",
        settings={"model": header.config.model.architecture, **recorded_settings(header)},
        block_size=header.config.block_size,
        num_usable_blocks=header.num_blocks - 1,
        max_num_batched_tokens=header.config.step_tokens,
    )
    run = _Run(record, progress)
    gaps: list[TraceLine] = []
    difference = replay_lines(_until_lost(reader, gaps) if lenient else reader, observe=run)
    if not run.has_begun:
        raise ConfigError(f"{reader.files[0]}:1: the header was altered: its checksum does not match")
    run.finish()
    is_unknown = difference is None and (bool(gaps) or not record.steps)
    record.decisions_equal = None if is_unknown else difference is None
    if difference is not None:
        record.first_difference = msgspec.to_builtins(difference)
        record.notes.append(f"the figures end at the first difference: {difference}")
    if not header.complete:
        record.notes.append("the trace begins in the middle of a run: requests that ran then count from there")
    record.notes += reader.notes
    record.notes += [f"compared up to {gap.file}:{gap.number}, where lines are missing" for gap in gaps]
    record.extra["lines"] = run.num_lines
    record.wall_s = time.perf_counter() - began
    return record


def _until_lost(lines: Iterable[TraceLine], gaps: list[TraceLine]) -> Iterator[TraceLine]:
    """Yield the lines before the first ``lost`` line, and append that to ``gaps``: nothing after it can be replayed."""
    for each in lines:
        if isinstance(each.line, Lost):
            gaps.append(each)
            return
        yield each


class _Run:
    """Fills the record of a run while its trace is replayed (an ``exact.Observer``)."""

    def __init__(self, record: RunRecord, progress: Progress | None) -> None:
        self._record = record
        self._progress = progress
        self.num_lines = 1
        self._begin = self._now = self._worker_free = 0.0
        self._num_ended = 0
        self._times_back = 0
        self.has_begun = False

    def begin(self, header: Header, scheduler: Scheduler, decision_log: DecisionLog) -> None:
        self._scheduler = scheduler
        self._decision_log = decision_log
        if not self.has_begun:
            self._begin = header.now
            self._collector = RunCollector(self._record, scheduler, decision_log)
            self.has_begun = True
        else:
            self.num_lines += 1
            self._collector.restarted(self._now, scheduler, decision_log)

    def arrived(self, line: Arrival, decisions: list[Decision]) -> None:
        now = self._time(line.now)
        run = RequestRun(line.req_id, now, line.num_prompt_tokens, line.request.job_id, line.request.priority)
        ended_at_once = bool(self._decision_log.ended_requests)
        self._collector.arrived(
            run, line.client, self._decision_log.ended_requests[0].handle if ended_at_once else None
        )
        if ended_at_once:
            self._count(len(self._collector.changed(now)))
        self._collector.note(now, decisions)

    def step_decided(self, line: StepDecision, decisions: list[Decision]) -> None:
        now = self._time(line.now)
        step = self._scheduler.in_flight.records[-1]
        prefill = sum([row.num_tokens for row in step.rows.values() if row.is_prefill])
        shape = StepShape([(prefill, 0)] if prefill else [], step.num_tokens - prefill, 0, 0)
        self._collector.step_decided(now, line.step, shape)
        self._collector.note(now, decisions)

    def step_finished(self, line: Result, decisions: list[Decision]) -> None:
        now = self._time(line.now)
        begin = min(max(now - line.seconds, self._worker_free), now)
        self._worker_free = now
        handles = None if line.handles is None else np.array(line.handles, np.int32)
        accepted = 0 if line.counts is None else sum(line.counts) - len(line.counts)
        ended = self._collector.step_finished(now, line.step, begin, now, handles, accepted)
        self._collector.note(now, decisions)
        self._count(len(ended))
        if self._progress is not None and len(self._record.steps) % _PROGRESS_EVERY == 0:
            self._progress(now, self._num_ended)

    def changed(self, now: float, decisions: list[Decision]) -> None:
        at = self._time(now)
        ended = self._collector.changed(at)
        self._collector.note(at, decisions)
        self._count(len(ended))

    def finish(self) -> None:
        """Complete the record; requests without an ending stay unfinished."""
        runs = self._record.requests
        last = max([run.end for run in runs], default=0.0)
        self._collector.finish(max(last - runs[0].arrival, 0.0) if runs else 0.0)
        if self._times_back:
            self._record.notes.append(f"the clock went back {self._times_back} times: the last time is used instead")

    def _count(self, num_ended: int) -> None:
        self._num_ended += num_ended

    def _time(self, now: float) -> float:
        """Return the seconds since the header was written, never less than the last returned value."""
        self.num_lines += 1
        since = now - self._begin
        if since < self._now:
            self._times_back += 1
        else:
            self._now = since
        return self._now
