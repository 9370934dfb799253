"""The worker process' loop: take a step, run it, send its result."""

import dataclasses
from collections import deque
from collections.abc import Callable
from hashlib import blake2b

import numpy as np

from quire.protocol.channel import Channel, Frames, Received
from quire.protocol.codec import ProtocolError
from quire.protocol.config import EngineConfig
from quire.protocol.errors import ConfigError, EngineError
from quire.protocol.messages import (
    PROTOCOL_VERSION,
    Configure,
    Digest,
    Fault,
    Hello,
    ModelRunnerOutput,
    Proposed,
    Refused,
    SampleInputs,
    SchedulerOutput,
    Shutdown,
    Welcome,
)
from quire.worker_proc.input_batch import StepRefused
from quire.worker_proc.model_runner import LaunchedStep, ModelRunner
from quire.worker_proc.parallel.group import TensorParallel
from quire.worker_proc.pending_result import PendingResult
from quire.worker_proc.setup import Say, make_runner

JoinGroup = Callable[[EngineConfig], TensorParallel]
DIGEST_BYTES = 8


class WorkerLoop:
    """Owns the channel to the scheduler and, once configured, the ModelRunner."""

    def __init__(self, channel: Channel, rank: int, pid: int, join: JoinGroup, say: Say, *, progress: bool) -> None:
        """``join``: meets the other ranks, once the configuration says how many there are."""
        self._channel = channel
        self._rank = rank
        self._join = join
        self._pid = pid
        self._say = say
        self._progress = progress

    def run(self) -> None:
        """Until the scheduler sends Shutdown.

        Raises:
            ConfigError, EngineError, StepRefused, ProtocolError: also told to the scheduler as a Fault.
        """
        try:
            configure = self._handshake()
            config = configure.config
            group = self._join(config)
            runner, ready = make_runner(config, configure.kv_layout, self._say, group=group, progress=self._progress)
            self._channel.send(ready)
            self._steps(runner, group)
            group.close()
        except Exception as error:
            self._channel.send(Fault(_kind(error), " ".join(str(error).split()) or type(error).__name__))
            raise

    def _handshake(self) -> Configure:
        self._channel.send(Hello(PROTOCOL_VERSION, "worker", self._rank, self._pid))
        while True:
            received = self._channel.receive(None)
            match received.message if received else None:
                case Welcome():
                    continue
                case Configure() as configure:
                    return configure
                case Refused(reason=reason):
                    raise EngineError(f"the scheduler refused this worker: {reason}")
                case other:
                    raise EngineError(f"unexpected {type(other).__name__} instead of Configure")

    def _steps(self, runner: ModelRunner, group: TensorParallel) -> None:
        """Launch each step as soon as it comes; send each result as soon as it is there.

        On a GPU a launched step is not waited for while the next one is at hand: then two are in flight.
        """
        pending: deque[tuple[PendingResult, Frames]] = deque()
        received = None
        while True:
            received = received or self._channel.receive(0.0 if pending else None)
            following = None
            match received.message if received else None:
                case SchedulerOutput() as step:
                    assert received is not None
                    launched = runner.launch(step)
                    inputs = None
                    if step.awaits_sample_inputs and not launched.void:
                        self._send_results(pending, group, all_of_them=True)  # the masks depend on them
                        inputs, following = self._sample_inputs(runner, step, launched, group)
                        if following is not None:
                            launched = dataclasses.replace(launched, void=True)
                    pending.append((runner.finish(launched, inputs), received.frames))
                case SampleInputs():
                    pass  # of a step that was void
                case Shutdown():
                    return
                case None:
                    pass
                case other:
                    raise EngineError(f"unexpected {type(other).__name__} instead of a step")
            self._send_results(pending, group, all_of_them=received is None)
            received = following

    def _sample_inputs(
        self, runner: ModelRunner, step: SchedulerOutput, launched: LaunchedStep, group: TensorParallel
    ) -> tuple[SampleInputs | None, Received | None]:
        """What ``launched`` waits for; or the message that came instead, when nobody wants the step any more."""
        if step.drafts and group.rank == 0:
            self._channel.send(runner.proposed(launched) or _no_drafts(launched.step))
        while True:
            received = self._channel.receive(None)
            match received.message if received else None:
                case SampleInputs() as inputs if inputs.step == launched.step:
                    return inputs, None
                case SampleInputs() | None:
                    continue
                case _:
                    return None, received

    def _send_results(
        self, pending: deque[tuple[PendingResult, Frames]], group: TensorParallel, *, all_of_them: bool
    ) -> None:
        while pending and (all_of_them or pending[0][0].ready or len(pending) > 1):
            waiting, frames = pending.popleft()
            result = waiting.result()
            if group.rank == 0:
                self._channel.send(result)
            if group.size > 1:
                self._channel.send(Digest(result.step, _digest(frames, result)))


def _no_drafts(step: int) -> Proposed:
    """Said too: who makes the masks cannot know that the proposer found nothing."""
    nothing = np.zeros(0, np.int32)
    return Proposed(step, nothing, nothing, nothing)


def _digest(diff: Frames, result: ModelRunnerOutput) -> bytes:
    """Over what a step was and what it gave: ranks that agree on it hold the same rows."""
    digest = blake2b(digest_size=DIGEST_BYTES)
    for frame in diff:
        digest.update(frame)
    if result.tokens is not None:
        digest.update(result.tokens.tobytes())
    return digest.digest()


def _kind(error: Exception) -> str:
    match error:
        case ConfigError():
            return "checkpoint"
        case MemoryError():
            return "memory"
        case StepRefused() | ProtocolError():
            return "refused"
        case _:
            return "error"
