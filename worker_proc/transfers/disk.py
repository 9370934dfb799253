"""Pages on disk: the file, and the threads that read and write it beside the steps."""

import fcntl
import mmap
import os
import stat
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import Condition, Lock, Thread

import numpy as np

from quire.kernels.cpu.native.library import Native
from quire.kernels.cpu.pages.page_file import FILE_ERROR, SECTOR, FileMove, FileScan, FileWork, PageFile
from quire.kernels.cpu.pages.page_moves import OUTCOMES, Bytes, PageMoves
from quire.protocol.process.log import event_logger
from quire.protocol.wire.transfer_messages import DiskContents, DiskPages, MoveKind
from quire.worker_proc.transfers.host import HostTier
from quire.worker_proc.transfers.parts import CopyPart, one_line

log = event_logger("worker")

THREADS = 4
"""Pages that are read at the same time."""
SCAN_THREADS = 8
"""Headers that are read at the same time, when nothing else is."""
WRITERS = 2
"""Pages that are written at the same time, and only while no load waits for the disk: one is made while another is
written."""
HUGE_PAGE = 2**21
CLOSE_S = 1.0
"""Seconds for which a new worker epoch waits for pages that are being read or written."""


class OpenFailed(Exception):
    """The file cannot be used; the message is one line."""


def open_pages(path: str, size: int) -> tuple[int, bool]:
    """Return a descriptor, and whether its reads and writes are direct, past the operating system's cache.

    Raises:
        OpenFailed: the file cannot be opened or read, is not a file, or is too short.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise OpenFailed(f"cannot open {path}: {error.strerror}") from None
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OpenFailed(f"{path} is not a file")
        if found.st_size < size:
            raise OpenFailed(f"{path} has {found.st_size} bytes instead of {size}")
        return fd, _make_direct(fd)
    except OSError as error:
        os.close(fd)
        raise OpenFailed(f"cannot read {path}: {error.strerror}") from None
    except OpenFailed:
        os.close(fd)
        raise


def _make_direct(fd: int) -> bool:
    """Return whether the file system can read sectors directly; otherwise turn reading ahead off."""
    flags, sector = fcntl.fcntl(fd, fcntl.F_GETFL), _aligned(SECTOR)
    try:
        # Direct, because pages of the cache would take the memory that the host tier is meant to have, and would keep
        # contents twice.
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        os.preadv(fd, [sector.data], 0)
    except OSError:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
        os.preadv(fd, [sector.data], 0)
        # Without direct reads the system would read ahead, into pages that are mostly not wanted.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        return False
    return True


def _aligned(size: int) -> Bytes:
    """Return memory that starts at a sector, in huge pages: the system handles each page of memory of a request."""
    memory = mmap.mmap(-1, -(-size // HUGE_PAGE) * HUGE_PAGE)
    with suppress(OSError):  # a system without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8, size)


def _reason_of(error: Exception) -> str:
    return str(error) if isinstance(error, OpenFailed) else one_line(error)


@dataclass(slots=True, eq=False)
class _Job:
    """A part, and how many threads are at it since ``began``."""

    part: CopyPart
    work: FileWork
    running: int = 0
    began: float = 0.0


class DiskFile:
    """Owns a rank's file of pages, the queues of its loads and writes, and the threads that read and write.

    Threads share a load. A page is written only while no load waits or runs, so that at most
    WRITERS are written beside its beginning. Only these threads access the file: a disk may never answer.
    """

    def __init__(self, message: DiskPages, native: Native | None, copies: PageMoves, host: HostTier | str) -> None:
        """
        Args:
            host: the source of demotions, or why there is none.
        """
        self._message, self._native, self._copies, self._host = message, native, copies, host
        self._opening = Lock()
        self._fd = -1
        self._file: PageFile | None = None
        """Set by the first thread that needs it."""
        self._stop = np.zeros(1, np.int64)
        """Ends the writes that are running: a load waits."""
        self._scan = FileScan(message.num_pages, message.key_bytes, message.forgotten)
        # The condition guards everything below.
        self._changed = Condition()
        self._scanning = 0
        self._scan_error = ""
        self._loads: deque[_Job] = deque()
        self._writes: deque[_Job] = deque()
        self._writing = 0
        self._started = False
        self._closing = False
        self._threads: list[Thread] = []

    def read_contents(self, found: Callable[[DiskContents], None]) -> None:
        """Call ``found`` with the contents in a thread, when all headers are read."""
        self._scanning = SCAN_THREADS
        self._start(SCAN_THREADS, partial(self._run_scan, found))

    def submit(self, part: CopyPart) -> None:
        if part.kind is MoveKind.DEMOTE and isinstance(self._host, str):
            part.fail(range(len(part.indices)), self._host)
            part.ended(part)
            return
        job = _Job(part, FileWork(FileMove(part.kind), part.moves))
        with self._changed:
            if self._closing:
                part.drop()
                return
            if not self._started:
                self._started = True
                self._start(THREADS, self._run)
            is_load = part.kind is MoveKind.LOAD
            (self._loads if is_load else self._writes).append(job)
            self._stop[0] |= is_load
            self._changed.notify(len(part.indices))

    def close(self) -> None:
        """Drop what has not ended, wait for the pages that are being read and written, and close the file.

        If the disk does not answer, its threads and the file are left behind; they change nothing any more.
        """
        with self._changed:
            self._closing = True
            for claims in (self._scan.claims, *(job.work.claims for job in (*self._loads, *self._writes))):
                claims.cancel()
            self._changed.notify_all()
        deadline = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            # Threads inside a system call cannot be ended. The file stays open for them, and they find their work
            # cancelled when they return.
            log.error("the disk does not answer; it is left behind", path=self._message.path, seconds=CLOSE_S)
            if self._file is not None:
                self._file.abandon()
        elif self._fd >= 0:
            os.close(self._fd)
        for job in (*self._loads, *self._writes):
            job.part.drop()

    def _start(self, count: int, run: Callable[[], None]) -> None:
        threads = [Thread(target=run, name="disk", daemon=True) for _ in range(count)]
        self._threads += threads
        for thread in threads:
            thread.start()

    def _opened(self) -> PageFile:
        """Return the file. Raises OpenFailed if it cannot be used."""
        message = self._message
        with self._opening:
            if self._file is None:
                self._fd, direct = open_pages(message.path, message.num_pages * message.page_bytes)
                log.info("opened the pages on disk", path=message.path, pages=message.num_pages, direct=direct)
                self._file = PageFile(self._native, self._copies, self._fd, message.page_bytes)
            return self._file

    # ---- the threads that move pages

    def _run(self) -> None:
        staging = _aligned(self._message.page_bytes)
        while (job := self._next()) is not None:
            try:
                self._move(job, staging)
            except Exception as error:  # an answer in any case: the scheduler keeps the blocks until it has one
                job.work.claims.cancel()
                job.part.fail(range(len(job.part.indices)), _reason_of(error))
            self._moved(job)

    def _next(self) -> _Job | None:
        """Wait for a job, and return it; None when closing."""
        with self._changed:
            while not self._closing:
                job = self._ready()
                if job is not None:
                    if job.part.kind is not MoveKind.LOAD:
                        self._writing += 1
                        self._stop[0] = 0
                    job.began = job.began if job.running else time.perf_counter()
                    job.running += 1
                    return job
                self._changed.wait()
            return None

    def _ready(self) -> _Job | None:
        """Return the first job that needs a thread: a load, or a write if there is no load."""
        jobs = self._loads
        # Fewer writers than readers: writes fill the queue of a disk, and a load that arrives behind them would wait
        # for all of them.
        if not jobs and self._writing < WRITERS:
            jobs = self._writes
        return next((job for job in jobs if job.work.claims.left), None)

    def _move(self, job: _Job, staging: Bytes) -> None:
        file, host, work = self._opened(), self._host, job.work
        if work.kind is FileMove.LOAD:
            file.move(work, staging)
        elif work.kind is FileMove.STORE:
            file.move(work, staging, stop=self._stop)
        elif isinstance(host, HostTier):
            file.move(work, staging, host.memory.backed_pages(), stop=self._stop)

    def _moved(self, job: _Job) -> None:
        """Count a thread that has left a job, and report the end of the job's part."""
        part, is_load = job.part, job.part.kind is MoveKind.LOAD
        with self._changed:
            self._writing -= not is_load
            job.running -= 1
            if not job.running:
                part.seconds += time.perf_counter() - job.began
            if job.running or job.work.claims.left or self._closing:
                return
            (self._loads if is_load else self._writes).remove(job)
            if is_load and not self._loads:
                self._changed.notify(WRITERS)
        for position in np.flatnonzero(job.work.outcomes).tolist():
            outcome, error = job.work.outcomes[position], int(job.work.errors[position])
            failure = f"{os.strerror(error)} (errno {error}) in {self._message.path}"
            part.fail_page(position, failure if outcome == FILE_ERROR else OUTCOMES[outcome])
        part.ended(part)

    # ---- the threads that read headers

    def _run_scan(self, found: Callable[[DiskContents], None]) -> None:
        error = ""
        try:
            self._opened().scan(self._scan, _aligned(SECTOR))
        except Exception as raised:  # the scheduler waits for an answer
            error = f"cannot read the headers: {_reason_of(raised)}"
        with self._changed:
            self._scan_error = self._scan_error or error
            self._scanning -= 1
            if self._scanning or self._closing:
                return
        scan = self._scan
        pages = np.flatnonzero(scan.groups >= 0)
        groups, ids = scan.groups[pages], (self._message.first_page + pages).astype(np.int32)
        keys = scan.keys[pages].tobytes()
        contents = (ids, scan.generations[pages], keys, groups if groups.any() else None)
        for part in DiskContents(*contents, self._scan_error).parts():
            found(part)
