"""The whole engine in one process: real Scheduler, real codec, real ModelRunner; memory channels instead of sockets."""

import select
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
from grammar_manager_case import sample_inputs
from memory_channel import memory_pair
from side_parts import parts_of

from quire.launch.config.implementation import read_model
from quire.protocol.config import EngineConfig
from quire.protocol.model.kv_layout import kv_layout
from quire.protocol.model.model_config import ModelConfig
from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.wire.channel import Received
from quire.protocol.wire.front_end_messages import (
    Abort,
    AddRequest,
    Ended,
    Hypothesis,
    Rejected,
    Statistics,
    StepOutputs,
)
from quire.protocol.wire.item_messages import Encode, InputItem
from quire.protocol.wire.side_rows import LOGPROBS
from quire.protocol.wire.transfer_messages import MoveBlocks
from quire.protocol.wire.worker_messages import ModelRunnerOutput, SchedulerOutput, SchedulerToWorker, WorkerToScheduler
from quire.scheduler_proc.requests.events import Hold
from quire.scheduler_proc.scheduler import Scheduler, StepTooLarge
from quire.scheduler_proc.structured.manager import GrammarManager
from quire.worker_proc.device.step_watcher import StepWatcher
from quire.worker_proc.images.encoder import ItemEncoder
from quire.worker_proc.parallel.group import SingleRank
from quire.worker_proc.startup.setup import make_runner
from quire.worker_proc.transfers.make import Mover, make_mover


@dataclass
class Answer:
    """The output of one request, as a client would receive it."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[bytes] = field(default_factory=list)
    """Log probabilities per token that requested them, exact to the bit."""
    ended: Ended | None = None
    rejected: Rejected | None = None
    num_cached_tokens: int = 0
    hypotheses: list[Hypothesis] = field(default_factory=list)


class InProcessEngine:
    """Drives the engine step by step. ``check=True`` checks every invariant of both sides after each step.

    ``model`` is what ``read_model`` would return, where a caller has it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        check: bool = True,
        model_impl: str = "auto",
        model: ModelConfig | None = None,
        num_host_pages: int = 0,
        **settings: object,
    ) -> None:
        """``num_host_pages``: with them, the mover must be given its memory before the first step."""
        model = model or read_model(folder, model_impl)
        defaults: dict[str, object] = {
            "model": model,
            "model_path": str(folder),
            "dtype": "float32",
            "max_model_len": min(model.max_position, 512),
            "num_blocks_override": 1024,  # checks walk the pool after every step
        }
        self.config = msgspec.convert(defaults | settings, EngineConfig, from_attributes=True)
        layout = kv_layout(model, self.config.block_size, self.config.kv_cache_dtype)
        self.runner, ready = make_runner(self.config, layout, progress=False)
        layout = layout.with_block_size(ready.plan.block_size)
        pools = {"num_host_pages": num_host_pages, "num_slots": ready.num_slots}
        self.scheduler = Scheduler(self.config, layout, min(ready.num_blocks), **pools)
        self.mover: Mover | None = None
        if num_host_pages:
            self._moved = StepWatcher()
            self.mover = make_mover(self.runner, SingleRank(), self.config, self._moved.wake)
        self.moves: list[MoveBlocks] = []
        self.encoder: ItemEncoder | None = None
        if self.config.item_kinds:
            self._encoded = StepWatcher()
            self.encoder = ItemEncoder(self.runner.items, self.runner.forward.model, self._encoded.wake)
        self.grammars = GrammarManager(self.config, time.monotonic)
        self.close = weakref.finalize(self, self.grammars.close)  # idempotent, for tests with grammars or without
        self.to_worker, self.to_scheduler = memory_pair(WorkerToScheduler, SchedulerToWorker)
        self.answers: dict[str, Answer] = {}
        self.check = check
        self.step_sizes: list[int] = []
        self._handles: dict[int, str] = {}
        self._pending: deque[object] = deque()

    def add(
        self,
        request_id: str,
        prompt: list[int],
        output: list[int] | None = None,
        *,
        forked_from: tuple[str, int] = ("", 0),
        items: Sequence[InputItem] = (),
        **sampling: object,
    ) -> None:
        """Add a request and wait until its grammar, if any, is compiled.

        Args:
            output: tokens that are already delivered.
            forked_from: id of the parent, and the number of its tokens with which the request begins.
            items: images and given embeddings of the prompt.
        """
        defaults = {"temperature": 0.0, "ignore_eos": "structured_outputs" not in sampling}
        params = SamplingParams(**(defaults | sampling))  # type: ignore[arg-type]
        self.answers[request_id] = Answer()
        seed = 0 if params.seed is None else params.seed
        delivered = None if output is None else np.array(output, np.int32)
        parent, num_known = forked_from
        known = {"forked_from": parent, "num_forked_tokens": num_known, "items": list(items)}
        request = AddRequest(request_id, np.array(prompt, np.int32), params, seed, delivered, **known)
        self.scheduler.consume(request)
        if params.structured_outputs is not None and (0, request_id) in self.scheduler.table.requests:
            self._compile(request)
        self._collect()

    def _compile(self, request: AddRequest) -> None:
        if not self.grammars.begin(0, request):
            return
        self.scheduler.consume(Hold(request.request_id, "grammar"))
        while self.grammars.has_waiting_requests:
            self._poll_grammars(wait=True)

    def _poll_grammars(self, *, wait: bool) -> None:
        if wait:
            select.select([self.grammars], [], [], 0.1)
        for client, event in self.grammars.poll():
            self.scheduler.consume(event, client)

    def abort(self, request_id: str) -> None:
        self.scheduler.consume(Abort([request_id]))
        self._collect()

    def step(self) -> None:
        """Fill the pipeline, then let the worker run its oldest step and apply the result."""
        while self.scheduler.can_schedule:
            diff = self.scheduler.schedule()
            self._send_moves(self.scheduler.transfers.take_loads())
            self._send_encodes()
            if diff is None:
                break
            self.step_sizes.append(sum(len(bytes(f)) for f in self.to_worker.send(diff)))
            self._send_moves(self.scheduler.transfers.take_stores())
            self._check()
        self._send_moves(self.scheduler.transfers.take_stores())
        self._send_encodes()
        received = self._received()
        if received is not None:
            self.to_scheduler.send(self._execute(received.message))
            if self.check:
                self.runner.check()
            result = self.to_worker.receive()
            assert result is not None
            try:
                self.scheduler.consume(result.message)
            except StepTooLarge:  # as the scheduler's loop does
                self.scheduler.begin_worker_epoch()
                self.scheduler.halve_token_budget()
            self._check()
        if self.grammars.has_waiting_requests:  # a mask was late, so its request is held
            self._poll_grammars(wait=received is None)
        self._collect()

    def _send_moves(self, moves: list[MoveBlocks]) -> None:
        self.moves += moves
        for move in moves:
            self.to_worker.send(move)

    def _send_encodes(self) -> None:
        for encode in self.scheduler.take_side_jobs():
            self.to_worker.send(encode)

    def replace_workers(self) -> None:
        """Lose the worker with its steps and rows, and continue with a new one."""
        self.scheduler.begin_worker_epoch(new_workers=True)
        while self.to_scheduler.receive() is not None:
            pass
        self.runner.begin_worker_epoch(self.scheduler.last_step)
        if self.encoder is not None:
            self.encoder.begin_worker_epoch()

    def _encode(self, message: Encode) -> None:
        """Encode an item at once, so that steps do not depend on the speed of the thread."""
        assert self.encoder is not None
        self.encoder.submit(message)
        select.select([self._encoded], [], [], 30)
        self._encoded.fired()
        (answer,) = self.encoder.take_answers()
        self.scheduler.consume(answer)
        self._check()

    def _received(self) -> Received | None:
        """Return the oldest step that the worker has not run; submit what comes before it, and apply the answers."""
        while (received := self.to_scheduler.receive()) is not None:
            if isinstance(received.message, MoveBlocks):
                self.mover.submit(received.message)  # type: ignore[union-attr]
            elif isinstance(received.message, Encode):
                self._encode(received.message)
            else:
                break
        if self.mover is not None:
            select.select([self._moved], [], [], 0.0 if received else 0.01)
            self._moved.fired()
            for answer in self.mover.take_answers():
                self.scheduler.consume(answer)
                self._check()
        return received

    def _execute(self, diff: SchedulerOutput) -> ModelRunnerOutput:
        launched = self.runner.launch(diff)
        inputs = None
        if diff.awaits_sample_inputs and not launched.void:
            record = self.scheduler.step_awaiting_inputs
            assert record is not None and record.step == diff.step, "a step before it was not answered"
            inputs, failures = sample_inputs(self.grammars, record, self.runner.proposed(launched))
            record.awaits_inputs = False
            for client, fail in failures:
                self.scheduler.consume(fail, client)
        return self.runner.finish(launched, inputs).result()

    def run(self, max_steps: int = 100_000) -> dict[str, Answer]:
        """Step until no request waits or runs."""
        for _ in range(max_steps):
            if not self.scheduler.table.requests and not self.scheduler.in_flight:
                break
            self.step()
        else:
            raise AssertionError("requests do not end")
        return self.answers

    def _collect_logprobs(self, message: StepOutputs) -> None:
        for handle, _, (_, _, values) in parts_of(message, LOGPROBS):
            self.answers[self._handles[handle]].logprobs += [own.tobytes() for own in values]

    def statistics(self) -> Statistics:
        return self.scheduler.statistics()

    def _check(self) -> None:
        if self.check:
            self.scheduler.check()

    def _collect(self) -> None:
        for _, message in self.scheduler.take_messages():
            if isinstance(message, Rejected):
                self.answers[message.request_id].rejected = message
                continue
            assert isinstance(message, StepOutputs)
            for introduced in message.introduced:
                self._handles[introduced.handle] = introduced.request_id
                self.answers[introduced.request_id].num_cached_tokens = introduced.num_cached_tokens
            if message.handles is not None and message.tokens is not None:
                for handle, token in zip(_owners(message), message.tokens.tolist(), strict=True):
                    answer = self.answers[self._handles[handle]]
                    assert answer.ended is None, "a token after the end"
                    answer.tokens.append(token)
                self._collect_logprobs(message)
            for handle, found in message.hypotheses:
                self.answers[self._handles[handle]].hypotheses = found
            for ended in message.ended:
                answer = self.answers[self._handles[ended.handle]]
                assert answer.ended is None, "ended twice"
                answer.ended = ended


def _owners(message: StepOutputs) -> list[int]:
    """Return the handle of each token."""
    assert message.handles is not None
    handles = message.handles if message.counts is None else np.repeat(message.handles, message.counts)
    return handles.tolist()
