"""Real processes that die: how the supervisor detects their end and replaces them."""

import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pipe_holder
import pytest
from scheduler_driver import make_config
from waits import wait_for

from quire.launch.supervision.child_process import ChildProcess
from quire.launch.supervision.supervisor import Supervisor, WorkerModule
from quire.protocol.process.child import Command
from quire.protocol.routing import EnginePlace

WAIT_S = 20.0


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the child's program importable, which is in the folder of the tests."""
    monkeypatch.setenv("PYTHONPATH", str(Path(pipe_holder.__file__).parent))


@pytest.fixture
def child(tmp_path: Path) -> Iterator[ChildProcess]:
    """A child process that has reported its start."""
    child = ChildProcess("pipe_holder", ["--directory", str(tmp_path)])
    wait_for(lambda: any(report.event == "started" for report in child.read_reports()[0]))
    yield child
    child.end(time.monotonic())


def wait_for_end(child: ChildProcess) -> None:
    """Wait for reports of the child until it has ended."""
    deadline = time.monotonic() + WAIT_S
    while select.select(child.watched, [], [], deadline - time.monotonic())[0]:
        if child.read_reports()[1]:
            return
    raise AssertionError("the end was not detected")


def kill_pipe_holder(directory: Path, pid: int) -> None:
    os.kill(int(pipe_holder.holder_file(directory, pid).read_text()), signal.SIGKILL)


class TestEnd:
    """The end of a process is detected although another process holds its pipe open."""

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS])
    def test_a_death_is_detected_while_the_pipe_is_open(
        self, child: ChildProcess, tmp_path: Path, number: signal.Signals
    ) -> None:
        assert not child.read_reports()[1]
        os.kill(child.pid, number)
        wait_for_end(child)
        assert child.describe_end("worker") == f"the worker process was killed by {number.name}"
        kill_pipe_holder(tmp_path, child.pid)

    def test_an_exit_is_described(self) -> None:
        child = ChildProcess("pipe_holder", ["--no-such-flag"])
        wait_for_end(child)
        assert child.describe_end("worker") == "the worker process exited with status 2 without reporting a reason"
        child.close()

    def test_a_stopped_process_has_not_ended(self, child: ChildProcess, tmp_path: Path) -> None:
        os.kill(child.pid, signal.SIGSTOP)
        wait_for(lambda: b"T" in Path(f"/proc/{child.pid}/stat").read_bytes().rpartition(b")")[2])
        assert not child.read_reports()[1]
        os.kill(child.pid, signal.SIGKILL)
        wait_for_end(child)
        kill_pipe_holder(tmp_path, child.pid)

    def test_without_pidfds_the_end_of_the_pipe_is_the_end(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.delattr(os, "pidfd_open")
        child = ChildProcess("pipe_holder", ["--directory", str(tmp_path)])
        wait_for(lambda: any(report.event == "started" for report in child.read_reports()[0]))
        assert len(child.watched) == 1
        os.kill(child.pid, signal.SIGKILL)
        kill_pipe_holder(tmp_path, child.pid)
        wait_for_end(child)
        assert child.describe_end("worker") == "the worker process was killed by SIGKILL"
        child.close()


def test_commands_that_do_not_fit_in_the_pipe_arrive_later(child: ChildProcess) -> None:
    places = [EnginePlace(number, detail="no GPU " * 100) for number in range(64)]
    os.kill(child.pid, signal.SIGSTOP)
    for _ in range(3):
        child.send(Command("engines", engines=places))
    child.send(Command("stop"))
    os.kill(child.pid, signal.SIGCONT)
    wait_for_end(child)
    assert child.describe_end("worker") == "the worker process exited with status 0 without reporting a reason"


def test_a_child_that_cannot_be_started_leaves_no_descriptors() -> None:
    folder = Path("/proc/self/fd")
    before = sorted(folder.iterdir())
    with pytest.raises(ValueError, match="null"):
        ChildProcess("pipe_holder", ["\0"])
    assert sorted(folder.iterdir()) == before


@pytest.mark.full
def test_a_dead_worker_is_replaced() -> None:
    with Supervisor(make_config(), worker=WorkerModule("pipe_holder")) as supervisor:
        policy = supervisor.policy

        def watch_until(condition: Callable[[], bool]) -> None:
            deadline = time.monotonic() + WAIT_S
            while not condition():
                supervisor.watch(0.1)
                policy.check()
                assert time.monotonic() < deadline

        supervisor.start_engine()
        first = policy.group[0].process.pid
        watch_until(lambda: policy.group[0].started)
        os.kill(first, signal.SIGKILL)
        watch_until(lambda: policy.worker_epoch == 2 and bool(policy.group))
        watch_until(lambda: policy.group[0].started)
        second = policy.group[0].process.pid
        for pid in (first, second):
            kill_pipe_holder(supervisor.directory, pid)
        directory = supervisor.directory
    assert second != first and not directory.exists()
