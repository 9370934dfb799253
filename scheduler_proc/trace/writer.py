"""Writes the lines of a trace in a thread with a bounded buffer, so that the loop never waits for the disk."""

import threading
import time
from collections.abc import Callable

from quire.protocol.process.log import event_logger
from quire.scheduler_proc.trace.files import TraceFiles
from quire.scheduler_proc.trace.lines import Header, Line, Lost, encode_line
from quire.scheduler_proc.trace.recorder import PendingLine

log = event_logger("scheduler.trace")

MAX_BUFFERED_BYTES = 32 * 2**20
WRITE_INTERVAL_S = 0.25
"""Seconds between writes: a crash loses at most the lines of this time."""
FLUSH_LINES = 48
BATCH_BYTES = 2**20
CLOSE_DEADLINE_S = 5.0


class TraceWriter:
    """Buffers the lines of a trace and writes them in a thread of its own.

    One thread, the loop's, calls ``put``, ``add``, ``flush`` and ``close``. When the disk is too slow, lines are
    dropped and counted, also in the trace.

    Attributes:
        put: adds a pending line at almost no cost; the next ``flush`` makes and encodes it.
        lost: lines dropped since the start.
    """

    def __init__(
        self, files: TraceFiles, *, max_buffered: int = MAX_BUFFERED_BYTES, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``max_buffered``: most bytes of encoded lines that wait for the disk."""
        self.lost = 0
        self._files = files
        self._max_buffered = max_buffered
        self._clock = clock
        self._flushed = clock()
        self._pending: list[PendingLine] = []
        self.put = self._pending.append
        self._gap = 0
        self._lock = threading.Lock()
        self._buffer: list[bytes] = []
        self._buffered = 0
        self._failed = self._broken = False
        """Writing failed; encoding a line failed."""
        self._closed = False
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, header: Header) -> None:
        """Write the header and start the writing thread. Raises OSError."""
        self._files.begin(header)
        self._thread = threading.Thread(target=self._run, name="trace", daemon=True)
        self._thread.start()

    # ---- for the thread that makes lines

    def add(self, line: Line) -> None:
        self.put(lambda: line)

    def flush_some(self) -> None:
        """Flush if enough lines are pending: many lines at once cost half as much as one by one."""
        if len(self._pending) >= FLUSH_LINES or (self._pending and self._clock() > self._flushed + WRITE_INTERVAL_S):
            self.flush()

    def flush(self) -> None:
        """Make and encode the pending lines. Call when the loop has time."""
        self._flushed = self._clock()
        if not self._pending:
            return
        pending = self._pending.copy()
        self._pending.clear()
        room = self._max_buffered - self._buffered
        too_full = self._gap and room < self._max_buffered // 2  # avoids many short gaps with a slow disk
        data = b"" if self._failed or self._broken or too_full else self._encode(pending)
        if not data or len(data) > room:
            self._drop(len(pending))
            return
        self._gap = 0
        with self._lock:
            self._buffer.append(data)
            self._buffered += len(data)
        if self._buffered > BATCH_BYTES:
            self._wake.set()

    def _encode(self, pending: list[PendingLine]) -> bytes:
        """Return the encoded lines, or nothing after an error: a failing trace must not end the engine."""
        try:
            lines: list[Line] = [Lost(lines=self._gap)] if self._gap else []
            lines += [make() for make in pending]
            return b"\n".join([encode_line(line) for line in lines]) + b"\n"
        except Exception:
            self._broken = True
            log.exception("trace ended: cannot encode a line")
            return b""

    def close(self, last: Line) -> None:
        """Write the remaining lines and ``last``, waiting at most CLOSE_DEADLINE_S. Later calls do nothing."""
        if self._closed:
            return
        if self._thread is None:
            self._closed = True
            self._files.close()
            return
        self.add(last)
        self.flush()
        self._closed = True
        self._wake.set()
        self._thread.join(CLOSE_DEADLINE_S)
        if self._thread.is_alive():
            log.error("trace is incomplete: timed out writing its end")

    def cpu_ns(self) -> int:
        """Return the CPU time of the writing thread so far, while it is alive."""
        if self._thread is None or self._thread.ident is None or not self._thread.is_alive():
            return 0
        return time.clock_gettime_ns(time.pthread_getcpuclockid(self._thread.ident))

    def _drop(self, count: int) -> None:
        if not self.lost:
            log.error("trace lines dropped: the disk is too slow or failed")
        self._gap += count
        self.lost += count

    # ---- the thread

    def _run(self) -> None:
        while not self._closed:
            self._wake.wait(WRITE_INTERVAL_S)
            self._wake.clear()
            self.write_buffer()
        self.write_buffer()
        self._files.close()

    def write_buffer(self) -> None:
        """Write the buffer to disk in batches; after an error, drop it. Called by one thread only."""
        while self._buffer:
            batch, size = self._next_batch()
            try:
                if not self._failed:
                    self._files.write(batch)
            except OSError as error:
                self._failed = True
                log.error("trace ended: cannot write", reason=error.strerror)
            with self._lock:
                self._buffered -= size

    def _next_batch(self) -> tuple[bytes, int]:
        with self._lock:
            count = size = 0
            while count < len(self._buffer) and (not count or size + len(self._buffer[count]) <= BATCH_BYTES):
                size += len(self._buffer[count])
                count += 1
            parts, self._buffer = self._buffer[:count], self._buffer[count:]
        return b"".join(parts), size
