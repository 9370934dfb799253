"""The worker's loop over memory channels: steps that wait for a token bitmask, and bitmasks that do not arrive."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from fake_child import no_calls
from memory_channel import memory_pair
from runner_steps import CONFIG, MODEL, PROMPT, adding, alone

from quire.protocol.config import FIRST_WORKER_EPOCH
from quire.protocol.errors import EngineError
from quire.protocol.model.kv_layout import kv_layout
from quire.protocol.wire import worker_handshake
from quire.protocol.wire.channel import Channel
from quire.protocol.wire.link_messages import Hello
from quire.protocol.wire.worker_messages import (
    Configure,
    ModelRunnerOutput,
    Ready,
    SampleInputs,
    SchedulerOutput,
    SchedulerToWorker,
    Shutdown,
    WorkerToScheduler,
)
from quire.worker_proc.batch.input_batch import StepRefused
from quire.worker_proc.loop import WorkerLoop
from quire.worker_proc.parallel.group import SingleRank

WORDS = -(-MODEL.vocab_size // 32)
BLOCKS = [1, 2, 3, 4, 5, 6]


@dataclass
class Script(Channel):
    """The worker's end of the channel: receives ``messages``, then Shutdown; records the order of all messages."""

    messages: list[Any]
    seen: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        far, self._near = memory_pair(WorkerToScheduler, SchedulerToWorker)
        self._far = far

    def send(self, message: Any) -> Any:
        self.seen.append(message)
        return []

    def receive(self, timeout: float | None = 0.0) -> Any:
        if timeout == 0.0:
            return None  # as with a slow scheduler: a ready result is sent first
        message = self.messages.pop(0) if self.messages else Shutdown()
        self.seen.append(message)
        self._far.send(message)
        return self._near.receive()


def run(*steps: Any) -> list[Any]:
    """Return all received and sent messages in order, from the first step on."""
    script = Script([Configure(FIRST_WORKER_EPOCH, kv_layout(MODEL, 4, "float32"), CONFIG), *steps])
    with no_calls() as calls:
        WorkerLoop(calls, 1, progress=False).serve(script, 0, lambda config: SingleRank())
    assert isinstance(script.seen[0], Hello) and isinstance(script.seen[2], Ready)
    return script.seen[3:]


class Silent(Script):
    """A scheduler that does not answer."""

    def receive(self, timeout: float | None = 0.0) -> Any:
        return None


def test_a_scheduler_on_another_machine_that_does_not_answer_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_handshake, "ANSWER_S", 0.0)
    script = Silent([])
    with (
        no_calls() as calls,
        pytest.raises(EngineError, match=r"no answer of the scheduler at tcp://10\.0\.0\.1:4321: nodes"),
    ):
        WorkerLoop(calls, 1, progress=False).serve(script, 0, lambda config: SingleRank(), "tcp://10.0.0.1:4321")


def only(*tokens: int) -> np.ndarray[Any, Any]:
    """Return a bitmask that allows ``tokens``."""
    mask = np.zeros(WORDS, np.uint32)
    for token in tokens:
        mask[token // 32] |= np.uint32(1 << token % 32)
    return mask.view(np.int32)


def first() -> SchedulerOutput:
    return SchedulerOutput(1, **adding((4, PROMPT, BLOCKS)), awaits_sample_inputs=True)


def results(seen: list[Any]) -> list[ModelRunnerOutput]:
    return [message for message in seen if isinstance(message, ModelRunnerOutput)]


def test_step_waits_for_its_bitmask_and_applies_it() -> None:
    seen = run(first(), SampleInputs(1, [4], [1], only(17)), SchedulerOutput(2), SchedulerOutput(3))
    one, two, three = results(seen)
    assert one.tokens is not None and one.tokens.tolist() == [17]
    follow = alone([*PROMPT, 17], 2)
    assert [r.tokens.tolist() for r in (two, three) if r.tokens is not None] == [[follow[0]], [follow[1]]]


def test_sends_previous_result_before_waiting_for_bitmask() -> None:
    """The scheduler needs the result to make the bitmask; otherwise both sides would wait for ever."""
    plain = SchedulerOutput(1, **adding((4, PROMPT, BLOCKS)))
    seen = run(plain, SchedulerOutput(2, awaits_sample_inputs=True), SampleInputs(2, [4], [1], only(9)))
    kinds = [type(message).__name__ for message in seen]
    assert kinds == [
        *("SchedulerOutput", "ModelRunnerOutput", "SchedulerOutput", "SampleInputs", "ModelRunnerOutput", "Shutdown"),
    ]
    assert results(seen)[1].tokens.tolist() == [9]  # type: ignore[union-attr]


def test_empty_bitmask_masks_no_request() -> None:
    seen = run(first(), SampleInputs(1, [], []))
    assert results(seen)[0].tokens.tolist() == alone(PROMPT, 1)  # type: ignore[union-attr]


def test_ignores_bitmask_of_another_step() -> None:
    stray = SampleInputs(7, [4], [1], only(3))
    seen = run(first(), stray, SampleInputs(1, [4], [1], only(17)), stray, SchedulerOutput(2))
    assert [r.tokens.tolist() for r in results(seen) if r.tokens is not None] == [[17], alone([*PROMPT, 17], 1)]


def test_step_that_arrives_instead_of_the_bitmask_voids_the_waiting_one() -> None:
    """The scheduler removed all requests and admitted them again."""
    readmitted = SchedulerOutput(2, removed=[4], **adding((4, PROMPT, BLOCKS)))
    one, two = results(run(first(), readmitted))
    assert (one.step, one.tokens, one.failure) == (1, None, "")
    assert two.tokens is not None and two.tokens.tolist() == alone(PROMPT, 1)


def test_shutdown_while_waiting_for_bitmask() -> None:
    assert [r.tokens for r in results(run(first()))] == [None]


@pytest.mark.full
@pytest.mark.parametrize(
    "inputs",
    [
        SampleInputs(1, [5], [1], only(1)),
        SampleInputs(1, [4], [2], np.concatenate([only(1), only(1)])),
        SampleInputs(1, [4], [1, 1], only(1)),
        SampleInputs(1, [4, 4], [1, 1], only(1)[:1]),
    ],
    ids=["unknown handle", "too many", "counts and handles", "half a mask"],
)
def test_invalid_bitmask_stops_the_worker(inputs: SampleInputs) -> None:
    with pytest.raises(StepRefused):
        run(first(), inputs)
