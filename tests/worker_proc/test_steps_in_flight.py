"""The worker's loop before a device that is a timeline: the device always has its next step before the last one ends.

Time is virtual, in units. The scheduler sends step n + ``ahead`` as soon as it has the result of step n.
"""

import select
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from fake_child import no_calls

from quire.protocol.wire.channel import Channel, Received
from quire.protocol.wire.worker_messages import ModelRunnerOutput, SchedulerOutput, Shutdown
from quire.worker_proc.device.step_watcher import StepWatcher
from quire.worker_proc.loop import WorkerLoop
from quire.worker_proc.parallel.group import SingleRank

STEP = 500
SCHEDULER = 30
STEPS = 200


@dataclass
class Timeline:
    """The host's clock, and when the device has finished what was launched.

    Attributes:
        watched: when the step that the loop watches ends.
        idle: time that the device had nothing to do after its first step.
    """

    launch: int
    now: int = 0
    free_at: int = 0
    idle: int = 0
    watched: int | None = None
    launched: int = 0


@dataclass
class Step:
    """A pending result that is ready when the device has finished the step."""

    time: Timeline
    step: int
    ends: int

    @property
    def ready(self) -> bool:
        return self.time.now >= self.ends

    def wait(self) -> None:
        self.time.now = max(self.time.now, self.ends)

    def result(self) -> ModelRunnerOutput:
        self.wait()
        return ModelRunnerOutput(self.step)


@dataclass
class Runner:
    """Launches steps on the timeline."""

    time: Timeline

    def launch(self, step: SchedulerOutput) -> Any:
        time = self.time
        time.now += time.launch
        if time.launched:
            time.idle += max(0, time.now - time.free_at)
        time.launched += 1
        time.free_at = max(time.now, time.free_at) + STEP
        return SimpleNamespace(step=step.step, void=False)

    def finish(self, launched: Any) -> Step:
        return Step(self.time, launched.step, self.time.free_at)


class Watcher:
    """``StepWatcher`` in virtual time."""

    def __init__(self, time: Timeline) -> None:
        self._time = time

    def watch(self, wait: Any) -> None:
        self._time.watched = wait.__self__.ends

    def fired(self) -> bool:
        return True


@dataclass
class Scheduler(Channel):
    """The channel, with the scheduler behind it; ``incoming`` has each message's time of arrival."""

    time: Timeline
    ahead: int = 2
    latest: int = 0
    incoming: deque[tuple[int, Any]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.incoming.extend((0, SchedulerOutput(step)) for step in range(1, self.ahead + 1))

    def send(self, message: Any) -> Any:
        assert isinstance(message, ModelRunnerOutput)
        assert message.step == self.latest + 1
        self.latest = message.step
        following = message.step + self.ahead
        answer = SchedulerOutput(following) if following <= STEPS else Shutdown()
        self.incoming.append((self.time.now + SCHEDULER, answer))

    def receive(self, timeout: float | None = 0.0) -> Received | None:
        time, arrives = self.time, self.incoming[0][0] if self.incoming else None
        if timeout and (arrives is None or arrives > time.now):
            ends = [at for at in (arrives, time.watched) if at is not None]
            assert ends, "the loop waits for ever"
            time.now = max(time.now, min(ends))
            if time.watched == time.now:
                time.watched = None
        if arrives is None or arrives > time.now:
            return None
        return Received(self.incoming.popleft()[1], [])


def run(launch: int, ahead: int) -> Timeline:
    time = Timeline(launch)
    channel = Scheduler(time, ahead)
    with no_calls() as calls:
        loop = WorkerLoop(calls, 1, progress=False)
        loop._channel, loop._rank, loop._watcher = channel, 0, Watcher(time)  # type: ignore[assignment]
        loop._steps(Runner(time), SingleRank())  # type: ignore[arg-type]
    assert time.launched == STEPS and channel.latest >= STEPS - ahead + 1
    return time


@pytest.mark.parametrize("launch", [50, 200, 400])
def test_device_has_its_next_step_in_time(launch: int) -> None:
    time = run(launch, ahead=2)
    assert time.idle <= 0.01 * time.free_at, f"the device was idle for {time.idle / time.free_at:.1%} of the time"


def test_result_is_sent_when_the_step_ends_if_no_message_arrives() -> None:
    time = run(50, ahead=1)
    assert time.idle == (STEPS - 1) * (SCHEDULER + 50)


def test_watcher_wakes_a_loop_that_waits_for_messages() -> None:
    watcher = StepWatcher()
    assert not watcher.fired()
    watcher.watch(lambda: None)
    assert select.select([watcher.fileno()], [], [], 30)[0]
    assert watcher.fired() and not watcher.fired()


def test_watcher_survives_an_error_of_the_device() -> None:
    watcher = StepWatcher()
    for error in (RuntimeError("illegal memory access"), None):

        def wait(error: RuntimeError | None = error) -> None:
            if error:
                raise error

        watcher.watch(wait)
        assert select.select([watcher.fileno()], [], [], 30)[0]
        assert watcher.fired()
