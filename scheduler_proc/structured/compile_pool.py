"""Threads in which grammars are compiled, so that the scheduler's loop never waits for one."""

import contextlib
import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from quire.protocol.structured_outputs import StructuredOutputs
from quire.scheduler_proc.structured.backend import GrammarBackend, GrammarRefused
from quire.scheduler_proc.structured.cache import Outcome, Source
from quire.scheduler_proc.structured.guard import on_a_large_stack

NUM_THREADS = 2

_CRASHED = "structured_outputs cannot be used: compiling them failed"

Job = tuple[Source, StructuredOutputs]


class Check(Protocol):
    """What a grammar must pass before it is compiled here; one for each thread."""

    def start(self) -> None: ...

    def check(self, wanted: StructuredOutputs) -> None: ...

    def close(self) -> None: ...


class CompilePool:
    """Owns the threads, their jobs, and a pipe that is readable while there are outcomes.

    Nothing is made before the first job: a large vocabulary takes a second and some memory.

    Attributes:
        ready_at: when a thread last was able to begin; None before the first time.
    """

    def __init__(
        self,
        make_backend: Callable[[], GrammarBackend],
        make_check: Callable[[], Check],
        clock: Callable[[], float],
    ) -> None:
        """``make_backend`` may raise GrammarRefused: then so is every grammar."""
        self._make_backend = make_backend
        self._make_check = make_check
        self._clock = clock
        self._made: GrammarBackend | GrammarRefused | None = None
        self._making = threading.Lock()
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._outcomes: deque[tuple[Source, Outcome]] = deque()
        self._num_unfinished = 0
        self._threads: list[threading.Thread] = []
        self.ready_at: float | None = None
        self._read_fd, self._write_fd = os.pipe()
        for fd in (self._read_fd, self._write_fd):
            os.set_blocking(fd, False)

    def fileno(self) -> int:
        return self._read_fd

    def submit(self, source: Source, wanted: StructuredOutputs) -> None:
        self._num_unfinished += 1
        if len(self._threads) < min(self._num_unfinished, NUM_THREADS):
            self._threads.append(on_a_large_stack(self._work, "grammars"))
        self._jobs.put((source, wanted))

    def take(self) -> list[tuple[Source, Outcome]]:
        """Outcomes since the last call."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._read_fd, 4096)
        taken = []
        while self._outcomes:
            taken.append(self._outcomes.popleft())
        self._num_unfinished -= len(taken)
        return taken

    def backend(self) -> GrammarBackend:
        """The backend; made now if no job has made it yet. Raises GrammarRefused."""
        with self._making:
            if self._made is None:
                try:
                    self._made = self._make_backend()
                except GrammarRefused as refused:
                    self._made = refused
        if isinstance(self._made, GrammarRefused):
            raise self._made
        return self._made

    def close(self) -> None:
        """Ends the threads, at most one compilation later."""
        while True:
            with contextlib.suppress(queue.Empty):
                self._jobs.get_nowait()
                continue
            break
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        os.close(self._read_fd)
        os.close(self._write_fd)

    def _work(self) -> None:
        check = self._make_check()
        while (job := self._jobs.get()) is not None:
            source, wanted = job
            self._outcomes.append((source, self._outcome(check, wanted)))
            with contextlib.suppress(BlockingIOError):  # full, so readable
                os.write(self._write_fd, b"x")
        check.close()

    def _outcome(self, check: Check, wanted: StructuredOutputs) -> Outcome:
        try:
            backend = self.backend()
            check.start()
            self.ready_at = self._clock()
            check.check(wanted)
            return backend.compile(wanted)
        except GrammarRefused as refused:
            return refused
        except BaseException:  # a library's panic too: what it does with a client's text costs that client's request
            return GrammarRefused(_CRASHED)
