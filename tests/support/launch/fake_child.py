"""A child process' pipes, without a supervisor at the other end."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from quire.protocol.process.child import Child
from quire.protocol.wire.worker_handshake import WorkerCommands


@contextmanager
def lone_child() -> Iterator[Child]:
    """What it reports is heard by nobody; it is told what the test ``put``s."""
    fd = os.open(os.devnull, os.O_WRONLY)
    child = Child(fd)
    try:
        yield child
    finally:
        child.close()
        os.close(fd)


@contextmanager
def no_calls() -> Iterator[WorkerCommands]:
    """Nobody calls the worker away."""
    with lone_child() as child:
        yield WorkerCommands(child)
