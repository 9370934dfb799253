"""The pipes of a child process, without a supervisor at the other end."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from quire.protocol.process.child import Child
from quire.protocol.wire.worker_handshake import WorkerCommands


@contextmanager
def lone_child() -> Iterator[Child]:
    """Its reports are not read; its commands are those that the test passes to ``put``."""
    fd = os.open(os.devnull, os.O_WRONLY)
    child = Child(fd)
    try:
        yield child
    finally:
        child.close()
        os.close(fd)


@contextmanager
def no_calls() -> Iterator[WorkerCommands]:
    """Return commands without any that moves the worker to another group."""
    with lone_child() as child:
        yield WorkerCommands(child)
