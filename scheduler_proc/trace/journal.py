"""The journal of the loop: records events and decisions in the event log, and in a trace when one is configured."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from quire.protocol.config import EngineConfig
from quire.protocol.errors import ConfigError
from quire.protocol.process.log import event_logger
from quire.protocol.wire.channel import Frames
from quire.protocol.wire.worker_messages import SchedulerOutput
from quire.scheduler_proc.kv.events import KVEventRecorder
from quire.scheduler_proc.requests.events import Consumed
from quire.scheduler_proc.requests.reasons import Decision
from quire.scheduler_proc.scheduler import Scheduler
from quire.scheduler_proc.trace.decision_log import DecisionLog
from quire.scheduler_proc.trace.dump import Dump, write_dump
from quire.scheduler_proc.trace.event_log import EventLog, TraceHeader
from quire.scheduler_proc.trace.files import TraceFiles
from quire.scheduler_proc.trace.kept_costs import KeptCosts
from quire.scheduler_proc.trace.lines import End
from quire.scheduler_proc.trace.recorder import TraceRecorder
from quire.scheduler_proc.trace.translate import make_header
from quire.scheduler_proc.trace.writer import TraceWriter

log = event_logger("scheduler.trace")
decisions_log = event_logger("scheduler")

RING_BYTES = 24 * 2**20
"""About 18,000 steps of 256 requests, some minutes. Replaying more would delay a failed engine's dump too long."""


class Journal:
    """Records each event and each decision right after the Scheduler took it, in the same order.

    Owns the event log, the trace files, the dump folder and the file of learned costs. Waits for the disk
    only in ``close``, in the dump of an engine that has ended, and for the small file of learned costs while idle.
    """

    def __init__(self, config: EngineConfig, clock: Callable[[], float], *, is_restart: bool = False) -> None:
        """
        Args:
            is_restart: whether this scheduler replaces another one. It then begins the next part of the trace, and
                runs without a trace when that cannot be written; the first scheduler refuses to start.

        Raises:
            ConfigError: the trace cannot be written.
        """
        self.log = EventLog(RING_BYTES)
        self._config = config
        self._clock = clock
        self._header: TraceHeader | None = None
        self._costs: KeptCosts | None = None
        self._scheduler: Scheduler | None = None
        self._recorder: TraceRecorder | None = None
        self._writer: TraceWriter | None = None
        self._dump_thread: threading.Thread | None = None
        self._num_dumps = 0
        self._is_restart = is_restart
        if config.trace:
            self._writer = self._make_writer()

    def _make_writer(self) -> TraceWriter | None:
        config, clock = self._config, self._clock
        try:
            files = TraceFiles(
                Path(config.trace), max_bytes=config.trace_max_bytes, is_restart=self._is_restart, clock=clock
            )
        except ConfigError as error:
            if not self._is_restart:
                raise
            log.error("trace ended", reason=error)
            return None
        return TraceWriter(files, clock=clock)

    @property
    def num_lost_lines(self) -> int:
        """Lines of the trace that were dropped."""
        return 0 if self._writer is None else self._writer.lost

    def writer_cpu_ns(self) -> int:
        """CPU time of the trace writer's thread so far."""
        return 0 if self._writer is None else self._writer.cpu_ns()

    def begin(self, header: TraceHeader, kv_events: KVEventRecorder | None = None) -> Scheduler:
        """Make a Scheduler from ``header`` and record it. Raises ConfigError when the trace cannot be written."""
        self._costs = KeptCosts(header)
        header = msgspec.structs.replace(header, costs=self._costs.read())
        writer = self._start_trace(header)
        if writer is None:
            self._scheduler = header.make_scheduler(kv_events=kv_events)
        else:
            decision_log = DecisionLog()
            self._scheduler = header.make_scheduler(hooks=decision_log, kv_events=kv_events)
            self._recorder = TraceRecorder(
                self._scheduler, decision_log, writer.put, prompts=self._config.trace_prompts
            )
        self._header = header
        return self._scheduler

    def _start_trace(self, header: TraceHeader) -> TraceWriter | None:
        """Write the header. Returns the writer, or None without a trace."""
        if self._writer is None:
            return None
        try:
            self._writer.begin(make_header(header, self._clock(), time.time(), prompts=self._config.trace_prompts))
        except OSError as error:
            reason = f"--trace {self._config.trace} cannot be written: {error.strerror}"
            if not self._is_restart:
                raise ConfigError(reason) from None
            log.error("trace ended", reason=reason)
            self.close()
            self._writer = None
        return self._writer

    # ---- what happens

    def consumed(self, client: int, frames: Frames, event: Consumed) -> None:
        """Record a consumed event. ``frames``: its encoding, received or made."""
        now = self._clock()
        self.log.consumed(now, client, frames)
        if self._recorder is not None:
            self._recorder.consumed(now, client, event)

    def client_dropped(self, client: int) -> None:
        now = self._clock()
        self.log.client_dropped(now, client)
        if self._recorder is not None:
            self._recorder.client_dropped(now, client)

    def worker_epoch_began(self, *, budget_halved: bool, new_workers: bool, reason: str) -> None:
        """Record a new worker epoch.

        Args:
            budget_halved: whether the token budget of steps was halved for this epoch.
            new_workers: whether the worker group was replaced.
        """
        now = self._clock()
        if budget_halved:  # first, as it happened: the epoch's first step has the smaller budget
            self.log.token_budget_halved(now)
        self.log.worker_epoch_began(now, new_workers=new_workers)
        if self._recorder is not None:
            self._recorder.worker_epoch_began(now, budget_halved=budget_halved, new_workers=new_workers, reason=reason)

    def before_step(self) -> None:
        """Call before ``schedule()``."""
        if self._recorder is not None:
            self._recorder.before_step()

    def decided(self, now: float, step: SchedulerOutput | None, frames: Frames | None) -> None:
        """Record the result of ``schedule()`` at ``now``: a diff, sent in ``frames``, or None."""
        if frames is None:
            self.log.tick(now)
        else:
            self.log.produced(now, frames)
        if self._recorder is not None:
            self._recorder.decided(now, step)
        self._keep_keyframe(now, idle=False)

    def note(self, decisions: list[Decision]) -> None:
        """Record and log why requests wait, were preempted, or lost cached contents."""
        if self._recorder is not None and decisions:
            self._recorder.note(decisions)
        for decision in decisions:
            decisions_log.debug(str(decision))

    def pause(self) -> None:
        """Call before the loop sleeps: encodes lines, which is the expensive part of a trace, if enough are pending."""
        if self._writer is not None:
            self._writer.flush_some()

    def idle(self) -> None:
        """Call when the loop was idle: flushes lines, and records a keyframe when due, which costs O(blocks)."""
        if self._writer is not None:
            self._writer.flush()
        self._keep_costs()
        if self._scheduler is not None and self._scheduler.is_idle:
            self._keep_keyframe(self._clock(), idle=True)

    def _keep_keyframe(self, now: float, *, idle: bool) -> None:
        if self._scheduler is not None and self.log.is_keyframe_due(idle=idle):
            self.log.keyframe(now, self._scheduler)

    # ---- the end, and looking in

    def dump(self, reason: str) -> None:
        """Write the event log as a trace now."""
        if (dump := self._next_dump(reason)) is not None:
            write_dump(*dump)

    def dump_in_thread(self, reason: str) -> None:
        """Write the dump in a thread while the engine continues; one at a time."""
        if self._dump_thread is not None and self._dump_thread.is_alive():
            log.warning("event dump is already being written")
        elif (dump := self._next_dump(reason)) is not None:
            self._dump_thread = threading.Thread(target=write_dump, args=dump, name="dump", daemon=True)
            self._dump_thread.start()

    def _next_dump(self, reason: str) -> tuple[Path, int, Dump] | None:
        folder = self._dump_folder()
        if folder is None or self._header is None:
            return None
        self._num_dumps += 1
        dump = Dump(self._header, self.log.readable(), self.log.complete, self._clock(), reason)
        return folder, self._num_dumps, dump

    def _dump_folder(self) -> Path | None:
        """Return the folder of the trace, or else the configured dump folder."""
        if self._config.trace:
            return Path(self._config.trace).parent
        return Path(self._config.crash_dump_dir) if self._config.crash_dump_dir else None

    def _keep_costs(self) -> None:
        if self._scheduler is not None and self._costs is not None:
            self._costs.write(self._scheduler.transfers.costs)

    def close(self, reason: str = "") -> None:
        self._keep_costs()
        if self._writer is not None:
            self._writer.close(End(now=self._clock(), reason=reason))
        if self._dump_thread is not None:
            self._dump_thread.join()
