"""The loop of the scheduler process: receive messages, schedule, send steps and outputs."""

import time
from collections.abc import Callable
from math import ceil
from pathlib import Path

import msgspec

from quire.protocol.config import FIRST_WORKER_EPOCH, EngineConfig
from quire.protocol.errors import EngineError, QuireError
from quire.protocol.model.kv_layout import kv_layout
from quire.protocol.process.child import Child, Command, Report
from quire.protocol.process.log import event_logger
from quire.protocol.wire.adapter_messages import AdapterLoaded
from quire.protocol.wire.channel import Received
from quire.protocol.wire.clients import mismatch
from quire.protocol.wire.codec import ProtocolError
from quire.protocol.wire.front_end_messages import AddRequest, ClientEvent, EngineState, Rejected, Statistics
from quire.protocol.wire.item_messages import Encoded
from quire.protocol.wire.kv_events import HASH_BYTES
from quire.protocol.wire.link_messages import PROTOCOL_VERSION, Heartbeat, Hello, Refused, Welcome
from quire.protocol.wire.transfer_messages import BlocksMoved, DiskContents
from quire.protocol.wire.worker_messages import Configure, Fault, ModelRunnerOutput, Proposed, Ready, Shutdown
from quire.protocol.wire.zmq_channel import PeerMessage
from quire.scheduler_proc.process.front_ends import FrontEnds
from quire.scheduler_proc.process.garbage_collection import Collector
from quire.scheduler_proc.process.grammars import Grammars
from quire.scheduler_proc.process.pause import KeptPause
from quire.scheduler_proc.process.step_deadline import StepDeadline
from quire.scheduler_proc.process.step_times import StepObservations
from quire.scheduler_proc.process.throughput import ThroughputLog
from quire.scheduler_proc.process.ticks import Ticks
from quire.scheduler_proc.process.tier_transfers import TierTransfers
from quire.scheduler_proc.process.transport import Transport
from quire.scheduler_proc.process.worker_group import WorkerGroup
from quire.scheduler_proc.scheduler import Scheduler, StepTooLarge, WorkerFault
from quire.scheduler_proc.trace.event_log import TraceHeader
from quire.scheduler_proc.trace.journal import Journal

log = event_logger("scheduler")

MAX_TOO_LARGE = 5
"""Consecutive steps out of memory, without a token in between, after which the worker group is replaced."""

IDLE_MS = 1000
COMPILING_MS = 100
"""Longest sleep of the loop; COMPILING_MS while requests wait for grammars, to bound the delay of a refusal."""


class SchedulerLoop:
    """Moves messages between the front ends, the Scheduler and the workers. Takes no scheduling decision itself.

    Owns the front ends, the worker group and the journal. The Scheduler is created when all ranks are ready for the
    first time, because then the number of blocks is known, and outlives worker groups. Without one, requests wait.
    """

    def __init__(
        self,
        config: EngineConfig,
        transport: Transport,
        child: Child,
        worker_epoch: int = FIRST_WORKER_EPOCH,
        clock: Callable[[], float] = time.monotonic,
        directory: Path | None = None,
    ) -> None:
        """``worker_epoch``: that of the group that is starting. ``directory``: holds what must survive this process."""
        self._config = config
        self._layout = kv_layout(config.model, config.block_size, config.kv_cache_dtype)
        self._transport = transport
        self._front_ends = FrontEnds(transport.hub, config, self._on_client_disconnect)
        self._pause = KeptPause(directory, self._front_ends)
        # Opened before anything that may take long, such as reading the folder of a disk: workers connect to this
        # socket with their own time limit.
        self._workers: WorkerGroup | None = transport.open_group(worker_epoch)
        self._deadline = StepDeadline()
        self._step_times = StepObservations()
        self._child = child
        self._clock = clock
        self._journal = Journal(config, clock, is_restart=worker_epoch > FIRST_WORKER_EPOCH)
        self._grammars = Grammars(config, self._journal, clock)
        self._transfers = TierTransfers(config, transport, self._journal, worker_epoch)
        self._ticks = Ticks(self._journal)
        self._scheduler: Scheduler | None = None
        self._throughput = ThroughputLog(clock())
        self._num_too_large = 0
        self._progress_due = True
        """Whether to report the next generated token to the supervisor."""
        self._running = True
        self._stop_reason = ""
        """The reason given by the supervisor when it stops a failed engine."""
        self._dump_wanted = False
        transport.add(self._grammars.fileno())
        transport.add(child.fileno())
        self._collector = Collector(clock, self._journal.idle)
        is_published = config.feeds_router or config.kv_events_endpoint
        self._kv_events = transport.open_kv_events(config) if is_published else None

    def run(self) -> None:
        """Run until the supervisor sends ``stop``.

        Raises:
            ConfigError: a file given in the configuration cannot be written.
        """
        # The watchdog's thread calls this while the loop is stuck, so that the dump shows the events that led there.
        self._child.watch_progress(lambda: self._journal.dump("the scheduler hangs"))
        try:
            while self._running:
                self._wait()
                self.turn()
            if self._workers is not None:
                self._workers.send(Shutdown())
            if self._stop_reason:
                self._journal.dump(self._stop_reason)
                self._journal.close(self._stop_reason)
        except Exception as error:
            self._fail(error)
            raise
        finally:
            self._journal.close()
            self._collector.stop()
            self._grammars.close()
            if self._kv_events is not None:
                self._kv_events.close()

    def dump(self) -> None:
        """Write the last events to a file after this turn. May be called from a signal handler."""
        self._dump_wanted = True

    def turn(self) -> None:
        """Run one turn: receive all messages, schedule, send."""
        self._child.progress()
        # Commands come first: a worker epoch that has ended is then abandoned before anything of it is read.
        for command in self._child.take_commands():
            self._on_command(command)
        if self._scheduler is not None:
            # The time becomes an event before any decision of this turn. A decision that looked at a clock instead
            # could not be replayed.
            self._ticks.turn(self._scheduler, self._clock())
        self._receive_from_workers()
        self._receive_from_front_ends()
        if self._scheduler is not None:
            # After all messages and before the steps: answers of copies may let a waiting request continue in the very
            # next step.
            self._transfers.turn(self._scheduler, self._workers, self._clock())
            self._grammars.release(self._scheduler)
            if self._workers is not None:
                self._grammars.send_inputs(self._scheduler, self._workers)
        self._send_steps()
        # Looked at once a turn, and not where a send fails: the decision that was being sent is valid and recorded, and
        # the next group executes it.
        if self._workers is not None and self._workers.is_broken:
            self._lose_group("a worker no longer reads messages")
        self._reply()
        if self._kv_events is not None:  # changes made outside steps; one replay request, more wait for the next turn
            self._kv_events.publish(self._clock())
            self._kv_events.answer()
        self._collector.turn()

    def _wait(self) -> None:
        self._journal.pause()
        timeout_ms = COMPILING_MS if self._grammars.has_waiting_requests else IDLE_MS
        now = self._clock()
        if now >= self._throughput.due:
            self._throughput.report(self._scheduler, now)
        replays = None if self._kv_events is None else self._kv_events.remaining()
        for remaining in (self._deadline.remaining(now), self._transfers.remaining(now), replays):
            if remaining is not None:
                timeout_ms = max(0, min(timeout_ms, int(remaining * 1000) + 1))
        masks_due = self._grammars.deadline
        if masks_due is not None and (due_ms := max(0, ceil((masks_due - now) * 1000))) < timeout_ms:
            self._transport.wait(due_ms)
        # A step is overdue only if nothing at all arrived: a result that lies in a socket, because this process was not
        # scheduled for seconds, must be read before its workers are blamed.
        elif not self._transport.wait(timeout_ms):
            self.on_silence()

    def on_silence(self) -> None:
        """Handle a timeout: detect an overdue step."""
        remaining = self._deadline.remaining(self._clock())
        if remaining is not None and remaining < 0:
            self._lose_group("the workers have not finished a step in time")

    def _on_command(self, command: Command) -> None:
        match command.kind:
            case "stop":
                self._running = False
                self._stop_reason = command.text
            case "worker_epoch":
                self._open_group(command)
            case "front_end_exited":
                self._progress_due = True
                self._front_ends.on_process_exit(command.pid)

    def _send_steps(self) -> None:
        scheduler, workers = self._scheduler, self._workers
        if workers is None or not workers.is_ready:
            return
        # A step whose bitmasks are missing stops the pipeline: its result decides what the next step contains, and
        # workers take messages in order.
        while scheduler is not None and scheduler.can_schedule and scheduler.step_awaiting_inputs is None:
            now = self._clock()
            self._journal.before_step()
            step = scheduler.schedule(now)
            # Loads go before the step and stores after it: a request may wait for a load, but nothing waits for a
            # store, whose source the step may still be writing.
            self._transfers.send_loads(scheduler, workers, now)
            frames = None if step is None else workers.send(step)
            self._transfers.send_stores(scheduler, workers)
            decided = self._clock()
            self._journal.note(scheduler.decisions.take())
            self._journal.decided(now, step, frames)
            if step is None:
                return
            self._step_times.schedule.observe(decided - now)
            self._deadline.sent(step.step, scheduler.in_flight.records[-1].num_tokens, now)
            self._grammars.send_inputs(scheduler, workers)
            if self._kv_events is not None:
                self._kv_events.publish(now)
            self._collector.after_step()

    def _reply(self) -> None:
        if self._scheduler is not None:
            self._journal.note(self._scheduler.decisions.take())
            if messages := self._scheduler.take_messages():
                began = self._clock()
                for client, message in messages:
                    reply = self._with_process_counters(message) if isinstance(message, Statistics) else message
                    self._front_ends.send(client, reply)
                self._step_times.reply.observe(self._clock() - began)
        if self._dump_wanted:
            self._dump_wanted = False
            self._journal.dump_in_thread("requested by signal")

    def _with_process_counters(self, statistics: Statistics) -> Statistics:
        counts = {"num_trace_lines_lost": self._journal.num_lost_lines, "num_slow_steps": self._deadline.num_slow}
        counts |= {"block_size": self._config.block_size, "num_invalid_draft_tokens": self._grammars.num_invalid_drafts}
        return self._step_times.add_to(statistics, **counts)

    # ---- the workers

    def _receive_from_workers(self) -> None:
        try:
            while self._workers is not None and (received := self._workers.receive()) is not None:
                self._on_worker_message(self._workers, *received)
        # A WorkerFault too, so it must be caught first: here the workers are sound, and have only refused a step that
        # their memory cannot hold.
        except StepTooLarge as fault:
            self._restart_with_smaller_steps(fault)
        except (WorkerFault, ProtocolError, EngineError) as error:
            self._lose_group(str(error))

    def _on_worker_message(self, workers: WorkerGroup, rank: int, received: Received) -> None:
        """Process a worker message. Raises WorkerFault or EngineError when the group can no longer be trusted."""
        match received.message:
            case ModelRunnerOutput() | Proposed() if self._scheduler is not None:
                self._on_step_message(self._scheduler, workers, received)
            case BlocksMoved() | DiskContents() | AdapterLoaded() | Encoded() as answer if self._scheduler is not None:
                self._transfers.answered(self._scheduler, answer, self._clock())
            case Hello() as hello:
                # A worker of another version is refused for good, since it would be as wrong after a restart.
                if reason := mismatch(hello):
                    workers.send_to(rank, Refused(reason, final=True))
                    raise EngineError(f"worker: {reason}")
                workers.send_to(rank, Welcome(PROTOCOL_VERSION, self._config.digest))
                workers.send_to(rank, self._configure(workers))
            case Ready() as ready:
                if (group := workers.ready(rank, ready)) is not None:
                    self._on_group_ready(workers, group)
            case Heartbeat() as beat:
                workers.send(beat)  # to all ranks: a digest covers the sequence number of each link
            case Fault() as fault:
                self._lose_group(fault.text, ends_itself=True)
            case _:
                raise EngineError(f"unexpected {type(received.message).__name__} from the worker")

    def _configure(self, workers: WorkerGroup) -> Configure:
        """Return the configuration of a new group. A replacement continues after the last step, with as many blocks."""
        told, scheduler = (workers.worker_epoch, self._layout, self._config), self._scheduler
        pools = () if scheduler is None else (scheduler.kv.pool.num_blocks, scheduler.kv.num_slots)
        resumed = () if scheduler is None else (scheduler.last_step, *pools)
        return Configure(*told, *resumed)

    def _on_step_message(self, scheduler: Scheduler, workers: WorkerGroup, received: Received) -> None:
        before = scheduler.num_results
        if isinstance(received.message, Proposed):
            self._grammars.proposed(received.message)
        else:
            now = self._clock()
            duration = self._deadline.result_received(received.message.step, now)
            scheduler.consume(received.message)
            self._step_times.result(duration, self._clock() - now)
            # Recorded after the Scheduler has taken it: a message that it refuses with an error is not an event, and a
            # replay must not see it.
            self._journal.consumed(0, received.frames, received.message)
        self._grammars.send_inputs(scheduler, workers)
        if scheduler.num_results > before:
            self._num_too_large = 0
            if self._progress_due:
                self._report_progress()

    def _report_progress(self) -> None:
        self._progress_due = False
        if (workers := self._workers) is not None:
            self._child.report(Report("progress", worker_epoch=workers.worker_epoch))

    def _restart_with_smaller_steps(self, fault: StepTooLarge) -> None:
        """Restart running requests on the same workers with smaller steps.

        The workers have dropped their rows themselves.
        """
        self._num_too_large += 1
        if self._num_too_large == MAX_TOO_LARGE:
            self._lose_group(str(fault))
            return
        assert self._scheduler is not None
        # Half of the budget at a time, because how much memory a step takes is not known: its peak depends on the
        # kernels' workspaces.
        budget_halved = self._scheduler.halve_token_budget()
        budget = self._scheduler.config.max_num_batched_tokens
        log.error("step failed; running requests will be recomputed", reason=fault, max_num_batched_tokens=budget)
        self._begin_worker_epoch(str(fault), budget_halved=budget_halved, new_workers=False)

    def _begin_worker_epoch(self, reason: str, *, budget_halved: bool, new_workers: bool) -> bool:
        """Restart running requests in a new worker epoch. Return whether a suspect was the cause and has failed."""
        self._grammars.forget_step()
        if self._scheduler is None:
            return False
        is_found = self._scheduler.begin_worker_epoch(new_workers=new_workers)
        self._journal.worker_epoch_began(budget_halved=budget_halved, new_workers=new_workers, reason=reason)
        return is_found

    def _lose_group(self, reason: str, *, ends_itself: bool = False) -> None:
        """Abandon the worker group, which died or sent invalid messages. The supervisor ends and replaces it.

        Args:
            ends_itself: the worker reports the reason to the supervisor itself.
        """
        workers, self._workers = self._workers, None
        if workers is None:
            return
        if self._scheduler is not None:  # otherwise no request runs, and the supervisor logs the reason
            log.error("workers lost; running requests will be recomputed by new workers", reason=reason)
        # A worker that reports its own fault ends by itself. A second report would count one death twice, of which five
        # in a row end the engine.
        if not ends_itself:
            self._child.report(Report("group_failed", " ".join(reason.split()), worker_epoch=workers.worker_epoch))
        # Closed at once: the next group has sockets of its own, so that no late message of these workers can be read as
        # one of theirs.
        self._transport.close_group(workers)
        self._deadline.forget()
        self._transfers.forget()
        self._num_too_large = 0
        if self._begin_worker_epoch(reason, budget_halved=False, new_workers=True):
            self._child.report(Report("suspect_confirmed", " ".join(reason.split()), worker_epoch=workers.worker_epoch))
        # Last, when the Scheduler has preempted everything: a front end that reads it may ask at once.
        self._front_ends.announce(EngineState("recovering" if self._scheduler is not None else "loading"))

    def _open_group(self, command: Command) -> None:
        """Open a new worker group. The previous group has ended, even when that was not noticed here."""
        self._lose_group(command.text)
        self._workers = self._transport.open_group(command.worker_epoch)
        self._progress_due = True

    def _on_group_ready(self, workers: WorkerGroup, ready: Ready) -> None:
        """Handle that all ranks can run steps. Makes the Scheduler for the first group."""
        scheduler = self._scheduler or self._make_scheduler(workers, ready)
        # A replacement with a smaller pool could not hold the requests that are running, and a replay would have
        # another pool. It is refused rather than adapted to.
        found = ready.pool_size, ready.plan.block_size, ready.num_slots
        expected = scheduler.kv.pool.num_blocks, self._config.block_size, scheduler.kv.num_slots
        if found != expected:
            pools = (
                "the new workers have {} KV blocks of {} tokens and {} slots of states, but the previous workers had "
                "{} of {} and {}"
            )
            raise EngineError(pools.format(*found, *expected))
        self._transfers.begin(scheduler, workers)
        self._child.report(Report("ready", ready.plan.device, detail=ready.detail, worker_epoch=workers.worker_epoch))
        if not scheduler.table.requests:
            self._report_progress()  # no request will generate a token
        self._front_ends.announce(EngineState("ready"))

    def _make_scheduler(self, workers: WorkerGroup, ready: Ready) -> Scheduler:
        """Make the Scheduler, with the pools of the workers and a block size that their attention kernels can read."""
        block_size = ready.plan.block_size
        # Only now, because the workers' attention library decides which block sizes it can read. The first group
        # decides for the engine's whole time.
        self._config = msgspec.structs.replace(self._config, block_size=block_size)
        self._layout = self._layout.with_block_size(block_size)
        pages = self._transfers.open(workers)
        header = TraceHeader(self._config, self._layout, ready.pool_size, *pages, num_slots=ready.num_slots)
        events, hash_bytes = self._kv_events, HASH_BYTES[self._config.prefix_caching_hash_algo]
        recorder = None if events is None else events.record(self._layout, hash_bytes)
        scheduler = self._scheduler = self._journal.begin(header, recorder)
        self._pause.restore(scheduler, self._journal)
        self._collector.start()
        return scheduler

    # ---- front ends

    def _receive_from_front_ends(self) -> None:
        while (received := self._front_ends.receive()) is not None:
            self._on_client_message(*received)

    def _on_client_message(self, client: int, received: PeerMessage) -> None:
        match received.message:
            case AddRequest() as request if self._scheduler is None:
                refusal = Rejected(request.request_id, "loading", "", "the engine is still loading")
                self._front_ends.send(client, refusal)
            case event if self._scheduler is not None and isinstance(event, ClientEvent):
                # Looked up before the Scheduler takes the event, which adds the request: a second one with the same id
                # is refused and must not be held for its grammar.
                is_known = (client, getattr(event, "request_id", "")) in self._scheduler.table.requests
                self._scheduler.consume(event, client)
                self._journal.consumed(client, received.frames, event)
                if isinstance(event, AddRequest) and not is_known:
                    self._grammars.hold(self._scheduler, event, client)
                self._pause.follow(self._scheduler)
                self._collector.after_message()
            case _:
                pass  # requests that only a loaded engine can answer

    def _on_client_disconnect(self, client: int) -> None:
        if self._scheduler is not None:
            self._scheduler.drop_client(client)
            self._journal.client_dropped(client)

    def _fail(self, error: Exception) -> None:
        """End every request with an error, report the failed state to all front ends, and dump the last events.

        After an unforeseen error the state may be inconsistent, so only the dump is written.
        """
        reason = str(error)
        # Only an expected error leaves a state in which requests can be ended one by one.
        if isinstance(error, QuireError):
            if self._scheduler is not None:
                self._scheduler.fail_all("engine_fault: the engine stopped")
                self._reply()
            self._front_ends.announce(EngineState("failed", reason))
        self._journal.dump(f"{type(error).__name__}: {reason}")
        self._journal.close(reason)
