"""The clock for response times: it counts work and sleep of the server, and not waiting for a busy processor."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import abuse
import pytest
from abuse import AbusedServer
from waits import Watch

pytestmark = pytest.mark.full

SLEEPS = "import time; print('begun', flush=True); time.sleep(60)"
SPINS = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
print('begun', flush=True)
while True: pass
"""


@contextmanager
def running(*code: str) -> Iterator[list[int]]:
    """Start a process per code; yield their ids when they run."""
    processes = [subprocess.Popen([sys.executable, "-S", "-c", text], stdout=subprocess.PIPE) for text in code]
    try:
        for process in processes:
            assert process.stdout is not None and process.stdout.readline() == b"begun\n"
        yield [process.pid for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_sleep_counts() -> None:
    with running(SLEEPS) as (pid,), Watch(pid) as watch:
        time.sleep(0.3)
    assert 0.2 < watch.own_seconds <= watch.wall_seconds


@pytest.mark.parametrize("of_parent", [False, True])
def test_waiting_for_a_processor_does_not_count(of_parent: bool) -> None:
    """Two processes share one processor: each runs at most half of the time, and the other half does not count."""
    with running(SPINS, SPINS) as (pid, _), Watch(os.getpid() if of_parent else pid) as watch:
        time.sleep(0.6)
    assert watch.own_seconds < 0.8 * watch.wall_seconds


def test_late_response_fails_the_test(server: AbusedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(abuse, "SLOWEST_S", 0.0)
    with pytest.raises(AssertionError, match="of its own"):
        server.complete()
