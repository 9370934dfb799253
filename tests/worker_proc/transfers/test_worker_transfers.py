"""Transfers through a worker: its loop over a memory channel, and real processes that share pages."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from host_pages import Memory, disk_pages, host_memory, move
from runner_steps import CONFIG, MODEL, PROMPT, adding, alone
from scripted_worker import Script, worker_loop

from quire.launch.supervision.child_process import ChildProcess
from quire.protocol.model.kv_layout import kv_layout
from quire.protocol.process.child import Command
from quire.protocol.wire.channel import Link
from quire.protocol.wire.link_messages import Heartbeat, Hello
from quire.protocol.wire.transfer_messages import BlocksMoved, DiskContents, HostPages
from quire.protocol.wire.worker_messages import (
    Configure,
    Fault,
    ModelRunnerOutput,
    Ready,
    SampleInputs,
    SchedulerOutput,
    WorkerToScheduler,
)
from quire.protocol.wire.zmq_channel import ZmqChannel, worker_address
from quire.worker_proc.batch.input_batch import StepRefused
from quire.worker_proc.loop import WorkerLoop
from quire.worker_proc.parallel.group import SingleRank

NUM_PAGES = 8
PAGE_BYTES = 4096
OFFLOADING = msgspec.structs.replace(CONFIG, cpu_offload_bytes=NUM_PAGES * PAGE_BYTES)


def configure(epoch: int = 1, *, offloading: bool = True) -> Configure:
    return Configure(epoch, kv_layout(MODEL, 4, "float32"), OFFLOADING if offloading else CONFIG)


@pytest.fixture
def memory() -> Iterator[Memory]:
    with host_memory(NUM_PAGES, PAGE_BYTES) as memory:
        yield memory


def serve(loop: WorkerLoop, *messages: Any) -> Script:
    script = Script(*messages)
    loop.serve(script, 0, lambda config: SingleRank())
    return script


def test_ready_has_the_size_of_a_page_only_with_host_memory() -> None:
    for offloading in (True, False):
        with worker_loop() as loop:
            (ready,) = serve(loop, configure(offloading=offloading)).of(Ready)
            assert ready.page_bytes == (PAGE_BYTES if offloading else 0)


def test_messages_of_transfers_are_refused_without_host_memory(memory: Memory) -> None:
    with worker_loop() as loop, pytest.raises(Exception, match="unexpected HostPages"):
        serve(loop, configure(offloading=False), memory.message)


def test_transfers_between_a_step_and_its_sample_inputs(memory: Memory) -> None:
    """They do not void the step; and they see what its forward pass has written."""
    first = SchedulerOutput(1, **adding((4, PROMPT, [1, 2])), awaits_sample_inputs=True)
    second = SchedulerOutput(2, removed=[4], **adding((5, PROMPT, [6, 7]), computed=4))
    with worker_loop() as loop:
        script = serve(
            loop,
            *(configure(), memory.message, first, move(False, [1], [3], 1), 1, move(True, [6], [3], 2), 2),
            *(SampleInputs(1, [], []), second),
        )
    assert [moved.failed for moved in script.of(BlocksMoved)] == [[], []]
    tokens = [result.tokens.tolist() for result in script.of(ModelRunnerOutput)]
    assert tokens == [alone(PROMPT, 1), alone(PROMPT, 1)]


def test_a_refused_transfer_ends_the_worker_as_a_refused_step_does(memory: Memory) -> None:
    script = Script(configure(), memory.message, move(True, [99], [1]))
    with worker_loop() as loop, pytest.raises(StepRefused):
        loop.serve(script, 0, lambda config: SingleRank())
    (fault,) = script.of(Fault)
    assert fault.kind == "refused" and "allowed are 1 to 19" in fault.text


def test_the_next_scheduler_sends_its_own_host_memory(memory: Memory) -> None:
    with worker_loop() as loop:
        serve(loop, configure(), memory.message, move(False, [1], [1], 1), 1)
        script = serve(loop, configure(), memory.message, move(True, [2], [1], 1), 1)
        assert [moved.failed for moved in script.of(BlocksMoved)] == [[]]
        with pytest.raises(StepRefused, match="before HostPages"):
            serve(loop, configure(), move(True, [2], [1], 1))


def test_pages_on_disk_are_found_by_the_next_worker(tmp_path: Path) -> None:
    config = msgspec.structs.replace(CONFIG, ssd_cache_dir=str(tmp_path), ssd_cache_bytes=NUM_PAGES * PAGE_BYTES)
    start = Configure(1, kv_layout(MODEL, 4, "float32"), config)
    disk = disk_pages(tmp_path / "pages", NUM_PAGES, PAGE_BYTES)
    step = SchedulerOutput(1, **adding((4, [*PROMPT, 7], [1, 2])))
    with worker_loop() as loop:
        script = serve(loop, start, disk.message, step, move(False, [1, 2], [3, 5], 1), 1)
        assert script.of(Ready)[0].page_bytes == PAGE_BYTES and not script.of(DiskContents)
    with worker_loop() as loop:
        message = msgspec.structs.replace(disk.message, read_contents=True)
        script = serve(loop, start, message, 1, move(True, [7, 6], [3, 5], 1), move(False, [7], [1], 2), 3)
        (contents,) = script.of(DiskContents)
        assert contents.page_ids.tolist() == [3, 5] and contents.keys == move(True, [1, 1], [3, 5]).keys
        assert [moved.failed for moved in script.of(BlocksMoved)] == [[], []]
    assert disk.page(1)[256:] == disk.page(3)[256:] and any(disk.page(1)[256:])


def test_a_worker_continues_without_its_file(tmp_path: Path, memory: Memory) -> None:
    message = disk_pages(tmp_path / "pages", NUM_PAGES, PAGE_BYTES, first_page=NUM_PAGES, read_contents=True).message
    (tmp_path / "pages").unlink()
    with worker_loop() as loop:
        moves = (move(False, [1], [1], 1), move(True, [2], [NUM_PAGES + 1], 2), 3, move(True, [2], [1], 3))
        script = serve(loop, configure(), memory.message, message, *moves, 4)
    assert "No such file" in script.of(DiskContents)[0].reason
    assert {moved.transfer: moved.failed for moved in script.of(BlocksMoved)} == {1: [], 2: [0], 3: []}


# ---- real processes


class Worker:
    """A worker process, and the scheduler's end of its channel."""

    def __init__(self, context: "zmq.Context[Any]", folder: Path, epoch: int) -> None:
        folder.chmod(0o700)
        link = Link(WorkerToScheduler, epoch)
        self._channel = ZmqChannel(context, zmq.PAIR, worker_address(folder, epoch, 0), link, bind=True)
        self.process = ChildProcess("quire.worker_proc", ["--directory", str(folder), "--quiet"])
        self.process.send(Command("join", worker_epoch=epoch))
        assert isinstance(self.receive(), Hello)
        self.send(configure(epoch))

    def send(self, *messages: Any) -> None:
        for message in messages:
            self._channel.send(message)

    def receive(self) -> Any:
        """Return the next message that is no heartbeat."""
        for _ in range(60):
            received = self._channel.receive(1.0)
            if received is not None and not isinstance(received.message, Heartbeat):
                return received.message
        raise AssertionError("no message for a minute")

    def kill(self) -> None:
        self.process.process.send_signal(signal.SIGKILL)
        self.process.process.wait()
        self.process.close()
        self._channel.close()


@contextmanager
def a_worker(folder: Path, epoch: int, memory: HostPages) -> Iterator[Worker]:
    """A worker that is killed at the end, also in the middle of a step or transfer."""
    with zmq.Context() as context:
        worker = Worker(context, folder, epoch)
        try:
            ready = worker.receive()
            assert isinstance(ready, Ready) and ready.page_bytes == PAGE_BYTES
            worker.send(memory)
            yield worker
        finally:
            worker.kill()


@pytest.mark.full
def test_pages_survive_the_kill_of_their_worker(tmp_path: Path, memory: Memory) -> None:
    tokens = [*PROMPT, *alone(PROMPT, 4)]
    step = SchedulerOutput(1, **adding((4, tokens, [1, 2, 3])))
    with a_worker(tmp_path, 1, memory.message) as first:
        first.send(step, move(False, [1, 2], [5, 6], 1))
        answers = [first.receive(), first.receive()]
        assert {type(answer) for answer in answers} == {ModelRunnerOutput, BlocksMoved}
        (token,) = next(a.tokens.tolist() for a in answers if isinstance(a, ModelRunnerOutput))
        first.send(*(move(False, [1, 2], [3, 4], number) for number in range(2, 200)))
    with a_worker(tmp_path, 2, memory.message) as second:
        loads, copies = move(True, [9, 8], [5, 6], 1), move(False, [9, 8], [1, 2], 2)
        second.send(loads)
        assert second.receive() == BlocksMoved(1, [], pytest.approx(0, abs=30), "")
        second.send(copies)
        assert second.receive().failed == []
        assert np.array_equal(memory.data(1), memory.data(5)) and np.array_equal(memory.data(2), memory.data(6))
        assert memory.data(1).any() and not np.array_equal(memory.data(1), memory.data(2))
        second.send(SchedulerOutput(1, **adding((7, tokens, [9, 8, 4]), computed=8)))
        assert second.receive().tokens.tolist() == [token]


@pytest.mark.full
def test_answers_arrive_between_the_results_of_steps(tmp_path: Path, memory: Memory) -> None:
    with a_worker(tmp_path, 1, memory.message) as worker:
        worker.send(SchedulerOutput(1, **adding((4, PROMPT, [1, 2, 3, 4, 5, 6]))))
        worker.send(*(move(False, [block], [block], block) for block in (1, 2)))
        worker.send(*(SchedulerOutput(number) for number in range(2, 20)))
        worker.send(move(True, [9, 10], [1, 2], 3))
        found = [worker.receive() for _ in range(22)]
        results = [message for message in found if isinstance(message, ModelRunnerOutput)]
        moved = [message for message in found if isinstance(message, BlocksMoved)]
        assert [result.step for result in results] == list(range(1, 20))
        assert {answer.transfer: answer.failed for answer in moved} == {1: [], 2: [], 3: []}
        kinds = [type(message) for message in found]
        assert kinds.index(BlocksMoved) < len(kinds) - 3
