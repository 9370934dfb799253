"""``quire bench wire``: size of the messages of a step, and CPU time to encode and decode them.

Runs the real Scheduler and codec in this process, without a model: a synthetic worker applies the diffs, to know which
rows sample, and returns random tokens.
"""

import argparse
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quire.bench.measure.report import DISTRIBUTION_COLUMNS, RunReport, Table, distribution, distribution_row, rounded
from quire.bench.measure.shapes import find_shape
from quire.bench.scheduler.scheduler_rig import BatchWorker
from quire.protocol.config import EngineConfig
from quire.protocol.errors import ConfigError
from quire.protocol.model.kv_layout import kv_layout
from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.wire.channel import Frames, Link
from quire.protocol.wire.front_end_messages import AddRequest, SchedulerToFrontEnd, StepOutputs
from quire.protocol.wire.worker_messages import SchedulerOutput, SchedulerToWorker, WorkerToScheduler
from quire.scheduler_proc.scheduler import Scheduler

# A large vocabulary: token ids above 65,535 take four bytes each in messages.
SHAPE = "llama-3.1-8b"
PROMPT_LENGTHS = (64, 320)
NUM_NEW_PROMPTS, NEW_PROMPT_LENGTH, NEW_PROMPT_REPEATS = 8, 2048, 50


@dataclass(slots=True)
class MessageCosts:
    """Costs of one kind of message: bytes of all frames, and CPU microseconds per side."""

    sizes: list[int] = field(default_factory=list)
    encode_us: list[float] = field(default_factory=list)
    decode_us: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, dict[str, float]]:
        return {
            "bytes": distribution(self.sizes),
            "encode_us": distribution(self.encode_us),
            "decode_us": distribution(self.decode_us),
        }


class TimedLink:
    """Both ends of one direction of a link, without the socket."""

    def __init__(self, incoming: Any) -> None:
        self._sender, self._receiver = Link(incoming), Link(incoming)
        self.costs: dict[str, MessageCosts] = {}

    def pass_on(self, message: Any, record: str = "") -> Any:
        """Encode and decode ``message``. ``record``: name to record its costs under, or "" for none."""
        start = time.thread_time_ns()
        frames: Frames = self._sender.outgoing(message)
        encoded = time.thread_time_ns()
        frames = [bytes(frame) for frame in frames]
        received = time.thread_time_ns()
        decoded = self._receiver.incoming(frames).message
        done = time.thread_time_ns()
        if record:
            costs = self.costs.setdefault(record, MessageCosts())
            costs.sizes.append(sum(len(frame) for frame in frames))
            costs.encode_us.append((encoded - start) / 1000)
            costs.decode_us.append((done - received) / 1000)
        return decoded


class WireEngine:
    """Scheduler, synthetic worker and the three links of a step; asynchronous, with two steps in flight."""

    def __init__(self, max_num_seqs: int, max_model_len: int, num_batched_tokens: int, seed: int = 0) -> None:
        model = find_shape(SHAPE)
        blocks = max_num_seqs * -(-max_model_len // 16)
        self.config = EngineConfig(
            model=model,
            model_path="",
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=num_batched_tokens,
            block_size=16,
            num_blocks_override=blocks,
            watermark=0.0,
        )
        layout = kv_layout(model, self.config.block_size, "bfloat16")
        self.scheduler = Scheduler(self.config, layout, blocks + 1)
        self.worker = BatchWorker(max_num_seqs, seed, model.vocab_size)
        self.to_worker = TimedLink(SchedulerToWorker)
        self.to_scheduler = TimedLink(WorkerToScheduler)
        self.to_front_end = TimedLink(SchedulerToFrontEnd)
        self._in_flight: deque[SchedulerOutput] = deque()

    def add(self, index: int, prompt: "np.ndarray[Any, np.dtype[np.int32]]", max_tokens: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self.scheduler.consume(AddRequest(f"cmpl-{index:032x}-0", prompt, params, seed=index))

    def step(self, record: bool) -> list[StepOutputs]:
        """Fill the pipeline and process the result of its oldest step; return the messages to the front end."""
        while self.scheduler.can_schedule and (diff := self.scheduler.schedule()) is not None:
            self._in_flight.append(self.to_worker.pass_on(diff, "SchedulerOutput" if record else ""))
        result = self.worker.execute(self._in_flight.popleft())
        self.scheduler.consume(self.to_scheduler.pass_on(result, "ModelRunnerOutput" if record else ""))
        name = "StepOutputs" if record else ""
        return [self.to_front_end.pass_on(m, name) for _, m in self.scheduler.take_messages()]

    def costs(self) -> Iterator[tuple[str, MessageCosts]]:
        for link in (self.to_worker, self.to_scheduler, self.to_front_end):
            yield from link.costs.items()


def measure_decode(num_requests: int, steps: int, seed: int = 0) -> dict[str, dict[str, dict[str, float]]]:
    """Measure ``steps`` steady steps of ``num_requests`` decoding requests. Return figures by message."""
    rng = np.random.default_rng(seed)
    low, high = PROMPT_LENGTHS
    # Long enough that no request finishes while others still start or steps are recorded.
    max_tokens = 2 * num_requests + steps + 64
    engine = WireEngine(num_requests, high + max_tokens, max(8192, num_requests), seed)
    vocab_size = engine.config.model.vocab_size
    for index in range(num_requests):
        prompt = rng.integers(3, vocab_size, int(rng.integers(low, high)), dtype=np.int32)
        engine.add(index, prompt, max_tokens)
    started = 0
    while started < num_requests:
        started += sum(len(outputs.introduced) for outputs in engine.step(record=False))
    engine.step(record=False)
    for _ in range(steps):
        engine.step(record=True)
    return {name: costs.figures() for name, costs in engine.costs()}


def measure_new_prompts(seed: int = 0) -> dict[str, dict[str, float]]:
    """Measure the SchedulerOutput that sends eight new prompts to the worker."""
    rng = np.random.default_rng(seed)
    engine = WireEngine(NUM_NEW_PROMPTS, NEW_PROMPT_LENGTH + 16, NUM_NEW_PROMPTS * NEW_PROMPT_LENGTH, seed)
    for index in range(NUM_NEW_PROMPTS):
        engine.add(index, rng.integers(3, engine.config.model.vocab_size, NEW_PROMPT_LENGTH, dtype=np.int32), 16)
    diff = engine.scheduler.schedule()
    assert diff is not None and len(diff.new_requests) == NUM_NEW_PROMPTS
    for _ in range(NEW_PROMPT_REPEATS):
        engine.to_worker.pass_on(diff, "new")
    return engine.to_worker.costs["new"].figures()


def run(args: argparse.Namespace) -> None:
    """Raises ConfigError for a flag out of range."""
    if not 1 <= args.num_requests <= 4096:
        raise ConfigError(f"--num-requests must be from 1 to 4096 (got {args.num_requests})")
    if not 1 <= args.steps <= 65536:
        raise ConfigError(f"--steps must be from 1 to 65536 (got {args.steps})")
    decode = measure_decode(args.num_requests, args.steps)
    prompts = measure_new_prompts()
    settings = {
        "num_requests": args.num_requests,
        "steps": args.steps,
        "async_scheduling": True,
        "block_size": 16,
        "vocab_size": find_shape(SHAPE).vocab_size,
    }
    report = RunReport("wire", settings, rounded({"decode": decode, "new_prompts": prompts}, 2))
    title = f"{args.num_requests} decoding requests, {args.steps} steps"
    report.tables.append(_table(title, decode))
    new = f"{NUM_NEW_PROMPTS} new prompts of {NEW_PROMPT_LENGTH:,} tokens"
    report.tables.append(_table(new, {"SchedulerOutput": prompts}))
    report.publish(args.json)


def _table(title: str, figures: dict[str, dict[str, dict[str, float]]]) -> Table:
    labels = {"bytes": "bytes", "encode_us": "encode, CPU µs", "decode_us": "decode, CPU µs"}
    rows = [
        distribution_row(f"{message}: {labels[name]}", found)
        for message, kinds in figures.items()
        for name, found in kinds.items()
    ]
    return Table(title, DISTRIBUTION_COLUMNS, rows)
