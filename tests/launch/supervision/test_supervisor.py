"""Real processes that are slow to go: what the supervisor sees of them, and when others take their place."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import slow_to_go
from scheduler_driver import make_config

from quire.launch.supervision.child_process import ChildProcess
from quire.launch.supervision.supervisor import Supervisor, WorkerProgram
from quire.protocol.process.child import Command

WAIT_S = 20.0


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program that the child runs lies beside the tests."""
    monkeypatch.setenv("PYTHONPATH", str(Path(slow_to_go.__file__).parent))


@pytest.fixture
def child(tmp_path: Path) -> Iterator[ChildProcess]:
    """It has started."""
    child = ChildProcess("slow_to_go", ["--directory", str(tmp_path)])
    wait_for(lambda: any(report.event == "started" for report in child.read_reports()[0]))
    yield child
    child.end(time.monotonic())


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        os.sched_yield()


def let_go(directory: Path, pid: int) -> None:
    os.kill(int(slow_to_go.holder_file(directory, pid).read_text()), signal.SIGKILL)


class TestEnding:
    """The flags of a process tell before its pipe does."""

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS])
    def test_a_death_is_seen_while_the_pipe_is_open(
        self, child: ChildProcess, tmp_path: Path, number: signal.Signals
    ) -> None:
        assert not child.is_ending()
        os.kill(child.pid, number)
        wait_for(child.is_ending)
        assert child.how_it_ends("worker") == f"the worker process was killed by {number.name}"
        assert not child.read_reports()[1], "the pipe is still open"
        let_go(tmp_path, child.pid)
        wait_for(lambda: child.read_reports()[1])
        assert child.how_it_ended("worker") == f"the worker process was killed by {number.name}"

    def test_an_end_of_its_own(self, tmp_path: Path) -> None:
        child = ChildProcess("slow_to_go", ["--no-such-flag"])
        wait_for(child.is_ending)
        assert child.how_it_ends("worker") == "the worker process ended with status 2 and said nothing"
        child.end(time.monotonic() + WAIT_S)

    def test_one_that_is_stopped_is_not_ending(self, child: ChildProcess) -> None:
        os.kill(child.pid, signal.SIGSTOP)
        wait_for(lambda: b"T" in Path(f"/proc/{child.pid}/stat").read_bytes().rpartition(b")")[2])
        assert not child.is_ending()
        os.kill(child.pid, signal.SIGKILL)
        wait_for(child.is_ending)

    @pytest.mark.parametrize("name", ["x) Z 0 0 (y", ") R 1 1 1 4 4", "a b", "))"])
    def test_no_name_makes_it_look_dead(self, child: ChildProcess, name: str) -> None:
        """A program may give itself any name, and it stands among the numbers."""
        child.tell(Command("join", text=name))
        wait_for(lambda: Path(f"/proc/{child.pid}/comm").read_text() == f"{name}\n"[:16])
        assert not child.is_ending()
        child.process.kill()
        wait_for(child.is_ending)


def test_a_death_is_acted_on_at_once_and_others_start_when_the_memory_is_free() -> None:
    with Supervisor(make_config(), worker=WorkerProgram("slow_to_go")) as supervisor:
        overseer = supervisor.overseer

        def watch_until(condition: Callable[[], bool]) -> None:
            deadline = time.monotonic() + WAIT_S
            while not condition():
                supervisor.watch(0.1)
                overseer.check()
                assert time.monotonic() < deadline

        supervisor.start_engine()
        first = overseer.group[0]
        watch_until(lambda: first.started)
        os.kill(first.process.pid, signal.SIGKILL)
        watch_until(lambda: overseer.epoch == 2)
        assert overseer.leaving == [first] and not overseer.group, "its pipe is open"
        let_go(supervisor.directory, first.process.pid)
        watch_until(lambda: bool(overseer.group))
        assert overseer.epoch == 2 and not overseer.leaving
        watch_until(lambda: overseer.group[0].started)
        second = overseer.group[0].process.pid
        let_go(supervisor.directory, second)
        directory = supervisor.directory
    assert second != first.process.pid and not directory.exists()
