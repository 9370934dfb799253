"""The scheduler process' loop: take messages, decide, send, reply."""

import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from quire.protocol.channel import Frames, Received
from quire.protocol.child import Child, Command, Report
from quire.protocol.codec import Codec, ProtocolError
from quire.protocol.config import FIRST_EPOCH, EngineConfig
from quire.protocol.errors import EngineError, QuireError
from quire.protocol.kv_events import HASH_BYTES
from quire.protocol.kv_layout import kv_layout
from quire.protocol.messages import (
    PROTOCOL_VERSION,
    Abort,
    AddRequest,
    Configure,
    Consumed,
    Control,
    EngineState,
    Fail,
    Fault,
    Heartbeat,
    Hello,
    Hold,
    Message,
    ModelRunnerOutput,
    Proposed,
    Ready,
    Refuse,
    Refused,
    Rejected,
    Release,
    Shutdown,
    Statistics,
    Stop,
    Welcome,
)
from quire.protocol.zmq_channel import FromPeer
from quire.scheduler_proc.collect import Collector
from quire.scheduler_proc.kv.events import KVEventRecorder
from quire.scheduler_proc.kv_event_publisher import KVEventPublisher
from quire.scheduler_proc.scheduler import Scheduler, StepTooLarge, WorkerFault
from quire.scheduler_proc.step_deadline import StepDeadline
from quire.scheduler_proc.structured.drafts import has_drafts
from quire.scheduler_proc.structured.manager import GrammarManager
from quire.scheduler_proc.trace.event_log import TraceHeader
from quire.scheduler_proc.trace.journal import Journal
from quire.scheduler_proc.worker_group import WorkerGroup

log = logging.getLogger(__name__)

MAX_TOO_LARGE = 5
"""Steps in a row that did not fit the workers' memory, with no token in between, after which they are ended."""

IDLE_MS = 1000
COMPILING_MS = 100
"""How long the loop sleeps at most: while somebody waits for a grammar, no longer than a refusal may be late."""


class Hub(Protocol):
    """Many front ends, each behind a name; see ``ZmqHub``."""

    def send(self, peer: bytes, message: Any) -> Frames | None: ...

    def receive(self) -> FromPeer | None: ...

    def forget(self, peer: bytes) -> None: ...


class Doors(Protocol):
    """Where messages come in; see ``sockets.Sockets``."""

    @property
    def hub(self) -> Hub: ...

    def open_group(self, epoch: int) -> WorkerGroup:
        """Where the workers of this epoch will connect to."""
        ...

    def close_group(self, group: WorkerGroup) -> None: ...

    def add(self, source: Any) -> None:
        """Something else to be woken by."""
        ...

    def wait(self, milliseconds: int) -> bool:
        """False when nothing came for so long."""
        ...

    def open_kv_events(self, config: EngineConfig) -> KVEventPublisher: ...


class SchedulerLoop:
    """Moves messages between the front ends, the Scheduler and the workers; decides nothing itself.

    Owns who is connected, the group of workers and the journal. The Scheduler exists once every rank is ready for the
    first time, when the number of blocks is known; it outlives every group. Without a group, requests wait.
    """

    def __init__(
        self,
        config: EngineConfig,
        doors: Doors,
        child: Child,
        epoch: int = FIRST_EPOCH,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``epoch``: of the workers that are on their way."""
        self._config = config
        self._layout = kv_layout(config.model, config.block_size, config.kv_cache_dtype)
        self._doors = doors
        self._hub = doors.hub
        self._workers: WorkerGroup | None = doors.open_group(epoch)
        self._deadline = StepDeadline()
        self._child = child
        self._clock = clock
        self._journal = Journal(config, clock)
        self._events: Codec[Any] = Codec(Consumed)
        self._grammars = GrammarManager(config, clock)
        self._proposed: Proposed | None = None
        self._scheduler: Scheduler | None = None
        self._peers: dict[int, bytes] = {}
        self._clients: dict[bytes, int] = {}
        self._pids: dict[int, int] = {}
        self._next_client = 0
        self._num_too_large = 0
        self._progress_due = True
        """The supervisor is to hear of the next token."""
        self._open = True
        self._why_stopped = ""
        """The reason, where it is a failure."""
        self._dump_wanted = False
        doors.add(self._grammars.fileno())
        doors.add(child.fileno())
        self._collector = Collector(clock)
        self._kv_events = doors.open_kv_events(config) if config.kv_events_endpoint else None

    def run(self) -> None:
        """Until it is told to stop.

        Raises:
            ConfigError: a file that it was told to write cannot be written.
        """
        self._child.watch_progress(lambda: self._journal.dump("the scheduler hangs"))
        try:
            while self._open:
                self._wait()
                self.turn()
            if self._workers is not None:
                self._workers.send(Shutdown())
            if self._why_stopped:
                self._journal.dump(self._why_stopped)
                self._journal.close(self._why_stopped)
        except Exception as error:
            self._give_up(error)
            raise
        finally:
            self._journal.close()
            self._collector.stop()
            self._grammars.close()
            if self._kv_events is not None:
                self._kv_events.close()

    def dump(self) -> None:
        """Write the last events to a file after this round; may be called from a signal handler."""
        self._dump_wanted = True

    def turn(self) -> None:
        """One round: take whatever came, decide, send."""
        self._child.progress()
        for command in self._child.take_commands():
            self._obey(command)
        self._take_from_workers()
        self._take_from_front_ends()
        self._take_grammars()
        self._send_steps()
        if self._workers is not None and self._workers.is_broken:
            self._lose_group("a worker does not take messages any more")
        self._reply()
        self._serve_kv_events()

    def _wait(self) -> None:
        self._journal.pause()
        patience = COMPILING_MS if self._grammars.is_waited_for else IDLE_MS
        remaining = self._deadline.remaining(self._clock())
        if remaining is not None:
            patience = max(0, min(patience, int(remaining * 1000) + 1))
        if not self._doors.wait(patience):
            self.nothing_came()

    def nothing_came(self) -> None:
        """Neither a message nor anything else for a while: a step may be overdue, or there is time for other things."""
        remaining = self._deadline.remaining(self._clock())
        if remaining is not None and remaining < 0:
            self._lose_group("the workers have not finished a step in time")
        self._journal.idle()
        self._collector.idle()

    def _obey(self, command: Command) -> None:
        match command.kind:
            case "stop":
                self._open = False
                self._why_stopped = command.text
            case "epoch":
                self._expect_group(command)
            case "client_gone":
                self._progress_due = True
                for client in [client for client, pid in self._pids.items() if pid == command.pid]:
                    self._forget(client)

    def _send_steps(self) -> None:
        scheduler, workers = self._scheduler, self._workers
        if workers is None or not workers.is_ready:
            return
        while scheduler is not None and scheduler.can_schedule and scheduler.awaited is None:
            now = self._clock()
            self._journal.before_step()
            step = scheduler.schedule(now)
            frames = None if step is None else workers.send(step)
            self._say_reasons(scheduler)
            self._journal.decided(now, step, frames)
            if step is None:
                return
            self._deadline.sent(step.step, scheduler.in_flight.records[-1].num_tokens, now)
            self._give_inputs(scheduler)
            if self._kv_events is not None:
                self._kv_events.publish(now)
            self._collector.after_step()

    def _reply(self) -> None:
        if self._scheduler is not None:
            self._say_reasons(self._scheduler)
            for client, message in self._scheduler.take_messages():
                self._send_to(client, self._with_losses(message) if isinstance(message, Statistics) else message)
        if self._dump_wanted:
            self._dump_wanted = False
            self._journal.dump_aside("somebody asked")

    def _with_losses(self, statistics: Statistics) -> Statistics:
        lost, slow = self._journal.num_lost_lines, self._deadline.num_slow
        return msgspec.structs.replace(statistics, num_trace_lines_lost=lost, num_slow_steps=slow)

    def _say_reasons(self, scheduler: Scheduler) -> None:
        decisions = scheduler.decisions.take()
        self._journal.note(decisions)
        for decision in decisions:
            if decision.kind == "preempt":
                log.info("%s", decision)
            else:
                log.debug("%s", decision)

    # ---- grammars

    def _take_grammars(self) -> None:
        """Those that are ready, or never will be."""
        told = self._grammars.poll()
        if self._scheduler is None:
            return
        live = self._scheduler.table.requests
        for client, event in told:
            if (client, event.request_id) in live:
                self._consume(self._scheduler, event, client)
        self._grammars.prune(live)

    def _give_inputs(self, scheduler: Scheduler) -> None:
        """The masks that the oldest step waits for, if it does and its drafts are known. No step is sent before."""
        record = scheduler.awaited
        if record is None:
            return
        proposed = None
        if has_drafts(record):
            proposed = self._proposed
            if proposed is None or proposed.step != record.step:
                return
        inputs, failures = self._grammars.sample_inputs(record, proposed)
        assert self._workers is not None
        self._workers.send(inputs)
        record.inputs_given = True
        for client, fail in failures:
            self._consume(scheduler, fail, client)

    def _consume(self, scheduler: Scheduler, event: Hold | Release | Refuse | Fail, client: int) -> None:
        """An event of our own: it is logged like one that came over a wire."""
        scheduler.consume(event, client)
        self._journal.consumed(client, self._events.encode(0, 0, event), event)

    # ---- cache events

    def _serve_kv_events(self) -> None:
        """What changed without a step, and one ask for what was missed: the next one waits for the next round."""
        if self._kv_events is not None:
            self._kv_events.publish(self._clock())
            self._kv_events.answer()

    # ---- the workers

    def _take_from_workers(self) -> None:
        try:
            while self._workers is not None and (received := self._workers.receive()) is not None:
                self._on_worker_message(self._workers, *received)
        except StepTooLarge as fault:
            self._begin_again(fault)
        except (WorkerFault, ProtocolError, EngineError) as error:
            self._lose_group(str(error))

    def _on_worker_message(self, workers: WorkerGroup, rank: int, received: Received) -> None:
        """Raises WorkerFault, EngineError: the group cannot be trusted any more."""
        match received.message:
            case ModelRunnerOutput() | Proposed() if self._scheduler is not None:
                self._take_from_step(self._scheduler, received)
            case Hello() as hello:
                if hello.protocol_version != PROTOCOL_VERSION:
                    workers.send_to(rank, Refused(_versions(hello)))
                    raise EngineError(f"worker: {_versions(hello)}")
                workers.send_to(rank, Welcome(PROTOCOL_VERSION, self._config.digest))
                workers.send_to(rank, self._configure(workers))
            case Ready() as ready:
                if (group := workers.ready(rank, ready)) is not None:
                    self._begin(workers, group)
            case Heartbeat() as beat:
                workers.send(beat)  # to all: a step's digest covers the number that it has on each link
            case Fault() as fault:
                self._lose_group(fault.text, ends_itself=True)
            case _:
                raise EngineError(f"unexpected {type(received.message).__name__} from the worker")

    def _configure(self, workers: WorkerGroup) -> Configure:
        """A group after the first goes on where the one before ended, with a pool of the same size."""
        if self._scheduler is None:
            return Configure(workers.epoch, self._layout, self._config)
        num_blocks = self._scheduler.kv.pool.num_usable_blocks + 1
        return Configure(workers.epoch, self._layout, self._config, self._scheduler.last_step, num_blocks)

    def _take_from_step(self, scheduler: Scheduler, received: Received) -> None:
        before = scheduler.num_generated_tokens
        if isinstance(received.message, Proposed):
            self._proposed = received.message  # of a step before, perhaps: then nobody asks for it
        else:
            self._deadline.answered(received.message.step, self._clock())
            scheduler.consume(received.message)
            self._journal.consumed(0, received.frames, received.message)
        self._give_inputs(scheduler)
        if scheduler.num_generated_tokens > before:
            self._num_too_large = 0
            if self._progress_due:
                self._say_progress()

    def _say_progress(self) -> None:
        self._progress_due = False
        if self._workers is not None:
            self._child.report(Report("progress", epoch=self._workers.epoch))

    def _begin_again(self, fault: StepTooLarge) -> None:
        """The same workers go on, with smaller steps: they have dropped their rows themselves."""
        self._num_too_large += 1
        if self._num_too_large == MAX_TOO_LARGE:
            self._lose_group(str(fault))
            return
        assert self._scheduler is not None
        halved = self._scheduler.halve_steps()
        log.error("%s; what runs is computed again", fault)
        if halved:
            log.error("steps have at most %d tokens from now on", self._scheduler.config.max_num_batched_tokens)
        self._begin_epoch(str(fault), halved=halved, fresh=False)

    def _begin_epoch(self, reason: str, *, halved: bool, fresh: bool) -> None:
        self._proposed = None
        if self._scheduler is not None:
            self._scheduler.begin_epoch(fresh=fresh)
            self._journal.epoch_began(halved=halved, fresh=fresh, reason=reason)

    def _lose_group(self, reason: str, *, ends_itself: bool = False) -> None:
        """It died, or what it says cannot be right: nothing is asked of it any more. The supervisor ends it, if it has
        not ended, and starts another.

        Args:
            ends_itself: the supervisor hears the reason from the worker, whose word it is.
        """
        workers, self._workers = self._workers, None
        if workers is None:
            return
        log.error("%s; what runs is computed again by other workers", reason)
        if not ends_itself:
            self._child.report(Report("group_failed", " ".join(reason.split()), epoch=workers.epoch))
        self._doors.close_group(workers)
        self._deadline.forget()
        self._num_too_large = 0
        self._begin_epoch(reason, halved=False, fresh=True)
        for client in list(self._peers):
            self._send_to(client, EngineState("recovering" if self._scheduler is not None else "loading"))

    def _expect_group(self, command: Command) -> None:
        """The group before is gone, whether that was noticed here or not."""
        self._lose_group(command.text)
        self._workers = self._doors.open_group(command.epoch)
        self._progress_due = True

    def _begin(self, workers: WorkerGroup, ready: Ready) -> None:
        """All ranks can run steps."""
        scheduler = self._scheduler or self._make_scheduler(min(ready.num_blocks))
        if min(ready.num_blocks) != scheduler.kv.pool.num_usable_blocks + 1:
            raise EngineError("the workers have another number of KV blocks than those before")
        self._child.report(Report("ready", detail=ready.timings, epoch=workers.epoch))
        if not scheduler.table.requests:
            self._say_progress()  # there is nobody for whom there could be a token
        for client in list(self._peers):
            self._send_to(client, EngineState("ready"))

    def _make_scheduler(self, num_blocks: int) -> Scheduler:
        header = TraceHeader(self._config, self._layout, num_blocks)
        scheduler = self._scheduler = header.make_scheduler()
        self._journal.begin(scheduler, header)
        if self._kv_events is not None:
            recorder = KVEventRecorder(self._layout, HASH_BYTES[self._config.prefix_caching_hash_algo])
            scheduler.kv.pool.events = recorder
            self._kv_events.follow(recorder)
        self._collector.start()
        return scheduler

    # ---- front ends

    def _take_from_front_ends(self) -> None:
        while (received := self._hub.receive()) is not None:
            client = self._clients.get(received.peer)
            if isinstance(received.message, ProtocolError):
                self._cut(received.peer, "a message was damaged, lost or unknown")
            elif client is None:
                self._welcome(received)
            else:
                self._on_client_message(client, received)

    def _welcome(self, received: FromPeer) -> None:
        hello = received.message
        if not isinstance(hello, Hello) or hello.protocol_version != PROTOCOL_VERSION:
            self._cut(
                received.peer, _versions(hello) if isinstance(hello, Hello) else "the first message must be Hello"
            )
            return
        client = self._next_client
        self._next_client += 1  # never one that another had: its requests may still be ending
        self._clients[received.peer] = client
        self._peers[client] = received.peer
        self._pids[client] = hello.pid
        self._send_to(client, Welcome(PROTOCOL_VERSION, self._config.digest, self._config.max_model_len))
        self._send_to(client, EngineState("ready" if self._scheduler else "loading"))
        if self._scheduler is not None and not (self._workers is not None and self._workers.is_ready):
            self._send_to(client, EngineState("recovering"))

    def _on_client_message(self, client: int, received: FromPeer) -> None:
        match received.message:
            case AddRequest() as request if self._scheduler is None:
                self._send_to(client, Rejected(request.request_id, "loading", "", "the engine is still loading"))
            case AddRequest() | Abort() | Stop() | Control() as event if self._scheduler is not None:
                is_known = (
                    isinstance(event, AddRequest) and (client, event.request_id) in self._scheduler.table.requests
                )
                self._scheduler.consume(event, client)
                self._journal.consumed(client, received.frames, event)
                if isinstance(event, AddRequest) and not is_known:
                    self._hold_for_grammar(self._scheduler, event, client)
                self._collector.after_message()
            case Heartbeat() as beat:
                self._send_to(client, beat)
            case _:
                pass  # a question that only a loaded engine can answer

    def _hold_for_grammar(self, scheduler: Scheduler, event: AddRequest, client: int) -> None:
        """A request that has just come waits until its grammar is compiled; one that was refused does not."""
        if event.sampling.structured_outputs is None or (client, event.request_id) not in scheduler.table.requests:
            return
        if self._grammars.begin(client, event):
            self._consume(scheduler, Hold(event.request_id, "grammar"), client)

    def _send_to(self, client: int, message: Message) -> None:
        peer = self._peers.get(client)
        if peer is not None and self._hub.send(peer, message) is None:
            self._forget(client)

    def _cut(self, peer: bytes, reason: str) -> None:
        self._hub.send(peer, Refused(reason))
        client = self._clients.get(peer)
        if client is None:
            self._hub.forget(peer)
        else:
            self._forget(client)

    def _forget(self, client: int) -> None:
        """A front end is gone, does not read, or cannot be understood: its requests end."""
        peer = self._peers.pop(client)
        del self._pids[client]
        self._hub.forget(peer)
        del self._clients[peer]
        if self._scheduler is not None:
            self._scheduler.drop_client(client)
            self._journal.client_dropped(client)

    def _give_up(self, error: Exception) -> None:
        """Every request ends with an error, and every front end hears that the engine failed; then what led to it is
        written down. An error that nobody foresaw may have left anything behind: then only that is done.
        """
        reason = str(error)
        if isinstance(error, QuireError):
            if self._scheduler is not None:
                self._scheduler.fail_all("engine_fault: the engine stopped")
                self._reply()
            for client in list(self._peers):
                self._send_to(client, EngineState("failed", reason))
        self._journal.dump(f"{type(error).__name__}: {reason}")
        self._journal.close(reason)


def _versions(hello: Hello) -> str:
    return (
        f"protocol version {hello.protocol_version} of {hello.role} does not match the scheduler's {PROTOCOL_VERSION}"
    )
