"""The scheduler process' loop: take messages, decide, send, reply."""

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq

from quire.protocol.channel import Received
from quire.protocol.child import Child, Report
from quire.protocol.codec import Codec, ProtocolError
from quire.protocol.config import FIRST_EPOCH, EngineConfig
from quire.protocol.errors import ConfigError, EngineError, QuireError
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
from quire.protocol.zmq_channel import FromPeer, ZmqChannel, ZmqHub
from quire.scheduler_proc.collect import Collector
from quire.scheduler_proc.kv.events import KVEventRecorder
from quire.scheduler_proc.kv_event_publisher import KVEventPublisher
from quire.scheduler_proc.scheduler import Scheduler, StepTooLarge, WorkerFault
from quire.scheduler_proc.structured.drafts import has_drafts
from quire.scheduler_proc.structured.manager import GrammarManager
from quire.scheduler_proc.trace.event_log import TraceHeader
from quire.scheduler_proc.trace.journal import Journal
from quire.scheduler_proc.worker_group import WorkerGroup

log = logging.getLogger(__name__)

MAX_FAULTS_IN_A_ROW = 5
"""Results that cannot be right, with no token in between, after which the engine gives up."""

IDLE_MS = 1000
COMPILING_MS = 100
"""How long the loop sleeps at most: while somebody waits for a grammar, no longer than a refusal may be late."""


class SchedulerLoop:
    """Moves messages between the front ends, the Scheduler and the workers; decides nothing itself.

    Owns the sockets, who is connected, and the journal. The Scheduler exists once every rank is ready,
    when the number of blocks is known.
    """

    def __init__(
        self,
        config: EngineConfig,
        hub: ZmqHub,
        workers: Sequence[ZmqChannel],
        child: Child,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._layout = kv_layout(config.model, config.block_size, config.kv_cache_dtype)
        self._hub = hub
        self._workers = WorkerGroup(workers)
        self._child = child
        self._clock = clock
        self._journal = Journal(config, clock)
        self._events: Codec[Any] = Codec(Consumed)
        self._grammars = GrammarManager(config, clock)
        self._proposed: Proposed | None = None
        self._scheduler: Scheduler | None = None
        self._peers: dict[int, bytes] = {}
        self._clients: dict[bytes, int] = {}
        self._next_client = 0
        self._faults_in_a_row = 0
        self._open = True
        self._dump_wanted = False
        self._poller = zmq.Poller()
        for socket in (hub.socket, *(channel.socket for channel in workers)):
            self._poller.register(socket, zmq.POLLIN)
        self._poller.register(self._grammars.fileno(), zmq.POLLIN)
        self._collector = Collector(clock)
        self._kv_events: KVEventPublisher | None = None
        if config.kv_events_endpoint:
            self._kv_events = self._open_kv_events(hub.socket.context)

    def run(self) -> None:
        """Until it is told to stop, or the worker cannot go on (then raises what it said)."""
        try:
            while self._open:
                self._wait()
                self._take_from_workers()
                self._take_from_front_ends()
                self._take_grammars()
                self._send_steps()
                self._reply()
                self._serve_kv_events()
            self._workers.send(Shutdown())
        except Exception as error:
            self._give_up(error)
            raise
        finally:
            self._journal.close()
            self._collector.stop()
            self._grammars.close()
            if self._kv_events is not None:
                self._kv_events.close()

    def stop(self) -> None:
        """Leave the loop after this round; may be called from a signal handler."""
        self._open = False

    def dump(self) -> None:
        """Write the last events to a file after this round; may be called from a signal handler."""
        self._dump_wanted = True

    def _wait(self) -> None:
        self._journal.pause()
        if not self._poller.poll(COMPILING_MS if self._grammars.is_waited_for else IDLE_MS):
            self._journal.idle()
            self._collector.idle()

    def _send_steps(self) -> None:
        scheduler = self._scheduler
        while scheduler is not None and scheduler.can_schedule and scheduler.awaited is None:
            now = self._clock()
            self._journal.before_step()
            step = scheduler.schedule(now)
            frames = None if step is None else self._workers.send(step)
            self._say_reasons(scheduler)
            self._journal.decided(now, step, frames)
            if step is None:
                return
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
        return msgspec.structs.replace(statistics, num_trace_lines_lost=self._journal.num_lost_lines)

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
        self._workers.send(inputs)
        record.inputs_given = True
        for client, fail in failures:
            self._consume(scheduler, fail, client)

    def _consume(self, scheduler: Scheduler, event: Hold | Release | Refuse | Fail, client: int) -> None:
        """An event of our own: it is logged like one that came over a wire."""
        scheduler.consume(event, client)
        self._journal.consumed(client, self._events.encode(0, 0, event), event)

    # ---- cache events

    def _open_kv_events(self, context: "zmq.Context[Any]") -> KVEventPublisher:
        config = self._config
        publisher = KVEventPublisher(
            context, config.kv_events_endpoint, config.kv_events_replay_endpoint, secrets.randbits(64)
        )
        if publisher.replay_socket is not None:
            self._poller.register(publisher.replay_socket, zmq.POLLIN)
        return publisher

    def _serve_kv_events(self) -> None:
        """What changed without a step, and one ask for what was missed: the next one waits for the next round."""
        if self._kv_events is not None:
            self._kv_events.publish(self._clock())
            self._kv_events.answer()

    # ---- the workers

    def _take_from_workers(self) -> None:
        while (received := self._workers.receive()) is not None:
            self._on_worker_message(*received)

    def _on_worker_message(self, rank: int, received: Received) -> None:
        match received.message:
            case ModelRunnerOutput() | Proposed() if self._scheduler is not None:
                self._take_from_step(self._scheduler, received)
            case Hello() as hello:
                if hello.protocol_version != PROTOCOL_VERSION:
                    self._workers.send_to(rank, Refused(_versions(hello)))
                    raise EngineError(f"worker: {_versions(hello)}")
                self._workers.send_to(rank, Welcome(PROTOCOL_VERSION, self._config.digest))
                self._workers.send_to(rank, Configure(FIRST_EPOCH, self._layout, self._config))
            case Ready() as ready:
                if (group := self._workers.ready(rank, ready)) is not None:
                    self._begin(group)
            case Heartbeat():
                pass
            case Fault() as fault:
                raise (ConfigError if fault.kind == "checkpoint" else EngineError)(fault.text)
            case _:
                raise EngineError(f"unexpected {type(received.message).__name__} from the worker")

    def _take_from_step(self, scheduler: Scheduler, received: Received) -> None:
        """What cannot be right costs its steps, not the requests in them; five without a token, the engine."""
        before = scheduler.num_generated_tokens
        try:
            if isinstance(received.message, Proposed):
                self._proposed = received.message  # of a step before, perhaps: then nobody asks for it
            else:
                scheduler.consume(received.message)
                self._journal.consumed(0, received.frames, received.message)
            self._give_inputs(scheduler)
            if scheduler.num_generated_tokens > before:
                self._faults_in_a_row = 0
        except WorkerFault as fault:
            self._on_fault(scheduler, fault)

    def _on_fault(self, scheduler: Scheduler, fault: WorkerFault) -> None:
        self._faults_in_a_row += 1
        if self._faults_in_a_row == MAX_FAULTS_IN_A_ROW:
            raise fault
        log.error("%s; what runs is computed again", fault)
        halved = isinstance(fault, StepTooLarge) and scheduler.halve_steps()
        if halved:
            log.error("steps have at most %d tokens from now on", scheduler.config.max_num_batched_tokens)
        self._proposed = None
        scheduler.begin_epoch()
        self._journal.epoch_began(halved=halved, reason=str(fault))

    def _begin(self, ready: Ready) -> None:
        header = TraceHeader(self._config, self._layout, min(ready.num_blocks))
        self._scheduler = header.make_scheduler()
        self._journal.begin(self._scheduler, header)
        if self._kv_events is not None:
            recorder = KVEventRecorder(self._layout, HASH_BYTES[self._config.prefix_caching_hash_algo])
            self._scheduler.kv.pool.events = recorder
            self._kv_events.follow(recorder)
        self._collector.start()
        self._child.report(Report("ready", detail=ready.timings))
        for client in self._peers:
            self._send_to(client, EngineState("ready"))

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
        self._send_to(client, Welcome(PROTOCOL_VERSION, self._config.digest, self._config.max_model_len))
        self._send_to(client, EngineState("ready" if self._scheduler else "loading"))

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
            case _:
                pass  # a heartbeat, or a question that only a loaded engine can answer

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
        if isinstance(error, QuireError | WorkerFault | ProtocolError):
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
