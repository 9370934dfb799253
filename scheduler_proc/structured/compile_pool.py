"""Threads that have grammars checked, so that the scheduler's loop never waits for one.

One thread tries every grammar for a short time; the other takes those that need longer, up to a limit. A flood of hard
grammars therefore does not delay ordinary ones. Within each queue, owners take turns.
"""

import contextlib
import itertools
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from quire.protocol.process.helper import start_large_stack_thread
from quire.protocol.request.grammar_checks import GrammarRefused
from quire.protocol.request.structured_outputs import StructuredOutputs
from quire.scheduler_proc.structured.backend import GrammarTooSlow
from quire.scheduler_proc.structured.cache import CompilingGrammar, Outcome, Source
from quire.scheduler_proc.structured.fair_queue import FairQueue
from quire.scheduler_proc.structured.guard import COMPILE_SECONDS, CRASHED

QUICK_SECONDS = 0.1
"""CPU time of the first try. A typical schema takes 2 to 6 ms."""


class Check(Protocol):
    """Compiles a grammar to check it; one per thread."""

    def start(self) -> None: ...

    def check(self, wanted: StructuredOutputs, cpu_seconds: float) -> int:
        """Return the memory of the compiled grammar. Raises GrammarRefused."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Job:
    source: Source
    wanted: StructuredOutputs
    owner: int


class _Lane:
    """One thread's queue, and the CPU time limit of its jobs."""

    def __init__(self, cpu_seconds: float) -> None:
        self.cpu_seconds = cpu_seconds
        self.queue: FairQueue[_Job] = FairQueue()
        self.thread: threading.Thread | None = None


class CompilePool:
    """Owns the compile threads, their jobs, and a pipe that is readable while there are outcomes.

    The threads are made at the first job, because a large vocabulary takes a second and some memory. A queue has no
    limit, because only a compilation shows whether a grammar is at fault: it has the jobs of the scheduler's requests.
    """

    def __init__(self, make_check: Callable[[], Check]) -> None:
        self._make_check = make_check
        self._numbers = itertools.count(1)
        self._quick = _Lane(QUICK_SECONDS)
        self._slow = _Lane(COMPILE_SECONDS)
        self._queued: dict[Source, _Job] = {}
        """Jobs with waiting requests. A job in a lane that is not here is skipped."""
        self._changed = threading.Condition()
        """Guards the lanes, ``_queued`` and ``_closing``."""
        self._closing = False
        self._outcomes: deque[tuple[Source, Outcome]] = deque()
        self._read_fd, self._write_fd = os.pipe()
        for fd in (self._read_fd, self._write_fd):
            os.set_blocking(fd, False)

    def fileno(self) -> int:
        return self._read_fd

    def submit(self, source: Source, wanted: StructuredOutputs, owner: int) -> None:
        """Queue a grammar."""
        self._put(self._quick, _Job(source, wanted, owner))

    def withdraw(self, source: Source) -> bool:
        """Cancel a job. Returns False when it is being compiled and will have an outcome."""
        with self._changed:
            return self._queued.pop(source, None) is not None

    def take(self) -> list[tuple[Source, Outcome]]:
        """Return the outcomes since the last call."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._read_fd, 4096)
        taken = []
        while self._outcomes:
            taken.append(self._outcomes.popleft())
        return taken

    def close(self) -> None:
        """Stop the threads, which takes at most one compilation."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for lane in (self._quick, self._slow):
            if lane.thread is not None:
                lane.thread.join()
        os.close(self._read_fd)
        os.close(self._write_fd)

    def _put(self, lane: _Lane, job: _Job) -> None:
        with self._changed:
            lane.queue.put(job.owner, job)
            self._queued[job.source] = job
            if lane.thread is None:
                lane.thread = start_large_stack_thread(lambda: self._work(lane), "grammars")
            self._changed.notify_all()

    def _next(self, lane: _Lane) -> _Job | None:
        """Return the next job, waiting for it; None once the pool is closing."""
        with self._changed:
            while True:
                if self._closing:
                    return None
                popped = lane.queue.pop()
                if popped is None:
                    self._changed.wait()
                # Withdrawn jobs are left in the fair queue and skipped here, because removing from its middle would
                # need a search.
                elif self._queued.pop(popped[1].source, None) is not None:
                    return popped[1]

    def _work(self, lane: _Lane) -> None:
        check = self._make_check()
        while (job := self._next(lane)) is not None:
            outcome = self._outcome(check, job.wanted, lane.cpu_seconds)
            # Compiled from the beginning again: a library cannot pause. The quick lane has lost at most QUICK_SECONDS,
            # which bounds the delay of all others.
            if isinstance(outcome, GrammarTooSlow) and lane is self._quick:
                self._put(self._slow, job)
                continue
            # Before the byte in the pipe: the reader empties the pipe first, so that no outcome can stay unread.
            self._outcomes.append((job.source, outcome))
            with contextlib.suppress(BlockingIOError):  # the pipe is full, so it is readable
                os.write(self._write_fd, b"x")
        check.close()

    def _outcome(self, check: Check, wanted: StructuredOutputs, cpu_seconds: float) -> Outcome:
        try:
            check.start()
            return CompilingGrammar(next(self._numbers), wanted, check.check(wanted, cpu_seconds))
        except GrammarRefused as refused:
            return refused
        except BaseException:  # of the check: only this grammar's requests fail
            return GrammarRefused(CRASHED)
