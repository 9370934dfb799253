"""The real Scheduler against ``fake_worker.FakeWorker``, step by step or at random, over the real codec.

A test says when a step is decided, when the worker runs it and when its result arrives. Every client's stream is kept,
and each message to a client is checked against what must never happen (a token after the end, a second end).
"""

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from fake_adapters import mix_of
from fake_items import mixes_of
from fake_worker import FakeWorker, Row, extend_context, first_read, next_token
from lines_in_memory import numbered, record_log
from memory_channel import memory_pair
from side_parts import parts_of

from quire.protocol.config import EngineConfig, SpeculativeConfig
from quire.protocol.model.kv_layout import KVLayout, kv_layout
from quire.protocol.model.model_config import ModelConfig, MoeConfig
from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.wire.adapter_messages import AdapterLoaded, AdapterRef, LoadAdapter
from quire.protocol.wire.channel import Received
from quire.protocol.wire.codec import Codec
from quire.protocol.wire.front_end_messages import (
    Abort,
    AddRequest,
    Control,
    Ended,
    EndReason,
    Hypothesis,
    Rejected,
    Statistics,
    StepOutputs,
    Stop,
)
from quire.protocol.wire.item_messages import Encode, Encoded, InputItem
from quire.protocol.wire.side_rows import POOLED, PROMPT_LOGPROBS, ROUTED_EXPERTS
from quire.protocol.wire.timeline import TimelineEvent
from quire.protocol.wire.transfer_messages import BlocksMoved, MoveBlocks
from quire.protocol.wire.worker_messages import ModelRunnerOutput, SchedulerOutput, SchedulerToWorker, WorkerToScheduler
from quire.replay.core.policies import QUIRE, Policies
from quire.replay.core.scheduler import ReplayScheduler
from quire.replay.recorded.difference import Difference
from quire.replay.recorded.exact import replay_lines
from quire.scheduler_proc.costs.costs import CostState
from quire.scheduler_proc.process.worker_group import common_contents
from quire.scheduler_proc.requests.events import Consumed, Fail, Hold, Refuse, Release
from quire.scheduler_proc.requests.request import Request
from quire.scheduler_proc.scheduler import Scheduler, WorkerFault
from quire.scheduler_proc.trace.event_log import EventLog, TraceHeader
from quire.scheduler_proc.trace.lines import AnyLine, decode_line, encode_line

VOCAB_SIZE = 1000
NO_COSTS = CostState()
BESIDE = (BlocksMoved, AdapterLoaded, Encoded)
"""Answers to what the worker does beside the steps."""
MANY_CHECKS = 20


EXPERTS = MoeConfig(num_experts=61, num_experts_per_token=2, intermediate_size=8, layers=[0])


def make_config(**settings: Any) -> EngineConfig:
    """Return a small configuration; ``num_blocks`` is an argument of ``Driver``. ``adaptive``: adapt the number of
    drafts. The model has experts if they are kept."""
    model = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=settings.pop("vocab_size", VOCAB_SIZE),
        hidden_size=8,
        intermediate_size=8,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        eos_token_ids=settings.pop("eos", []),
        generates=settings.pop("generates", True),
        pooling=settings.pop("pooling", None),
        vision=settings.pop("vision", None),
        windows=settings.pop("windows", []),
        moe=EXPERTS if settings.get("enable_return_routed_experts") else None,
    )
    adaptive = settings.pop("adaptive", False)
    defaults = {
        "model_path": "",
        "speculative": SpeculativeConfig(method="ngram", adaptive=adaptive)
        if settings.get("num_speculative_tokens")
        else None,
        "max_model_len": 128,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_prefill_share": 1.0,
    }
    return EngineConfig(model=model, **{"block_size": 4, "async_scheduling": False} | defaults | settings)


def make_layout(config: EngineConfig) -> KVLayout:
    return kv_layout(config.model, config.block_size, config.kv_cache_dtype)


def make_request(request_id: str, prompt: list[int], output: list[int] | None = None, **extra: Any) -> AddRequest:
    """Return an arrival; keyword arguments that are not fields of AddRequest are sampling parameters."""
    own = {k: extra.pop(k) for k in list(extra) if k in AddRequest.__struct_fields__}
    delivered = None if output is None else np.array(output, np.int32)
    seed = own.pop("seed", 0)
    sampling = SamplingParams(**extra)
    return AddRequest(request_id, np.array(prompt, np.int32), sampling, seed, delivered, **own)


def expected_tokens(
    prompt: list[int],
    n: int,
    vocab_size: int = VOCAB_SIZE,
    *,
    adapter: AdapterRef | None = None,
    items: Sequence[InputItem] = (),
) -> list[int]:
    """Return the tokens that the fake model generates after ``prompt``, computed alone."""
    mix = 0 if adapter is None else mix_of(adapter.digest)
    context, mixes = 0, mixes_of(items)
    for at, token in enumerate(prompt):
        context = extend_context(context, token ^ mixes.get(at, 0))
    out: list[int] = []
    for _ in range(n):
        out.append(next_token(context ^ mix, vocab_size))
        context = extend_context(context, out[-1])
    return out


@dataclass
class Answer:
    """The messages of one request, as its client received them."""

    tokens: list[int] = field(default_factory=list)
    ended: Ended | None = None
    rejected: Rejected | None = None
    num_cached_tokens: int = -1
    prompt_logprobs: dict[int, tuple[int, float]] = field(default_factory=dict)
    """Position → (token, log probability)."""
    hypotheses: list[Hypothesis] = field(default_factory=list)
    pooled: dict[int, list[float]] = field(default_factory=dict)
    """Row → values."""
    experts: dict[int, list[int]] = field(default_factory=dict)
    """Position → experts."""
    timeline: list[TimelineEvent] = field(default_factory=list)

    @property
    def reason(self) -> EndReason | None:
        return None if self.ended is None else EndReason(self.ended.reason)


class Driver:
    """Owns the scheduler, the fake worker, and the two queues between them.

    Attributes:
        messages: (client, message) of the outputs of the last event or result.
        num_steady: number of requests in steady decode, summed over all decided steps.
    """

    def __init__(
        self,
        num_blocks: int = 33,
        *,
        steady_decode: bool = True,
        layout: KVLayout | None = None,
        policies: Policies = QUIRE,
        num_host_pages: int = 0,
        num_disk_pages: int = 0,
        num_slots: int = 0,
        before: "Driver | None" = None,
        costs: CostState = NO_COSTS,
        **settings: Any,
    ) -> None:
        """``num_blocks`` includes the null block, those of pages and slots page 0 and slot 0.
        Without ``layout``: one group of full attention. ``before``: the engine whose disk this one finds. ``costs``:
        what the scheduler has learned before."""
        self.config = config = make_config(**settings)
        layout = make_layout(config) if layout is None else layout
        forgotten = 0 if before is None or before.scheduler.kv.disk is None else before.scheduler.kv.disk.forgotten
        self.header = TraceHeader(
            config, layout, num_blocks, num_host_pages, num_disk_pages, forgotten, costs, num_slots
        )
        self.scheduler = self.header.make_scheduler(steady_decode=steady_decode)
        if policies != QUIRE:
            self.scheduler = ReplayScheduler(config, layout, num_blocks, steady_decode=steady_decode, policies=policies)
        self.worker = FakeWorker(
            num_blocks,
            config.block_size,
            config.max_num_seqs,
            config.max_num_batched_tokens,
            config.model.vocab_size,
            groups=layout.groups,
            caching=config.enable_prefix_caching,
            num_speculative_tokens=config.num_speculative_tokens,
            max_loras=config.max_loras if config.enable_lora else 0,
            max_cpu_loras=config.max_cpu_loras,
            pooling=config.model.pooling,
            num_slots=num_slots,
            num_state_parts=layout.num_state_parts,
            encoder_cache_tokens=config.encoder_cache_tokens,
        )
        pages = self.worker.host
        pages.disk = range(num_host_pages, num_host_pages + num_disk_pages)
        if before is not None:
            old = before.worker.host
            both = zip(pages.disk, old.disk, strict=False)
            pages.pages = {new: old.pages[at] for new, at in both if at in old.pages}
        self.messages: list[tuple[int, Any]] = []
        self.num_steady = 0
        self._num_stale = self._num_checks = 0
        self.worker.salt_of = lambda request_id: self.salts.get(request_id, "")
        self.salts: dict[str, str] = {}
        self.worker.items.of = lambda request_id: self.items.get(request_id, ())
        self.items: dict[str, Sequence[InputItem]] = {}
        self.answers: dict[str, Answer] = {}
        self.statistics_seen: list[Statistics] = []
        self.refused: list[Rejected] = []
        self.diffs: list[SchedulerOutput] = []
        self.moves: list[MoveBlocks] = []
        self.adapter_loads: list[LoadAdapter] = []
        self.sizes: list[int] = []
        self.log = EventLog()
        self._events: Codec[Any] = Codec(Consumed)
        self.down, self._up = memory_pair(WorkerToScheduler, SchedulerToWorker)
        self._to_run: deque[Received] = deque()
        self._held_back: deque[Received] = deque()
        self._clients: dict[tuple[int, int], str] = {}

    # ---- events

    def consume(self, event: Any, client: int = 0) -> None:
        """Send an event of a front end through the codec."""
        frames = [bytes(f) for f in self._events.encode(0, 0, event)]
        self.log.consumed(0.0, client, frames)
        self.scheduler.consume(self._events.decode(frames).message, client)
        self._collect()

    def add(self, request_id: str, prompt: list[int], output: list[int] | None = None, **extra: Any) -> None:
        """Add a request; extra keywords: ``client``, fields of AddRequest, or sampling parameters."""
        client = extra.pop("client", 0)
        self.salts[request_id] = extra.get("cache_salt", "")
        self.items[request_id] = extra.get("items") or self.items.get(extra.get("forked_from", ""), ())
        self.answers.setdefault(request_id, Answer())
        self.consume(make_request(request_id, prompt, output, **extra), client)

    def abort(self, *request_ids: str, client: int = 0) -> None:
        self.consume(Abort(list(request_ids)), client)

    def stop(self, request_id: str, num_output_tokens: int, client: int = 0) -> None:
        self.consume(Stop(request_id, num_output_tokens), client)

    def control(self, kind: str) -> Statistics:
        self.consume(Control(kind, 7))
        return self.statistics_seen[-1]

    def hold(self, request_id: str, reason: str = "grammar", client: int = 0) -> None:
        self.consume(Hold(request_id, reason), client)

    def release(self, request_id: str, client: int = 0) -> None:
        self.consume(Release(request_id), client)

    def refuse(self, request_id: str, client: int = 0) -> None:
        self.consume(Refuse(request_id, "invalid_grammar", "structured_outputs", "it does not compile"), client)

    def fail(self, request_id: str, client: int = 0) -> None:
        self.consume(Fail(request_id, "grammar_failed: no memory"), client)

    def begin_worker_epoch(self) -> None:
        """Begin a worker epoch in the scheduler; the worker keeps its rows, and results in flight still arrive."""
        self._num_stale = len(self.diffs)
        self.worker.first_of_epoch = self._num_stale + 1
        self.log.worker_epoch_began(0.0)
        self.scheduler.begin_worker_epoch()
        self.scheduler.check()
        self._collect()

    def restart_worker(self) -> None:
        """Replace the worker by one without state; all messages in flight, both ways, are lost."""
        self._to_run.clear()
        self._held_back.clear()
        while self.down.receive() is not None:
            pass
        self._num_stale = len(self.diffs)
        self.worker.forget_everything(self.scheduler.last_step)
        self.log.worker_epoch_began(0.0, new_workers=True)
        self.scheduler.begin_worker_epoch(new_workers=True)
        self.scheduler.check()
        self._collect()

    def drop_client(self, client: int) -> None:
        self.log.client_dropped(0.0, client)
        self.scheduler.drop_client(client)
        self._collect()

    # ---- steps

    def schedule(self) -> SchedulerOutput | None:
        """Ask for one step and send it. Return None if there was none."""
        if not self.scheduler.can_schedule:
            return None
        diff = self.scheduler.schedule()
        self._check()
        self.num_steady += len(self.scheduler.steady_decode)
        self._send_moves(self.scheduler.transfers.take_loads())
        self._send_side_jobs()
        if diff is None:
            self.log.tick(0.0)
        else:
            frames = self.down.send(diff)
            self.log.produced(0.0, frames)
            self.sizes.append(sum(len(f) for f in frames))
        self._send_stores()
        self._receive()
        return diff

    def _check(self) -> None:
        """Check the scheduler: always in a short run, seldom later, because checks take most of a run's time."""
        self._num_checks += 1
        if self._num_checks <= MANY_CHECKS or self._num_checks % MANY_CHECKS == 0:
            self.scheduler.check()

    def _receive(self) -> None:
        """Receive on the worker's side."""
        while (received := self._up.receive()) is not None:
            self._to_run.append(received)
            if isinstance(received.message, SchedulerOutput):
                self.diffs.append(received.message)

    def read_disk(self) -> None:
        """Answer what the disk contains, in small parts."""
        for part in common_contents([[self.worker.host.disk_contents(self.header.forgotten)]]).parts(5):
            self.consume(part)
            self.scheduler.check()

    def _send_side_jobs(self) -> None:
        for message in self.scheduler.take_side_jobs():
            self.adapter_loads += [message] if isinstance(message, LoadAdapter) else []
            self.down.send(message)

    def _send_stores(self) -> None:
        if (disk := self.scheduler.kv.disk) is not None:
            for page in disk.take_invalid():
                self.worker.host.pages.pop(disk.first_id + page, None)
        self._send_moves(self.scheduler.transfers.take_stores())
        self._send_side_jobs()

    def _send_moves(self, moves: list[MoveBlocks]) -> None:
        self.moves += moves
        for move in moves:
            self.down.send(move)

    def execute(self) -> bool:
        """Let the worker run its oldest step, and receive the copies before it."""
        self._send_stores()
        self._receive()
        if not self._to_run:
            return False
        message = self._to_run.popleft().message
        if isinstance(message, MoveBlocks):
            self.worker.host.receive(message)
            return self.execute() or True
        if isinstance(message, LoadAdapter):
            self.worker.adapters.receive(message)
            return self.execute() or True
        if isinstance(message, Encode):
            self.worker.items.receive(message)
            return self.execute() or True
        self._up.send(self.worker.execute(message))
        if not any(isinstance(each.message, SchedulerOutput) for each in self._to_run):
            self._compare_mirror()
        return True

    def move(self, index: int = 0) -> bool:
        """Let the worker run a copy, a load of an adapter or an encoding that it has received."""
        num_copies = len(self.worker.host.pending)
        if index < num_copies:
            self._up.send(self.worker.host.run(index))
        elif index - num_copies < len(self.worker.adapters.pending):
            self._up.send(self.worker.adapters.run(index - num_copies))
        elif (index := index - num_copies - len(self.worker.adapters.pending)) < len(self.worker.items.pending):
            self._up.send(self.worker.items.run(index))
        else:
            return False
        return True

    def deliver(self) -> ModelRunnerOutput | BlocksMoved | AdapterLoaded | Encoded | None:
        """Deliver the oldest ready result or answer."""
        received = self._held_back.popleft() if self._held_back else self.down.receive()
        if received is None:
            return None
        self.log.consumed(0.0, 0, received.frames)
        self.scheduler.consume(received.message)
        self._check()
        self._collect()
        if not self.scheduler.in_flight:
            for request in self.scheduler.table.running.values():
                assert request.num_acknowledged_tokens == request.num_computed_tokens, f"{request!r}: all was answered"
        return received.message

    def deliver_damaged(self, damage: Callable[[ModelRunnerOutput], ModelRunnerOutput]) -> bool:
        """Deliver a result other than the oldest ready one; it must be refused, and the right one is still to arrive.

        Return False, without any effect, if no result is ready.
        """
        received = self._held_back.popleft() if self._held_back else self.down.receive()
        if received is not None and isinstance(received.message, BESIDE):
            self._held_back.appendleft(received)
            self.deliver()
            return False
        if received is None or received.message.step <= self._num_stale:
            self._held_back.extendleft([] if received is None else [received])
            return False
        try:
            self.scheduler.consume(damage(received.message))
        except WorkerFault:
            self.scheduler.check()
            self._held_back.appendleft(received)
            return True
        raise AssertionError("a result that cannot be was accepted")

    def answer(self) -> ModelRunnerOutput | None:
        """Let the worker run its oldest step and its copies; deliver the oldest result and the answers before it."""
        self.execute()
        while self.move():
            pass
        delivered = self.deliver()
        while isinstance(delivered, BESIDE):
            delivered = self.deliver()
        return delivered

    def fill(self) -> None:
        """Send as many steps as the pipeline takes."""
        while self.schedule() is not None:
            pass

    def settle(self) -> None:
        """Run and answer all steps that were sent."""
        while self.execute() or self.move() or self.deliver() is not None:
            pass

    def step(self, times: int = 1) -> None:
        """Fill the pipeline, then run and answer one step."""
        for _ in range(times):
            self.fill()
            self.answer()

    def until_preemption(self) -> SchedulerOutput:
        """Run up to the step that removes a request, and return its diff, which has not been executed."""
        for _ in range(300):
            diff = self.schedule()
            if diff is not None and self.scheduler.statistics().num_preemptions:
                return diff
            if diff is None:
                self.answer()
        raise AssertionError("no request was preempted")

    def run(self, max_steps: int = 2000) -> dict[str, Answer]:
        """Step until every request has ended and no step is in flight."""
        for _ in range(max_steps):
            if self.scheduler.is_idle:
                return self.answers
            self.step()
        raise AssertionError(f"still there: {list(self.scheduler.table.requests.values())}")

    def finish(self) -> None:
        """Run until every request has ended, and check that no state of any is left."""
        self.run()
        self.check_drained()

    def random_step(self, rng: random.Random) -> None:
        """Do one random thing that may happen next: results arrive as late as the pipeline allows."""
        worker = self.worker
        pending = len(worker.host.pending) + len(worker.adapters.pending) + len(worker.items.pending)
        moves = (lambda: self.move(rng.randrange(pending)),) if pending else ()
        action = rng.choice((self.schedule, self.execute, self.deliver, *moves))
        action()

    # ---- inspection

    def lines(self) -> list[AnyLine]:
        """Return the event log as trace lines, without tokens, as a file would hold them."""
        return [decode_line(encode_line(line)) for line in record_log(self.header, self.log)]

    def replay_lines(self) -> Difference | None:
        """Return where a replay of ``lines`` decides otherwise, or None."""
        return replay_lines(numbered(self.lines()))

    def request(self, request_id: str, client: int = 0) -> Request:
        return self.scheduler.table.requests[client, request_id]

    def counts(self, diff: SchedulerOutput | None) -> dict[str, int]:
        """Return request id → tokens for every request that ``diff``, which is the last one sent, schedules."""
        assert diff is not None
        told = dict(diff.counts)
        running = [r for r in self.scheduler.table.running.values() if r.on_worker and not r.parked]
        return {r.request_id: told.get(r.handle, 1) for r in running}

    def check_drained(self) -> None:
        """Check that no state of any request is left (I13)."""
        scheduler, pool = self.scheduler, self.scheduler.kv.pool
        scheduler.check()
        table = scheduler.table
        assert not table.requests and not table.running and not table.num_waiting
        assert not table.leaving and not len(scheduler.in_flight)
        assert pool.num_free_blocks == pool.num_usable_blocks, "blocks leaked"
        assert not len(scheduler.kv.holds), "a hold leaked"
        if (states := scheduler.kv.states) is not None:
            assert states.pool.num_free_blocks == states.pool.num_usable_blocks, "slots leaked"
        for pages in (tier.pages for tier in scheduler.kv.tiers):
            assert pages.num_free_blocks == pages.num_usable_blocks, "pages leaked"
        for manager in scheduler.kv.coordinator.managers:
            assert not manager.req_to_blocks and not manager.num_cached_block
        for request_id, answer in self.answers.items():
            assert (answer.ended is None) != (answer.rejected is None), f"{request_id} did not end exactly once"

    def _compare_mirror(self) -> None:
        """Once the worker has run all steps: check that it holds what the scheduler assumes (I6)."""
        compare_mirror(self.scheduler, self.worker)

    def _collect(self) -> None:
        self.messages = self.scheduler.take_messages()
        for client, message in self.messages:
            match message:
                case StepOutputs():
                    self._take_outputs(client, message)
                case Rejected():
                    answer = self.answers[message.request_id]
                    if (client, message.request_id) not in self.scheduler.table.requests:
                        assert answer.ended is None and answer.rejected is None
                        answer.rejected = message
                    else:
                        self.refused.append(message)  # a duplicate: the first request continues
                case Statistics():
                    self.statistics_seen.append(message)

    def _take_prompt_logprobs(self, client: int, message: StepOutputs) -> None:
        for handle, start, (ids, _, values) in parts_of(message, PROMPT_LOGPROBS):
            answer = self.answers[self._clients[client, handle]]
            assert answer.ended is None, "log probabilities of a prompt after the end"
            own = zip(ids[:, 0].tolist(), values[:, 0].tolist(), strict=True)
            answer.prompt_logprobs |= dict(enumerate(own, start))

    def _take_rows(self, client: int, message: StepOutputs) -> None:
        """Keep pooled rows and routed experts. Repeats must be equal, and there is no gap."""
        for kind, name in ((POOLED, "pooled"), (ROUTED_EXPERTS, "experts")):
            for handle, start, (rows,) in parts_of(message, kind):
                answer = self.answers[self._clients[client, handle]]
                kept = getattr(answer, name)
                assert answer.ended is None, "rows after the end"
                assert start <= len(kept), "rows after a gap"
                for at, values in enumerate(rows.tolist(), start):
                    assert kept.setdefault(at, values) == values, f"row {at} is sent again with other values"

    def _take_outputs(self, client: int, message: StepOutputs) -> None:
        for introduced in message.introduced:
            answer = self.answers[introduced.request_id]
            assert answer.num_cached_tokens == -1, "introduced twice"
            answer.num_cached_tokens = introduced.num_cached_tokens
            self._clients[client, introduced.handle] = introduced.request_id
        for request_id, event in message.timeline:
            assert self.answers[request_id].ended is None, "an event after the end"
            self.answers[request_id].timeline.append(event)
        self._take_prompt_logprobs(client, message)
        self._take_rows(client, message)
        if message.handles is not None and message.tokens is not None:
            handles = message.handles if message.counts is None else np.repeat(message.handles, message.counts)
            for handle, token in zip(handles.tolist(), message.tokens.tolist(), strict=True):
                answer = self.answers[self._clients[client, handle]]
                assert answer.ended is None, "a token after the end"
                answer.tokens.append(token)
        for handle, found in message.hypotheses:
            self.answers[self._clients[client, handle]].hypotheses = found
        for ended in message.ended:
            answer = self.answers[self._clients[client, ended.handle]]
            assert answer.ended is None and answer.rejected is None, "ended twice"
            answer.ended = ended


def compare_mirror(scheduler: Scheduler, worker: FakeWorker) -> None:
    """Once ``worker`` has run all steps: raise AssertionError unless it holds what ``scheduler`` assumes."""
    for request in scheduler.table.running.values():
        row = worker.rows.get(request.handle)
        assert (row is not None) == request.on_worker, f"{request!r}: on_worker {request.on_worker}"
        if row is None:
            continue
        assert row.request_id == request.request_id and row.active == (not request.parked)
        rejected = request.num_computed_tokens - row.num_computed  # of the drafts whose result is in flight
        assert 0 <= rejected <= request.num_drafts_in_flight, f"{request!r}: {row.num_computed} on the worker"
        unused = request.part_of is not None and not request.num_output_placeholders and row.num_computed > 0
        unused = unused and row.num_computed == request.num_tokens  # the sampled token of a beam is not used
        num_sampled = request.num_output_placeholders if request.generates else 0
        assert len(row.tokens) == request.num_tokens + num_sampled - rejected + unused
        _compare_tables(scheduler, request, worker, row)


def _compare_tables(scheduler: Scheduler, request: Request, worker: FakeWorker, row: Row) -> None:
    """Compare entries; null ones are allowed only where the row no longer reads."""
    for group, held in enumerate(scheduler.kv.block_ids(request)):
        assert len(held) == len(row.tables[group]), f"{request!r}: other blocks in group {group}"
        unread = first_read(worker.groups[group], row.num_computed) // worker.sizes[group]
        for index, (block, known) in enumerate(zip(held, row.tables[group], strict=True)):
            assert block == known or (block == 0 and index < unread), f"{request!r}: other blocks"


def end_of(driver: Driver, request_id: str) -> tuple[EndReason | None, list[int]]:
    """How a request ended, and its delivered tokens."""
    answer = driver.answers[request_id]
    return answer.reason, answer.tokens


def scheduler_of(num_blocks: int = 33, **settings: Any) -> Scheduler:
    """Return a Scheduler without a worker."""
    config = make_config(**settings)
    return Scheduler(config, make_layout(config), num_blocks)


def change(struct: Any, **fields: Any) -> Any:
    """Return a copy of a message with other values."""
    return msgspec.structs.replace(struct, **fields)
