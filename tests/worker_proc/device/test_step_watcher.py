"""The descriptor of a StepWatcher without an owner is closed, with its thread."""

import os
import select
import threading
from collections.abc import Callable

import pytest
from waits import wait_for

from quire.worker_proc.device.step_watcher import StepWatcher


@pytest.mark.parametrize("waits", [0, 3])
def test_descriptor_and_thread_end_with_their_owner(waits: int) -> None:
    watcher = StepWatcher()
    fd, held = watcher.fileno(), threading.Lock()
    opened = os.fstat(fd)
    held.acquire()
    wait: Callable[[], None] = held.acquire  # type: ignore[assignment]
    for _ in range(waits):
        watcher.watch(wait)
    assert not watcher.fired()
    del watcher  # while its thread waits
    for _ in range(waits):
        held.release()
        wait_for(held.locked)

    def is_closed() -> bool:
        try:
            return os.fstat(fd) != opened
        except OSError:
            return True

    wait_for(is_closed)


def test_descriptor_is_readable_once_the_wait_has_returned() -> None:
    watcher = StepWatcher()
    watcher.watch(lambda: None)
    poller = select.poll()
    poller.register(watcher.fileno(), select.POLLIN)
    assert poller.poll(60_000) and watcher.fired() and not watcher.fired()
