"""Main loop of the worker process: receive a step, run it, send its result."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import msgspec

from quire.protocol.config import EngineConfig
from quire.protocol.errors import ConfigError, EngineError
from quire.protocol.wire.channel import Channel, Frames, Received
from quire.protocol.wire.codec import ProtocolError
from quire.protocol.wire.link_messages import Heartbeat
from quire.protocol.wire.worker_handshake import Superseded, WorkerCommands, request_configuration, wait_for_message
from quire.protocol.wire.worker_messages import (
    Configure,
    Digest,
    Fault,
    ModelRunnerOutput,
    Ready,
    SampleInputs,
    SchedulerOutput,
    Shutdown,
)
from quire.worker_proc.batch.input_batch import StepRefused
from quire.worker_proc.device.step_watcher import StepWatcher
from quire.worker_proc.execute.model_runner import ModelRunner
from quire.worker_proc.execute.pending_result import PendingResult
from quire.worker_proc.parallel.group import TensorParallel
from quire.worker_proc.side_work import SideWork
from quire.worker_proc.startup.loaded_files import name_loaded_files
from quire.worker_proc.startup.setup import make_runner, make_side_work

JoinGroup = Callable[[EngineConfig], TensorParallel]
DIGEST_BYTES = 8


@dataclass(slots=True)
class _Loaded:
    """The loaded model and its group, which are kept for the next scheduler."""

    configure: Configure
    runner: ModelRunner
    ready: Ready
    group: TensorParallel


class WorkerLoop:
    """Owns the ModelRunner, after it is configured, and the channel to the current scheduler.

    When the scheduler has died, the loop serves its replacement with the same model; only the requests' state is
    dropped.
    """

    def __init__(self, commands: WorkerCommands, pid: int, *, progress: bool) -> None:
        self._commands = commands
        self._pid = pid
        self._progress = progress
        self._loaded: _Loaded | None = None
        self._unread: Received | None = None
        self._watcher = StepWatcher()
        self._side: list[SideWork] = []
        self._handlers: dict[type, Callable[[Any], None]] = {}

    def serve(self, channel: Channel, rank: int, join: JoinGroup, remote: str = "") -> None:
        """Serve a scheduler until it sends Shutdown or the supervisor sends another command.

        Args:
            join: connects to the other ranks; called when the configuration with their number has arrived.
            remote: address of a scheduler on another machine, which may be out of reach.

        Raises:
            ConfigError, EngineError, StepRefused, ProtocolError: also sent to the scheduler as a Fault.
        """
        self._channel, self._rank, self._unread = channel, rank, None
        channel.wake_on(self._commands.fileno())
        # The loop sleeps on one poller only. A thread of the watcher turns the end of a step on the device into a
        # readable descriptor.
        channel.wake_on(self._watcher.fileno())
        try:
            configure = request_configuration(channel, rank, self._pid, self._commands, remote)
            loaded = self._load(configure, join)
            # Before Ready is sent: the first step may arrive at once, and rows of the previous scheduler would collide
            # with its handles.
            loaded.runner.begin_worker_epoch(configure.last_step)
            for each in self._side:
                each.begin_worker_epoch()
            channel.send(loaded.ready)
            self._steps(loaded.runner, loaded.group)
        except Superseded:
            return
        except Exception as error:
            channel.send(Fault(_kind(error), " ".join(str(error).split()) or type(error).__name__))
            self._close_threads()
            raise

    def close(self) -> None:
        """Close the group; the process and the other ranks are about to exit."""
        self._close_threads()
        if self._loaded is not None:
            self._loaded.group.close()

    def _close_threads(self) -> None:
        for each in self._side:
            each.close()

    def _load(self, configure: Configure, join: JoinGroup) -> _Loaded:
        """Load the model unless it is already loaded."""
        if self._loaded is None:
            config = configure.config
            group = join(config)
            # A replacement gets as many blocks as its predecessors had, whatever memory is free now: the scheduler's
            # tables name them.
            if configure.num_blocks:
                config = msgspec.structs.replace(config, num_blocks_override=configure.num_blocks - 1)
            if configure.num_slots:
                config = msgspec.structs.replace(config, state_slots=configure.num_slots - 1)
            say = self._commands.report_phase
            say("prepares kernels")
            # Taken before the weights are read and completed afterwards, so that a file which changes in between is
            # noticed.
            name_files = name_loaded_files(config)
            runner, ready = make_runner(config, configure.kv_layout, group=group, progress=self._progress, say=say)
            ready = msgspec.structs.replace(ready, files=name_files())
            self._side, page_bytes = make_side_work(runner, group, config, self._watcher.wake)
            self._handlers = {kind: handle for each in self._side for kind, handle in each.handlers.items()}
            ready = msgspec.structs.replace(ready, page_bytes=page_bytes)
            self._loaded = _Loaded(configure, runner, ready, group)
        # The model was built for another configuration. Loading it again in this process would need the memory twice; a
        # new process starts clean.
        elif self._loaded.configure.config != configure.config:
            previous, new = self._loaded.configure.config, configure.config
            names = [name for name in new.__struct_fields__ if getattr(new, name) != getattr(previous, name)]
            raise EngineError(f"configuration differs from that of the previous scheduler in {', '.join(names)}")
        return self._loaded

    def _steps(self, runner: ModelRunner, group: TensorParallel) -> None:
        """Launch each step when it arrives, and send each result when it is ready, whichever is first.

        On a GPU the next step is launched while the previous one runs: two are then in flight.
        """
        results = _Results(self._channel, group, self._watcher)
        while True:
            results.watch_newest()
            received = self._take()
            match received.message if received else None:
                case SchedulerOutput() as step:
                    assert received is not None
                    # Launched before older results are sent: the device is then never idle while this thread encodes
                    # them.
                    results.add(self._run(runner, step, results), received.frames)
                case SampleInputs():
                    pass  # for a void step
                case Shutdown():
                    return
                case None:
                    pass  # a step has finished, or a heartbeat was sent
                case other:
                    raise EngineError(f"unexpected {type(other).__name__} instead of a step")
            results.send_ready()

    def _run(self, runner: ModelRunner, step: SchedulerOutput, results: "_Results") -> PendingResult:
        launched = runner.launch(step)
        if launched.void or not step.awaits_sample_inputs:
            return runner.finish(launched)
        results.send_all()  # the scheduler needs these results to make the masks
        if step.drafts and self._rank == 0:
            self._channel.send(runner.proposed(launched))
        # The forward pass runs meanwhile. Masks depend on the tokens of the step before, which is why they cannot
        # travel with the diff.
        inputs = self._sample_inputs(step.step)
        return runner.discard(launched) if inputs is None else runner.finish(launched, inputs)

    def _sample_inputs(self, step: int) -> SampleInputs | None:
        """Wait for the sample inputs of ``step``; None if another message arrives first: the step is then obsolete."""
        while True:
            received = self._take()
            match received.message if received else None:
                case SampleInputs() as inputs if inputs.step == step:
                    return inputs
                case SampleInputs() | None:
                    continue
                case _:
                    # The message belongs to the next step: the scheduler has dropped this one, and goes on without its
                    # masks.
                    self._unread = received
                    return None

    def _take(self) -> Received | None:
        """Return the next message of a step, or None after a wait without one.

        The wait ends when a watched step or work beside the steps has ended, or after a second. Messages about that
        work are handled here, so that they may also arrive while a step waits for its sample inputs.
        """
        for each in self._side:
            for answer in each.take_answers():
                self._channel.send(answer)
        received, self._unread = self._unread, None
        if received is None:
            received = wait_for_message(self._channel, self._commands, self._watcher.fired)
        if received is None or isinstance(received.message, Heartbeat):
            return None
        handle = self._handlers.get(type(received.message))
        if handle is None:
            return received
        handle(received.message)
        return None


class _Results:
    """Owns the results of launched steps that are not sent yet, in order."""

    def __init__(self, channel: Channel, group: TensorParallel, watcher: StepWatcher) -> None:
        self._channel = channel
        self._group = group
        self._watcher = watcher
        self._watched: PendingResult | None = None
        self._pending: deque[tuple[PendingResult, Frames]] = deque()

    def add(self, result: PendingResult, diff: Frames) -> None:
        self._pending.append((result, diff))

    def watch_newest(self) -> None:
        """Let the newest result wake the loop, unless all are sent."""
        newest = self._pending[-1][0] if self._pending else None
        if newest is not None and newest is not self._watched:
            self._watcher.watch(newest.wait)
        self._watched = newest

    def send_ready(self) -> None:
        """Send the results that are ready, and wait for all but the newest, so that at most two steps are in flight."""
        # Sent in the order of launches even if a later one is ready first, because the scheduler matches results to
        # steps by their order.
        while self._pending and (self._pending[0][0].ready or len(self._pending) > 1):
            self._send_oldest()

    def send_all(self) -> None:
        while self._pending:
            self._send_oldest()

    def _send_oldest(self) -> None:
        pending, diff = self._pending.popleft()
        result = pending.result()
        if self._group.rank == 0:
            self._channel.send(result)
        if self._group.size > 1:
            self._channel.send(Digest(result.step, _digest(diff, result)))


def _digest(diff: Frames, result: ModelRunnerOutput) -> bytes:
    """Return a digest of a step's diff and tokens; ranks with equal digests have the same rows."""
    # Over the diff as well as the tokens: ranks that were sent different diffs may still sample equal tokens, in this
    # step.
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
