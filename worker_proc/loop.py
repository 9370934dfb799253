"""The worker process' loop: take a step, run it, send its result."""

from collections import deque

from quire.protocol.channel import Channel
from quire.protocol.codec import ProtocolError
from quire.protocol.errors import ConfigError, EngineError
from quire.protocol.messages import (
    PROTOCOL_VERSION,
    Configure,
    Fault,
    Hello,
    Refused,
    SchedulerOutput,
    Shutdown,
    Welcome,
)
from quire.worker_proc.input_batch import StepRefused
from quire.worker_proc.model_runner import ModelRunner, PendingResult
from quire.worker_proc.setup import Say, make_runner


class WorkerLoop:
    """Owns the channel to the scheduler and, once configured, the ModelRunner."""

    def __init__(self, channel: Channel, rank: int, pid: int, say: Say, *, progress: bool) -> None:
        self._channel = channel
        self._rank = rank
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
            runner, ready = make_runner(configure.config, configure.kv_layout, self._say, progress=self._progress)
            self._channel.send(ready)
            self._steps(runner)
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

    def _steps(self, runner: ModelRunner) -> None:
        """Launch each step as soon as it comes; send each result as soon as it is there.

        On a GPU a launched step is not waited for while the next one is at hand: then two are in flight.
        """
        pending: deque[PendingResult] = deque()
        while True:
            received = self._channel.receive(0.0 if pending else None)
            match received.message if received else None:
                case SchedulerOutput() as step:
                    pending.append(runner.execute(step))
                case Shutdown():
                    return
                case None:
                    pass
                case other:
                    raise EngineError(f"unexpected {type(other).__name__} instead of a step")
            while pending and (pending[0].ready or len(pending) > 1 or received is None):
                self._channel.send(pending.popleft().result())


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
