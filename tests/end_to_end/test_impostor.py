"""A process of the same user takes the scheduler's place at a socket: service returns when it leaves."""

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
import zmq
from engine_processes import engine_processes
from served import Served
from waits import wait_for

pytestmark = pytest.mark.full


@contextmanager
def impostor(kind: int, address: Path) -> Iterator["zmq.Socket[bytes]"]:
    """Bind a socket over that of the scheduler; it receives everything and answers nothing."""
    with zmq.Context() as context, context.socket(kind) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(f"ipc://{address}")
        yield socket
        while socket.poll(0):
            socket.recv_multipart()


def folder_of(server: Served) -> Path:
    (scheduler,) = [p for p in psutil.Process(server.process.pid).children() if "quire.scheduler_proc" in p.cmdline()]
    words = scheduler.cmdline()
    return Path(words[words.index("--directory") + 1])


def answers(server: Served) -> bool:
    """Whether the server generates an answer now."""
    body = {"prompt": "x", "max_tokens": 3, "ignore_eos": True}
    try:
        return httpx.post(f"{server.url}/v1/completions", json=body, timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture
def server() -> Iterator[Served]:
    server = Served("--simulate", "constant:1")
    yield server
    assert server.stop(signal.SIGTERM) == 0


def test_a_new_front_end_finds_the_scheduler_again(server: Served) -> None:
    file = folder_of(server) / "frontend-1.sock"
    with impostor(zmq.ROUTER, file) as socket:
        # A helper that it starts has its command line for a moment.
        min(engine_processes("quire.frontend.http"), key=lambda process: process.create_time()).kill()
        # Either it connects to the impostor, or it starts so late that the scheduler has its file back.
        wait_for(lambda: bool(socket.poll(0)) or answers(server))
    wait_for(lambda: answers(server))


def test_new_workers_find_the_scheduler_again(server: Served) -> None:
    folder = folder_of(server)
    for worker in engine_processes("quire.replay.simulate.worker_process"):
        if worker.is_running():
            worker.kill()

    def newest() -> Path | None:
        files = [f for f in folder.iterdir() if re.fullmatch(r"worker-([2-9])-0\.sock", f.name)]
        return max(files, default=None)

    wait_for(lambda: newest() is not None)
    file = newest()
    assert file is not None
    with impostor(zmq.PAIR, file) as socket:
        socket.poll(500)
    os.sched_yield()
    wait_for(lambda: answers(server))
