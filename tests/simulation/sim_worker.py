"""A simulated worker process: its loop's handling of messages, and its faults."""

from collections import deque
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
from fake_worker import Chunk, client_id
from side_parts import parts_of, with_rows
from sim_disk import TwoTiers
from sim_grammars import EVEN_TOKENS
from sim_model import SlotModel
from sim_process import SimProcess
from sim_scenario import PAGE_BYTES
from sim_settings import VOCAB_SIZE

from quire.protocol.process.child import Command, Report
from quire.protocol.wire.adapter_messages import LoadAdapter
from quire.protocol.wire.channel import Frames
from quire.protocol.wire.codec import ProtocolError
from quire.protocol.wire.item_messages import Encode
from quire.protocol.wire.link_messages import PROTOCOL_VERSION, Heartbeat, Hello, Refused, Welcome
from quire.protocol.wire.side_rows import POOLED, ROUTED_EXPERTS, find_rows
from quire.protocol.wire.transfer_messages import DiskContents, DiskPages, HostPages, MoveBlocks
from quire.protocol.wire.worker_messages import (
    Configure,
    Digest,
    Fault,
    MemoryPlan,
    ModelRunnerOutput,
    Proposed,
    Ready,
    SampleInputs,
    SchedulerOutput,
    Shutdown,
)

if TYPE_CHECKING:
    from sim_runner import RealRunner
    from sim_world import World

WAIT_S = 1.0
UNREADABLE_RATE = 0.05


class _Launched(NamedTuple):
    """A step with pending sampling. ``chunks``: None if the step is not computed."""

    step: SchedulerOutput
    frames: Frames
    chunks: list[Chunk] | None
    failure: str = ""


class SimWorker(SimProcess):
    """One rank. Receives the next message after the work for the previous one.

    Attributes:
        model: None before its group is ready.
        runner: the real runner beside it, in runs that have it; its results are then sent.
    """

    role = "worker"

    def __init__(self, world: "World") -> None:
        super().__init__(world)
        self.rank = -1
        self.worker_epoch = 0
        self.model: SlotModel | None = None
        self.runner: RealRunner | None = None
        self._channel: Any = None
        self._call: Command | None = None
        self._loaded = False
        self._busy = True
        self._awaiting: _Launched | None = None
        self._unread: deque[Any] = deque()
        self._dropped: set[int] = set()
        self._lost_in = 0
        world.events.after(world.shape.start_s, self._started)

    def _started(self) -> None:
        if self.alive and not self.frozen:
            if self.world.faults.take_worker_fault("die_at_start", self.rank):
                self.die("failure at start")
                return
            self.report(Report("started"))
            self._busy = False
            self.wake()

    # ---- commands and messages

    def die(self, how: str) -> None:
        if self.alive and self.world.in_group(self):
            self.world.faults.lost(self.world.policy.worker_epoch)
        super().die(how)

    def on_command(self, command: Command) -> None:
        self._call = command
        self.wake()

    def wake(self) -> None:
        """Continue after a message arrived or work was finished."""
        while self.alive and not (self._busy or self.hung or self.frozen):
            received = self._next()
            if received is not None:
                self._take(received.message, received.frames)
            elif self._call is not None:
                self._obey_command(self._call)
            else:
                return

    def _next(self) -> Any:
        if self._unread:
            return self._unread.popleft()
        if self._channel is None or not self.alive:
            return None
        try:
            return self._channel.receive()
        except ProtocolError as error:
            self._fail("refused", str(error))
            return None

    def _obey_command(self, call: Command) -> None:
        self._call, self._awaiting, self.model = None, None, None
        self._unread.clear()
        if call.kind != "join":
            self.die("stopped by a command")
            return
        self.rank, self.worker_epoch = call.rank, call.worker_epoch
        self.report(Report("joined", worker_epoch=call.worker_epoch))
        if self._channel is not None:
            self._channel.close()
        self._channel = self.world.net.worker_end(call.worker_epoch, call.rank, self.wake)
        self._channel.send(Hello(PROTOCOL_VERSION, "worker", call.rank, self.pid))
        self._wait_and_beat(self._channel)

    def _wait_and_beat(self, channel: Any) -> None:
        """Send a heartbeat every second while idle."""

        def beat() -> None:
            if self.alive and channel is self._channel:
                if not (self._busy or self.hung or self.frozen):
                    channel.send(Heartbeat(self.world.events.now))
                self._wait_and_beat(channel)

        self.world.events.after(WAIT_S, beat)

    def _take(self, message: Any, frames: Frames) -> None:
        match message:
            case Welcome() | Heartbeat():
                pass
            case Refused(reason=reason):
                self._fail("error", reason)
            case Configure():
                self._configure(message)
            case SchedulerOutput():
                if self._awaiting is not None:  # that step is void
                    void, self._awaiting = self._awaiting, None
                    if self.runner is not None:
                        self.runner.discard()
                    self._answer(ModelRunnerOutput(void.step.step), void.frames)
                self._run(message, frames)
            case SampleInputs():
                self._sample(message)
            case HostPages():
                assert self.model is not None
                self.model.host.pages = self.world.host_pages.setdefault(message.path, {})
            case DiskPages():
                self._open_disk(message)
            case MoveBlocks():
                self._move(message)
            case LoadAdapter():
                self._load_adapter(message)
            case Encode():
                self._encode(message)
            case Shutdown():
                self.die("stopped by a command")

    def _open_disk(self, message: DiskPages) -> None:
        """Use the disk, and answer after a while what it contains, or rarely that it cannot be read."""
        assert self.model is not None
        channel, host, rng = self._channel, self.model.host, self.world.faults.copies
        disk = self.world.page_files.contents[message.path]
        host.pages = TwoTiers(host.pages, disk, message.first_page)
        host.disk = range(message.first_page, message.first_page + message.num_pages)
        if not message.read_contents:
            return

        def answer() -> None:
            if self.alive and channel is self._channel and not (self.hung or self.frozen):
                contents = host.disk_contents(message.forgotten)
                if rng.random() < UNREADABLE_RATE:
                    self.world.faults.count("disk")
                    nothing = contents.page_ids[:0], contents.generations[:0]
                    contents = DiskContents(*nothing, b"", reason="the disk cannot be read")
                channel.send(contents)

        self.world.events.after(rng.choice((0.0, 1.0, 30.0)) * self.world.shape.step_s, answer)

    def _move(self, move: MoveBlocks) -> None:
        """Copy after a while, beside the steps. A store of a worker that has died may still reach its pages."""
        model, channel, rng = self.model, self._channel, self.world.faults.copies
        assert model is not None
        model.host.receive(move)

        def run() -> None:
            if self._awaiting is not None and self.alive:  # the fake model writes its step when it samples
                self.world.events.after(self.world.shape.step_s, run)
                return
            if not (self.alive and channel is self._channel and model is self.model):
                if rng.random() < 0.5 or move.is_load:
                    return
                self.world.faults.count("late store")
            answer = model.host.run(model.host.pending.index(move))
            if self.alive and channel is self._channel and not (self.hung or self.frozen):
                channel.send(answer)

        self.world.events.after(rng.choice((0.0, 1.0, 3.0, 80.0)) * self.world.shape.step_s, run)

    def _load_adapter(self, load: LoadAdapter) -> None:
        """Load after a while, beside the steps."""
        model, channel, rng = self.model, self._channel, self.world.faults.copies
        assert model is not None
        model.adapters.receive(load)

        def run() -> None:
            if self.alive and channel is self._channel and model is self.model and not (self.hung or self.frozen):
                model.adapters.folders = {each.path: each.digest for each in self.world.folders}
                model.adapters.fault = lambda: self.world.faults.adapter_fault(load.digest)
                channel.send(model.adapters.run(model.adapters.pending.index(load)))

        self.world.events.after(rng.choice((0.0, 1.0, 3.0, 30.0)) * self.world.shape.step_s, run)

    def _encode(self, encode: Encode) -> None:
        """Encode after a while, beside the steps."""
        model, channel, rng = self.model, self._channel, self.world.faults.copies
        assert model is not None
        model.items.receive(encode)

        def run() -> None:
            if self.alive and channel is self._channel and model is self.model and not (self.hung or self.frozen):
                model.items.fault = self.world.faults.item_fault
                channel.send(model.items.run(model.items.pending.index(encode)))

        self.world.events.after(rng.choice((0.0, 1.0, 3.0, 30.0)) * self.world.shape.step_s, run)

    def _configure(self, configure: Configure) -> None:
        if self.world.faults.take_worker_fault("die_at_start", self.rank):
            self.die("failure while loading")
            return
        self.world.check_configuration(configure)
        slow = 0.0 if self._loaded else self.world.shape.start_s
        self._busy_for(slow, lambda: self._ready(configure))

    def _ready(self, configure: Configure) -> None:
        config, layout = configure.config, configure.kv_layout
        num_blocks = configure.num_blocks or self.world.num_blocks
        assert num_blocks == self.world.num_blocks, "another pool size than the previous group's"
        self._loaded, self._dropped = True, set()
        self.model = SlotModel(
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
            num_slots=self.world.num_slots,
            num_state_parts=layout.num_state_parts,
            encoder_cache_tokens=config.encoder_cache_tokens,
        )
        self.model.items.of = lambda name: self.world.items_of(self.world.requests[name])
        assert configure.num_slots in (0, self.world.num_slots), "another number of slots than the previous group's"
        self.model.salt_of, self.model.even = self.world.salt_of, self.world.even
        self.model.logprobs_of = self.world.logprobs_of
        self.model.step, self.model.first_of_epoch = configure.last_step, configure.last_step + 1
        if self.world.shape.real_runner:
            self.runner = self.runner or self.world.make_runner(config, layout, num_blocks)
            self.runner.begin_worker_epoch(self.model, configure.last_step)
        self.model.host.fault = self.world.faults.page_fault
        page_bytes = PAGE_BYTES if config.cpu_offload_bytes or config.ssd_cache_bytes else 0
        plan = MemoryPlan("cpu", 0, 0, 0, 0, num_blocks, config.block_size)
        pools = [num_blocks] * len(layout.groups)
        self._channel.send(Ready(pools, plan, {}, page_bytes, num_slots=self.world.num_slots))

    # ---- steps

    def _run(self, step: SchedulerOutput, frames: Frames) -> None:
        if self.world.faults.take_worker_fault("fault", self.rank):
            self._fail("error", "a kernel failed")
            return
        phase = "die_in_prefill" if step.counts or step.new_requests else "die_in_decode"
        if self.world.faults.take_worker_fault(phase, self.rank):
            self._busy_for(self.world.shape.step_s / 2, lambda: self.die("killed in a step"))
        elif self.world.faults.take_worker_fault("hang", self.rank):
            self.hung = True
        else:
            self._launch(step, frames)

    def _launch(self, step: SchedulerOutput, frames: Frames) -> None:
        """Run a step up to sampling, which may have to wait for masks."""
        launched = self._begin(step, frames)
        if launched.chunks is None or not step.awaits_sample_inputs:
            self._compute(launched, None)
            return
        if step.drafts and self.rank == 0:
            self._channel.send(_proposed(launched) if self.runner is None else self.runner.proposed())
        self._awaiting = launched

    def _begin(self, step: SchedulerOutput, frames: Frames) -> _Launched:
        model, world = self.model, self.world
        assert model is not None
        wanted = self._without_dropped(step)
        chunks, failure = None, ""
        if wanted is None:
            self._dropped |= {new.handle for new in step.new_requests}
            model.step = step.step
        else:
            model.draft_rng.seed(self.worker_epoch << 32 | step.step)  # all ranks propose the same drafts
            chunks = model.launch(wanted)
            failure = "out of memory" if world.faults.is_out_of_memory(self.worker_epoch, step.step) else ""
        if self.runner is not None:
            self.runner.launch(step, chunks, out_of_memory=bool(failure))
        if failure:
            self._drop_rows()
            chunks = None
        return _Launched(step, frames, chunks, failure)

    def _without_dropped(self, step: SchedulerOutput) -> SchedulerOutput | None:
        """Return the part of a step that can run after the rows were dropped, or None.

        Steps decided before the scheduler was informed assume tokens that were never computed; their results are stale.
        """
        if not self._dropped:
            return step
        self._dropped -= set(step.removed)
        if self._dropped or self.world.is_stale(step.step, self._lost_in):
            return None
        return msgspec.structs.replace(step, removed=[])

    def _sample(self, inputs: SampleInputs) -> None:
        if self._awaiting is None or inputs.step != self._awaiting.step.step:
            return
        launched, self._awaiting = self._awaiting, None
        assert launched.chunks is not None
        num_drafts = {chunk.row.handle: len(chunk.drafts) for chunk in launched.chunks}
        assert inputs.counts == [1 + num_drafts[handle] for handle in inputs.handles]
        if inputs.bitmask is not None:
            words = inputs.bitmask.reshape(sum(inputs.counts), -1)
            first = np.cumsum([0, *inputs.counts[:-1]])  # masks after a draft that is not allowed are arbitrary
            assert set((words[first] & EVEN_TOKENS).ravel().tolist()) == {EVEN_TOKENS}, "mask of another grammar"
            assert not (words[first] & ~np.int32(EVEN_TOKENS)).any(), "mask allows odd tokens"
        self._compute(launched, inputs)

    def _compute(self, launched: _Launched, inputs: SampleInputs | None) -> None:
        model, world, step = self.model, self.world, launched.step.step
        assert model is not None
        seconds = world.shape.step_s * (10 if world.faults.take_worker_fault("slow", self.rank) else 1)
        result, expected = ModelRunnerOutput(step, failure=launched.failure), None
        if launched.chunks is not None:
            result = expected = model.finish(launched.chunks)
        elif launched.failure:
            expected = result
        if self.runner is not None:
            result = self.runner.finish(expected, inputs)
        if launched.chunks is not None:
            killer = next(
                (row.request_id for row in model.rows.values() if row.active and world.faults.is_poison(row)), None
            )
            if killer is not None:
                self._busy_for(seconds / 2, partial(self._killed_by, killer))
                return
            result = msgspec.structs.replace(result, seconds=seconds)
        self._busy_for(seconds, lambda: self._answer(result, launched.frames))

    def _killed_by(self, killer: str) -> None:
        self.die("killed by a request")
        self.world.faults.killed_by(client_id(killer), self.worker_epoch)

    def _drop_rows(self) -> None:
        """Drop all rows, including those of the step being launched."""
        model = self.model
        assert model is not None
        self._dropped, self._lost_in = set(model.rows), model.step
        model.rows.clear()
        model.holders.clear()
        model.first_of_epoch = model.step + 1
        model._last_handles = [-1]

    def _answer(self, result: ModelRunnerOutput, frames: Frames) -> None:
        if self.rank == 0 and self.world.shape.num_ranks > 1 and result.tokens is not None:
            result = self._disagree(result)
        digest = blake2b(digest_size=8)
        for frame in frames:
            digest.update(frame)
        if result.tokens is not None:
            digest.update(result.tokens.tobytes())
        value, step = digest.digest(), result.step
        if self.rank == 0:
            result = self._corrupt(result)
            if self.alive:
                self._channel.send(result)
        if self.world.shape.num_ranks > 1 and self.alive:
            self._channel.send(Digest(step, value))
        self.world.step_executed(self, step)

    def _disagree(self, result: ModelRunnerOutput) -> ModelRunnerOutput:
        """Return the result, changed to another token than the other ranks have if that fault is armed."""
        if not self.world.faults.take_worker_fault("disagree", 0):
            return result
        assert result.tokens is not None
        return msgspec.structs.replace(result, tokens=(result.tokens + 1) % self.world.config.model.vocab_size)

    def _corrupt(self, result: ModelRunnerOutput) -> ModelRunnerOutput:
        """Return rank 0's result, corrupted if such a fault is armed."""
        world = self.world
        sampled = result.tokens is not None and self.model is not None and -1 not in self.model._last_handles
        if sampled and world.faults.take_worker_fault("nan", 0):
            pooled = [handle for handle, _, _ in parts_of(result, POOLED)]
            handle = world.faults.tamper.rng.choice([*self.model._last_handles, *pooled])  # type: ignore[union-attr]
            world.faults.bad_logits.add(client_id(self.model.rows[handle].request_id))  # type: ignore[union-attr]
            return msgspec.structs.replace(result, bad=[handle])
        if sampled and world.faults.take_worker_fault("wrong", 0):
            return damaged(result, world.faults.tamper.rng.randrange(4))
        if sampled and world.faults.take_worker_fault("twice", 0):
            self._channel.send(result)
        return result

    def _fail(self, kind: str, text: str) -> None:
        self._channel.send(Fault(kind, text))
        self.report(Report("failed", text, 1))
        self.die(text)

    def _busy_for(self, seconds: float, then: Any) -> None:
        self._busy = True

        def done() -> None:
            if self.alive and not (self.hung or self.frozen):
                self._busy = False
                then()
                self.wake()

        self.world.events.after(seconds, done)


def _proposed(launched: _Launched) -> Proposed:
    named = [chunk for chunk in launched.chunks or () if chunk.drafts]
    return Proposed(
        launched.step.step,
        np.array([chunk.row.handle for chunk in named], np.int32),
        np.array([len(chunk.drafts) for chunk in named], np.int32),
        np.array([draft for chunk in named for draft in chunk.drafts], np.int32),
    )


def damaged(result: ModelRunnerOutput, kind: int) -> ModelRunnerOutput:
    """Return results that no worker that follows the protocol would send."""
    if (pooled := find_rows(result.side, POOLED)) is not None and kind:
        handles, starts, widths = pooled.handles, pooled.starts, pooled.widths
        wrong = ([*handles[1:], 999], starts, widths), (handles, [1 + each for each in starts], widths)
        told = *wrong, (handles, starts, [1 + each for each in widths])
        handles, starts, widths = told[kind - 1]
        return with_rows(result, POOLED, msgspec.structs.replace(pooled, handles=handles, starts=starts, widths=widths))
    if (experts := find_rows(result.side, ROUTED_EXPERTS)) is not None and kind == 1:
        return with_rows(
            result, ROUTED_EXPERTS, msgspec.structs.replace(experts, widths=[each + 1 for each in experts.widths])
        )
    if kind == 1 and result.tokens is not None:
        return msgspec.structs.replace(result, tokens=np.append(result.tokens[1:], VOCAB_SIZE).astype(np.int32))
    if kind == 2 and result.tokens is not None:
        return msgspec.structs.replace(result, tokens=np.append(result.tokens, 1).astype(np.int32))
    if kind == 3 and result.handles is not None and len(result.handles):
        return msgspec.structs.replace(result, handles=np.append(result.handles[1:], 999).astype(np.int32))
    return msgspec.structs.replace(result, step=result.step + 1)
