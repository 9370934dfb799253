"""Work beside the steps, as the loop sees it."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from queue import SimpleQueue
from threading import Lock, Thread, get_native_id
from typing import Any, Generic, Protocol, TypeVar

import torch

from quire.protocol.wire.link_messages import Message

Answer = TypeVar("Answer")
Job = TypeVar("Job")
CLOSE_SECONDS = 5.0
"""Wait for the job that is running when the worker ends."""


class Answers(Generic[Answer]):
    """Owns the answers of threads that the loop has not taken yet. ``wake``: called in a thread after each."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._lock = Lock()
        self._held: list[Answer] = []

    def add(self, answer: Answer) -> None:
        with self._lock:
            self._held.append(answer)
        self._wake()

    def take(self) -> list[Answer]:
        """Return the answers since the last call."""
        # Without the lock, because every turn of the loop asks. An answer that is missed here has a wake-up of its own.
        if not self._held:
            return []
        with self._lock:
            answers, self._held = self._held, []
        return answers

    def clear(self) -> None:
        self._held = []


class SideThread(Generic[Job, Answer]):
    """Does jobs one after the other in a thread, which starts with the first one.

    Jobs of earlier worker epochs have no answers.
    """

    def __init__(
        self, name: str, work: Callable[[Job], Answer], wake: Callable[[], None], *, niceness: int = 0
    ) -> None:
        """
        Args:
            work: does a job in the thread. It must not raise, because requests wait for the answer.
            wake: called in the thread whenever ``take_answers`` has more to return.
            niceness: of the thread, and of those that torch starts in it.
        """
        self._name, self._work, self._niceness = name, work, niceness
        self._queue: SimpleQueue[tuple[int, Job] | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._epoch = 0
        self._answers = Answers[tuple[int, Answer]](wake)

    def submit(self, job: Job) -> None:
        if self._thread is None:
            self._thread = Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._queue.put((self._epoch, job))

    def take_answers(self) -> list[Answer]:
        """Return the answers since the last call."""
        return [answer for epoch, answer in self._answers.take() if epoch == self._epoch]

    def begin_worker_epoch(self) -> None:
        """Drop what the previous scheduler has sent."""
        self._epoch += 1

    def close(self) -> None:
        self.begin_worker_epoch()
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        if self._niceness:
            with suppress(OSError, AttributeError):  # only on Linux is it one thread's; torch's threads inherit it
                os.setpriority(os.PRIO_PROCESS, get_native_id(), self._niceness)
        while (given := self._queue.get()) is not None:
            epoch, job = given
            if epoch != self._epoch:
                continue
            with torch.inference_mode():
                self._answers.add((epoch, self._work(job)))


class SideWork(Protocol):
    """Work whose messages may arrive between any two messages of steps, and which is done in threads of its own."""

    @property
    def handlers(self) -> Mapping[type, Callable[[Any], None]]:
        """What the loop calls with a message of each type; it raises StepRefused for one that cannot be handled."""
        ...

    def take_answers(self) -> Sequence[Message]:
        """Return the answers that are ready since the last call."""
        ...

    def begin_worker_epoch(self) -> None:
        """Drop what the previous scheduler has sent."""
        ...

    def close(self) -> None: ...
