"""The pause that an operator has set: kept beyond the scheduler's death, and reported to all front ends."""

from pathlib import Path
from typing import Any

from quire.protocol.process.log import event_logger
from quire.protocol.wire.codec import Codec
from quire.protocol.wire.front_end_messages import PAUSE_MODES, Control
from quire.scheduler_proc.process.front_ends import FrontEnds
from quire.scheduler_proc.requests.events import Consumed
from quire.scheduler_proc.scheduler import Scheduler
from quire.scheduler_proc.trace.journal import Journal

log = event_logger("scheduler")

FILE = "pause"
NO_CLIENT = -1


class KeptPause:
    """Copies the Scheduler's pause to a file in the socket directory, so that a new scheduler begins with it."""

    def __init__(self, directory: Path | None, front_ends: FrontEnds) -> None:
        """Without ``directory``, the pause ends with this process."""
        self._file = None if directory is None else directory / FILE
        self._front_ends = front_ends
        self._current = self._read()
        front_ends.announce_pause(self._current)

    def restore(self, scheduler: Scheduler, journal: Journal) -> None:
        """Pause a new Scheduler if the previous one was paused, and record that as an event."""
        if not self._current:
            return
        event = Control(self._current)
        scheduler.consume(event, NO_CLIENT)
        journal.consumed(NO_CLIENT, Codec[Any](Consumed).encode(0, 0, event), event)
        log.warning("still paused", mode=PAUSE_MODES[self._current])

    def follow(self, scheduler: Scheduler) -> None:
        """Call after a Control: keep and announce the pause if it has changed."""
        if scheduler.pause == self._current:
            return
        self._current = scheduler.pause
        if mode := PAUSE_MODES[self._current]:
            log.warning("paused", mode=mode)
        else:
            log.warning("resumed")
        self._front_ends.announce_pause(self._current)
        if self._file is not None:
            self._write(self._file, self._current)

    def _read(self) -> str:
        try:
            kept = "" if self._file is None else self._file.read_text()
        except (OSError, UnicodeDecodeError):
            return ""
        return kept if kept in PAUSE_MODES else ""

    @staticmethod
    def _write(file: Path, pause: str) -> None:
        try:
            fresh = file.with_suffix(".new")
            fresh.write_text(pause)
            # Replaced in one step: a half-written file would be read as no pause, and a server that is meant to be
            # silent would begin to serve.
            fresh.replace(file)
        except OSError as error:
            log.error("the pause would not survive the scheduler", reason=error.strerror)
