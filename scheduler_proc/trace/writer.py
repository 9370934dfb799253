"""Brings a trace's lines to its files without those who make them waiting: a thread, and a buffer that is bounded."""

import threading
import time
from collections.abc import Callable

from quire.protocol.process.log import event_logger
from quire.scheduler_proc.trace.files import TraceFiles
from quire.scheduler_proc.trace.lines import Header, Line, Lost, encode_line
from quire.scheduler_proc.trace.recorder import LineToBe

log = event_logger("scheduler.trace")

MAX_BUFFERED_BYTES = 32 * 2**20
WRITE_INTERVAL_S = 0.25
"""How much a crash may take away."""
FLUSH_LINES = 48
BATCH_BYTES = 2**20
CLOSE_DEADLINE_S = 5.0


class TraceWriter:
    """``put``, ``add``, ``flush`` and ``close`` are for the thread that makes lines; its own waits for the disk.

    A disk that is too slow costs lines, not memory and not time: they are counted, and said in the trace.

    Attributes:
        put: takes a line, which is made and encoded by the next ``flush``: costs nearly nothing.
        lost: lines that were not written since the start.
    """

    def __init__(
        self, files: TraceFiles, *, max_buffered: int = MAX_BUFFERED_BYTES, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``max_buffered``: bytes of lines that wait for the disk at most."""
        self.lost = 0
        self._files = files
        self._max_buffered = max_buffered
        self._clock = clock
        self._flushed = clock()
        self._pending: list[LineToBe] = []
        self.put = self._pending.append
        self._gap = 0
        self._lock = threading.Lock()
        self._buffer: list[bytes] = []
        self._buffered = 0
        self._failed = self._broken = False
        """The disk failed; a line could not be made."""
        self._closed = False
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, header: Header) -> None:
        """The first line is written, and from now on the others are. Raises OSError."""
        self._files.begin(header)
        self._thread = threading.Thread(target=self._run, name="trace", daemon=True)
        self._thread.start()

    # ---- for the thread that makes lines

    def add(self, line: Line) -> None:
        self.put((_itself, (line,)))

    def flush_some(self) -> None:
        """``flush``, if it is worth it. Many lines at once cost half of what they cost one by one."""
        if len(self._pending) >= FLUSH_LINES or (self._pending and self._clock() > self._flushed + WRITE_INTERVAL_S):
            self.flush()

    def flush(self) -> None:
        """Make and encode what was put. To be called when there is time for it."""
        self._flushed = self._clock()
        if not self._pending:
            return
        pending = self._pending.copy()
        self._pending.clear()
        room = self._max_buffered - self._buffered
        too_full = self._gap and room < self._max_buffered // 2  # else a slow disk would have gap after gap
        data = b"" if self._failed or self._broken or too_full else self._encoded(pending)
        if not data or len(data) > room:
            self._lose(len(pending))
            return
        self._gap = 0
        with self._lock:
            self._buffer.append(data)
            self._buffered += len(data)
        if self._buffered > BATCH_BYTES:
            self._wake.set()

    def _encoded(self, pending: list[LineToBe]) -> bytes:
        """Whole lines; nothing, from now on, where one cannot be made: a trace does not end the engine it is of."""
        try:
            told: list[Line] = [Lost(lines=self._gap)] if self._gap else []
            told += [make(*parts) for make, parts in pending]
            return b"\n".join([encode_line(line) for line in told]) + b"\n"
        except Exception:
            self._broken = True
            log.exception("trace ended: cannot encode a line")
            return b""

    def close(self, last: Line) -> None:
        """Write what is left, and ``last``; only the first call counts. Waits for the disk, but not for ever."""
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
        """CPU time of the writing thread so far, while it lives."""
        if self._thread is None or self._thread.ident is None or not self._thread.is_alive():
            return 0
        return time.clock_gettime_ns(time.pthread_getcpuclockid(self._thread.ident))

    def _lose(self, count: int) -> None:
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
        """Bring what is buffered to the disk, in batches; after an error, nothing any more. For one thread only."""
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


def _itself(line: Line) -> Line:
    return line
