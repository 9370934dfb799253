"""Shared by the sections of ``quire bench scheduler``: the clock, the Scheduler with its codecs, a counting worker.

A step has two timed parts: schedule it and encode it; then, after its result is decoded, apply it, take the messages
to the front ends and encode them. Copies of blocks are encoded with the step, and answered before its result. The
worker's side is not timed.
"""

import contextlib
import gc
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np

from quire.bench.measure.shapes import find_shape
from quire.protocol.config import FIRST_WORKER_EPOCH, EngineConfig
from quire.protocol.model.kv_layout import kv_layout
from quire.protocol.model.model_config import ModelConfig
from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.wire.arrays import Int32
from quire.protocol.wire.channel import Frames
from quire.protocol.wire.codec import Codec
from quire.protocol.wire.front_end_messages import Abort, AddRequest, SchedulerToFrontEnd, StepOutputs
from quire.protocol.wire.transfer_messages import BlocksMoved
from quire.protocol.wire.worker_messages import ModelRunnerOutput, SchedulerOutput, SchedulerToWorker, WorkerToScheduler
from quire.scheduler_proc.requests.events import Consumed
from quire.scheduler_proc.scheduler import Scheduler

BLOCK_SIZE = 16
VOCAB_SIZE = 32_000
FIRST_TOKEN = 3
MAX_MODEL_LEN = 32_768

now_ns = time.process_time_ns
"""CPU time of the whole process, with helper threads and without other processes."""

Summary = dict[str, Any]


def summary(samples_ns: Sequence[float]) -> Summary:
    """Return statistics in microseconds. The keys are those of the peer's driver, so that both can be compared."""
    ordered = sorted(samples_ns)
    count = len(ordered)
    at = {"median_us": count // 2, "p99_us": min(count - 1, count * 99 // 100), "max_us": count - 1}
    figures: Summary = {name: round(ordered[index] / 1e3, 2) for name, index in at.items()}
    return {"n": count, "mean_us": round(sum(ordered) / count / 1e3, 2)} | figures


def timed(action: Callable[[], object], repeats: int, inner: int = 10) -> Summary:
    """Time calls of ``action``. Each sample is the mean of ``inner`` calls: reading the clock takes almost 1 µs."""
    samples: list[float] = []
    for _ in range(repeats):
        start = now_ns()
        for _ in range(inner):
            action()
        samples.append((now_ns() - start) / inner)
    return summary(samples)


def num_bytes(frames: Frames) -> int:
    return sum(len(frame) for frame in frames)


def freeze() -> None:
    """Exclude existing objects from garbage collection, as in a process after startup."""
    gc.collect()
    gc.freeze()


def unfreeze() -> None:
    gc.unfreeze()
    gc.collect()


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Collect no garbage while rigs take turns: a collection would count for one of them."""
    freeze()
    gc.disable()
    yield
    gc.enable()
    unfreeze()


class BatchWorker:
    """A worker that only counts the tokens of each row. Its rows are as dense and in the same order as a real worker's.

    Attributes:
        num_active: number of rows that computed tokens in the last step.
        num_tokens: number of tokens that they computed.
    """

    def __init__(self, max_rows: int, seed: int = 7, vocab_size: int = VOCAB_SIZE) -> None:
        self._vocab_size = vocab_size
        self._rng = np.random.default_rng(seed)
        self._row_of: dict[int, int] = {}
        self._handles, self._known, self._computed = (np.zeros(max_rows, np.int32) for _ in range(3))
        self._active = np.zeros(max_rows, np.bool_)
        self._columns: tuple[Any, ...] = (self._handles, self._known, self._computed, self._active)
        self._sent_handles: Int32 = np.zeros(0, np.int32)
        self.num_active = self.num_tokens = 0

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Return a random token for each row that reaches its last known position. ``handles`` only if they changed."""
        self._change_rows(step)
        for changed, active in ((step.parked, False), (step.unparked, True)):
            for handle in changed:
                self._active[self._row_of[handle]] = active
        count = len(self._row_of)
        scheduled = self._active[:count].astype(np.int32)
        for handle, num_tokens in step.counts:
            scheduled[self._row_of[handle]] = num_tokens
        samples = scheduled > 0
        scheduled[[self._row_of[handle] for handle, _ in step.forks]] = 0  # they sample from their parents' logits
        self.num_active, self.num_tokens = int(np.count_nonzero(scheduled)), int(scheduled.sum())
        self._computed[:count] += scheduled
        sampling = np.flatnonzero(samples & (self._computed[:count] == self._known[:count]))
        self._known[sampling] += 1
        handles = self._handles[sampling]
        tokens = self._rng.integers(FIRST_TOKEN, self._vocab_size, len(handles), dtype=np.int32)
        if np.array_equal(handles, self._sent_handles) and not step.removed and not step.new_requests:
            return ModelRunnerOutput(step.step, tokens)
        self._sent_handles = handles
        return ModelRunnerOutput(step.step, tokens, handles)

    def _change_rows(self, step: SchedulerOutput) -> None:
        """New requests fill free rows from the left, then the end; the last rows move to the remaining free rows."""
        holes = sorted(self._row_of.pop(handle) for handle in step.removed)
        count = len(self._row_of) + len(holes)
        self._active[holes] = False
        for new in step.new_requests:
            row = holes.pop(0) if holes else count
            count = max(count, row + 1)
            self._row_of[new.handle] = row
            for column, value in zip(
                self._columns, (new.handle, new.num_tokens, new.num_computed_tokens, True), strict=True
            ):
                column[row] = value
        while holes:
            count -= 1
            if holes[-1] == count:
                holes.pop()
                continue
            target = holes.pop(0)
            for column in self._columns:
                column[target] = column[count]
            self._active[count] = False
            self._row_of[int(self._handles[target])] = target


@dataclass(slots=True)
class RigStep:
    """One step: nanoseconds of scheduling and of the update (None if no result was applied), and the messages."""

    schedule_ns: int
    update_ns: int | None
    diff: SchedulerOutput | None
    outputs: list[StepOutputs]


class Rig:
    """The Scheduler with both ends of every link, stepped as in its process.

    Prefill may use the whole token budget (``max_prefill_share`` 1), as in the peer.

    Attributes:
        num_moved: number of blocks copied to or from host memory.
    """

    def __init__(
        self,
        num_blocks: int,
        max_num_seqs: int,
        max_num_batched_tokens: int = 8192,
        *,
        async_scheduling: bool = False,
        max_model_len: int = MAX_MODEL_LEN,
        hash_algo: Literal["sha256", "xxh3_128"] = "sha256",
        steady_decode: bool = True,
        model: ModelConfig | None = None,
        num_host_pages: int = 0,
    ) -> None:
        """
        Args:
            num_blocks, num_host_pages: with the null block, and with page 0.
            model: decides the KV layout; None for one group of full attention.
        """
        model = bench_model("llama-3.1-8b") if model is None else model
        self.config = EngineConfig(
            model=model,
            model_path="",
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_prefill_share=1.0,
            block_size=BLOCK_SIZE,
            prefix_caching_hash_algo=hash_algo,
            async_scheduling=async_scheduling,
        )
        layout = kv_layout(model, BLOCK_SIZE, "bfloat16")
        self.scheduler = Scheduler(
            self.config, layout, num_blocks, steady_decode=steady_decode, num_host_pages=num_host_pages
        )
        self.num_moved = 0
        self.worker = BatchWorker(max_num_seqs)
        self._steps: Codec[Any] = Codec(WorkerToScheduler)
        self._replies: Codec[Any] = Codec(SchedulerToFrontEnd)
        self._worker_side: Codec[Any] = Codec(SchedulerToWorker)
        self._in_flight: deque[ModelRunnerOutput] = deque()
        self._moved: list[BlocksMoved] = []
        self._rng = np.random.default_rng(3)
        self._serial = 0

    def prompt(self, length: int) -> Int32:
        """Return random tokens, different at each call."""
        return self._rng.integers(FIRST_TOKEN, VOCAB_SIZE, length, dtype=np.int32)

    def add(self, prompt: Int32, max_tokens: int, after: Callable[[], None] | None = None) -> tuple[str, int]:
        """Add a request. Return its id and the nanoseconds to check, build, hash and queue it and to run ``after``.

        Raises:
            RuntimeError: the scheduler refused it, so that the figures would be meaningless.
        """
        request_id = f"req-{self._serial:06d}"
        event = AddRequest(request_id, prompt, self.sampling(max_tokens), seed=self._serial)
        self._serial += 1
        return request_id, self.consume_ns(event, after)

    @staticmethod
    def sampling(max_tokens: int) -> SamplingParams:
        return SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.8, top_p=0.95)

    def consume_ns(self, event: AddRequest, after: Callable[[], None] | None = None) -> int:
        """Add a request, and return the time as ``add``; raise RuntimeError as that does."""
        start = now_ns()
        self.scheduler.consume(event)
        if after is not None:
            after()
        spent = now_ns() - start
        if (0, event.request_id) not in self.scheduler.table.requests:
            raise RuntimeError(f"{event.request_id} was refused: {self.scheduler.take_messages()}")
        return spent

    def abort(self, request_id: str) -> None:
        self.scheduler.consume(Abort([request_id]))

    def step(self, after: Callable[[], None] | None = None) -> RigStep:
        """Schedule a step. Apply the oldest result if the pipeline is full or nothing can be scheduled.

        ``after`` is timed as a part of the update.
        """
        start = now_ns()
        diff = self.scheduler.schedule() if self.scheduler.can_schedule else None
        frames = None if diff is None else self._steps.encode(FIRST_WORKER_EPOCH, 0, diff)
        moves = [*self.scheduler.transfers.take_loads(), *self.scheduler.transfers.take_stores()]
        sent = [self._steps.encode(FIRST_WORKER_EPOCH, 0, move) for move in moves]
        schedule_ns = now_ns() - start
        if frames is not None:
            self._in_flight.append(self._execute(frames))
        self._moved += [self._copy(move) for move in sent]
        filling = diff is not None and len(self._in_flight) < self.config.pipeline_depth
        if filling or not (self._in_flight or self._moved):
            return RigStep(schedule_ns, None, diff, [])
        events: list[Consumed] = [*self._moved]
        self._moved.clear()
        if self._in_flight:
            events.append(self._in_flight.popleft())
        start = now_ns()
        for event in events:
            self.scheduler.consume(event)
        messages = self.scheduler.take_messages()
        self.scheduler.decisions.take()
        for _, message in messages:
            self._replies.encode(FIRST_WORKER_EPOCH, 0, message)
        if after is not None:
            after()
        update_ns = now_ns() - start
        return RigStep(schedule_ns, update_ns, diff, [m for _, m in messages if isinstance(m, StepOutputs)])

    def _execute(self, frames: Frames) -> ModelRunnerOutput:
        """Return the worker's result of a step, decoded as in the scheduler's process."""
        step = self._worker_side.decode([bytes(frame) for frame in frames]).message
        result = self._worker_side.encode(FIRST_WORKER_EPOCH, 0, self.worker.execute(step))
        decoded: ModelRunnerOutput = self._steps.decode([bytes(frame) for frame in result]).message
        return decoded

    def _copy(self, frames: Frames) -> BlocksMoved:
        """Return the worker's answer to a MoveBlocks, decoded as in the scheduler's process."""
        move = self._worker_side.decode([bytes(frame) for frame in frames]).message
        self.num_moved += len(move.block_ids)
        answer = self._worker_side.encode(FIRST_WORKER_EPOCH, 0, BlocksMoved(move.transfer))
        decoded: BlocksMoved = self._steps.decode([bytes(frame) for frame in answer]).message
        return decoded

    def mean_step_us(self, count: int) -> float:
        """Return the mean time of the next ``count`` steps."""
        spent = 0
        for _ in range(count):
            step = self.step()
            assert step.update_ns is not None
            spent += step.schedule_ns + step.update_ns
        return spent / count / 1e3

    def fill(self, num_requests: int, prompt_len: int, max_tokens: int) -> None:
        """Add requests and step until each of them decodes."""
        for _ in range(num_requests):
            self.add(self.prompt(prompt_len), max_tokens)
        while True:
            diff = self.step().diff
            decoding = self.worker.num_active == self.worker.num_tokens == num_requests
            if decoding and diff is not None and not diff.new_requests:
                return

    def run_until_idle(self) -> None:
        """Step until no request runs and no step is in flight."""
        while self.step().update_ns is not None or self._in_flight:
            pass


def bench_model(shape: str) -> ModelConfig:
    """Return a shape with the vocabulary of the benchmark, for sequences of any length."""
    return msgspec.structs.replace(find_shape(shape), vocab_size=VOCAB_SIZE, max_position=1 << 20, eos_token_ids=[2])
