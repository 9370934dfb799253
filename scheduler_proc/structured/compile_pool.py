"""Threads in which grammars are compiled, so that the scheduler's loop never waits for one."""

import contextlib
import os
import queue
import threading
from collections import deque
from collections.abc import Callable

from quire.protocol.structured_outputs import StructuredOutputs
from quire.scheduler_proc.structured.backend import CompiledGrammar, GrammarBackend, GrammarRefused
from quire.scheduler_proc.structured.cache import Outcome, Source

NUM_THREADS = 2
STACK_BYTES = 256 * 2**20
"""Address space, of which next to nothing is touched: a library's recursion is as deep as chains of rules are long."""

Job = tuple[Source, StructuredOutputs]


class CompilePool:
    """Owns the threads, their jobs, and a pipe that is readable while there are outcomes.

    The backend is made by the first job's thread: a large vocabulary takes a second.
    """

    def __init__(self, make_backend: Callable[[], GrammarBackend]) -> None:
        """``make_backend`` may raise GrammarRefused: then so is every grammar."""
        self._make_backend = make_backend
        self._made: GrammarBackend | GrammarRefused | None = None
        self._making = threading.Lock()
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._outcomes: deque[tuple[Source, Outcome]] = deque()
        self._threads: list[threading.Thread] = []
        self._read_fd, self._write_fd = os.pipe()
        for fd in (self._read_fd, self._write_fd):
            os.set_blocking(fd, False)

    def fileno(self) -> int:
        return self._read_fd

    def submit(self, source: Source, wanted: StructuredOutputs) -> None:
        if len(self._threads) < NUM_THREADS:
            self._start_thread()
        self._jobs.put((source, wanted))

    def take(self) -> list[tuple[Source, Outcome]]:
        """Outcomes since the last call."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._read_fd, 4096)
        taken = []
        while self._outcomes:
            taken.append(self._outcomes.popleft())
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
        """Ends the threads that are idle; one that compiles is not waited for, and ends with the process."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(0.2)
        if not any(thread.is_alive() for thread in self._threads):
            os.close(self._read_fd)
            os.close(self._write_fd)
        self._threads.clear()

    def _start_thread(self) -> None:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread = threading.Thread(target=self._work, name="grammars", daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
        self._threads.append(thread)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            source, wanted = job
            self._outcomes.append((source, self._outcome(wanted)))
            with contextlib.suppress(BlockingIOError):  # full, so readable
                os.write(self._write_fd, b"x")

    def _outcome(self, wanted: StructuredOutputs) -> CompiledGrammar | GrammarRefused:
        try:
            return self.backend().compile(wanted)
        except GrammarRefused as refused:
            return refused
        except BaseException:  # a library's panic too: what it does with a client's text costs that client's request
            return GrammarRefused("the grammar cannot be used: the library failed on it")
