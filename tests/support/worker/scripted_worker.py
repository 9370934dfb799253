"""A worker's loop whose scheduler is a list of messages."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fake_child import no_calls
from memory_channel import memory_pair

from quire.protocol.wire.adapter_messages import AdapterLoaded
from quire.protocol.wire.channel import Channel
from quire.protocol.wire.transfer_messages import BlocksMoved, DiskContents
from quire.protocol.wire.worker_messages import SchedulerToWorker, Shutdown, WorkerToScheduler
from quire.worker_proc.loop import WorkerLoop

ANSWERS = (AdapterLoaded, BlocksMoved, DiskContents)


class Script(Channel):
    """The worker's end of a channel: receives ``messages`` one by one, then Shutdown; keeps what is sent.

    A number instead of a message waits for this many answers to messages about transfers or adapters.
    """

    def __init__(self, *messages: Any) -> None:
        self.sent: list[Any] = []
        self._messages = list(messages)
        self._far, self._near = memory_pair(WorkerToScheduler, SchedulerToWorker)

    def send(self, message: Any) -> Any:
        self.sent.append(message)
        return []

    def receive(self, timeout: float | None = 0.0) -> Any:
        if timeout == 0.0:
            return None
        if self._messages and isinstance(self._messages[0], int):
            if sum(isinstance(message, ANSWERS) for message in self.sent) < self._messages[0]:
                return None
            self._messages.pop(0)
        self._far.send(self._messages.pop(0) if self._messages else Shutdown())
        return self._near.receive()

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind)]


@contextmanager
def worker_loop() -> Iterator[WorkerLoop]:
    with no_calls() as calls:
        loop = WorkerLoop(calls, 1, progress=False)
        yield loop
        loop.close()
