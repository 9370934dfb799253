"""A helper process: a question that crashes or hangs it costs only that answer, and leaves nothing behind."""

import gc
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from engine_processes import engine_processes
from tiers import thinned
from waits import wait_for

from quire.protocol.process import helper as helper_module
from quire.protocol.process.helper import Helper, HelperDied

CPU_S, WALL_S = 0.2, 20.0


@pytest.fixture
def make_helper(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bytes], Helper]]:
    support = Path(sys.modules["engine_processes"].__file__ or "").parent
    monkeypatch.setenv("PYTHONPATH", str(support))
    made: list[Helper] = []

    def make(hello: bytes = b"hello") -> Helper:
        made.append(Helper("odd_helper", hello))
        return made[-1]

    yield make
    for helper in made:
        helper.close()
    assert not engine_processes("odd_helper")


@pytest.fixture
def helper(make_helper: Callable[..., Helper]) -> Helper:
    return make_helper()


def ask(helper: Helper, question: bytes, wall_seconds: float = WALL_S) -> bytes:
    return helper.ask(question, CPU_S, wall_seconds)


def test_questions_of_any_size_are_answered(helper: Helper) -> None:
    for size in (0, 1, 65_536, 3_000_000):
        text = os.urandom(size)
        assert ask(helper, b"echo " + text) == text
    assert ask(helper, b"hello") == b"xxxxx"


def test_start_returns_the_reason_of_a_helper_that_cannot_serve(make_helper: Callable[..., Helper]) -> None:
    assert make_helper(b"no").start() == b"will not"


ENDS = {
    **{f"signal {number.name}": (b"die %d" % number, number) for number in (signal.SIGKILL, signal.SIGSEGV)},
    **{f"signal {number.name}": (b"die %d" % number, number) for number in (signal.SIGABRT, signal.SIGTERM)},
    "a loop": (b"spin", signal.SIGPROF),
    "an exit": (b"exit 0", 0),
    "a failed exit": (b"exit 7", 0),
    "an exception": (b"nonsense", 0),
}


@pytest.mark.parametrize("case", thinned(ENDS, keep=3))
def test_death_costs_one_answer(case: str, helper: Helper) -> None:
    question, number = ENDS[case]
    for _ in range(2):
        before = ask(helper, b"pid")
        with pytest.raises(HelperDied) as died:
            ask(helper, question)
        assert died.value.signal == number
        assert died.value.was_killed == (number in (signal.SIGKILL, signal.SIGTERM))
        assert died.value.took_too_long == (number == signal.SIGPROF) and not died.value.was_starved
        assert ask(helper, b"pid") != before
        assert ask(helper, b"echo after") == b"after"


@pytest.mark.parametrize("question", [b"sleep", b"stop"])
def test_idle_helper_is_killed_at_the_wall_clock_limit(question: bytes, helper: Helper) -> None:
    ask(helper, b"pid")
    with pytest.raises(HelperDied) as died:
        ask(helper, question, wall_seconds=0.05)
    assert died.value.was_starved and not died.value.took_too_long and not engine_processes("odd_helper")
    assert ask(helper, b"echo after") == b"after"


def test_sending_times_out_when_the_helper_does_not_read(helper: Helper) -> None:
    """The question is larger than a pipe's buffer."""
    os.kill(int(ask(helper, b"pid")), signal.SIGSTOP)
    with pytest.raises(HelperDied):
        ask(helper, b"echo " + bytes(2**20), wall_seconds=0.05)
    assert ask(helper, b"echo after") == b"after"


def test_memory_is_limited_and_a_grown_child_is_replaced(helper: Helper) -> None:
    assert ask(helper, b"take 1000") == b"False"
    first = ask(helper, b"pid")
    assert ask(helper, b"take 10") == b"True" and ask(helper, b"pid") == first
    assert ask(helper, b"take 100") == b"True" and ask(helper, b"pid") != first


def test_prints_do_not_mix_with_answers(helper: Helper) -> None:
    assert ask(helper, b"print") == b"printed" and ask(helper, b"echo after") == b"after"


@pytest.mark.full
@pytest.mark.parametrize("generation", [0, 1], ids=["helper", "its child"])
def test_death_while_idle_costs_no_answer(generation: int, helper: Helper) -> None:
    for _ in range(3):
        ask(helper, b"pid")
        killed = engine_processes("odd_helper")
        killed[generation].kill()
        psutil.wait_procs(killed[1:], 10)
        wait_for(lambda killed=killed: generation or killed[0].status() == psutil.STATUS_ZOMBIE)
        assert ask(helper, b"echo x") == b"x"


@pytest.mark.full
def test_helper_ends_when_its_owner_is_deleted(make_helper: Callable[..., Helper]) -> None:
    helper = Helper("odd_helper", b"")
    ask(helper, b"pid")
    (parent, child) = engine_processes("odd_helper")
    del helper
    gc.collect()
    psutil.wait_procs([parent, child], 10)
    assert not parent.is_running() and not child.is_running()


def test_missing_file_descriptor_fails_one_question(helper: Helper) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        with pytest.raises(HelperDied) as died:
            ask(helper, b"echo x")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert died.value.signal == 0 and ask(helper, b"echo x") == b"x"


def test_closing_does_not_wait_for_a_stopped_child_that_holds_the_pipe() -> None:
    """A child that was stopped before it asked for its parent's death signal."""
    command = ["sh", "-c", "sleep 600 & echo $!; exec sleep 600"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    assert process.stdout is not None
    child = psutil.Process(int(process.stdout.readline()))
    try:
        helper_module._end(process)
        assert process.returncode == -signal.SIGKILL and child.is_running()
    finally:
        child.kill()
