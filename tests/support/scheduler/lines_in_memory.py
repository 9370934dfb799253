"""The lines of a trace without its file: from an event log in memory, and in the form of a reader."""

from collections.abc import Iterable, Iterator

from quire.replay.recorded.reader import AnyLine, TraceLine
from quire.scheduler_proc.trace.event_log import Record, TraceHeader
from quire.scheduler_proc.trace.lines import Line
from quire.scheduler_proc.trace.recorder import begins_at_keyframe, lines_of_log
from quire.scheduler_proc.trace.translate import make_header


def record_log(header: TraceHeader, records: Iterable[Record], *, prompts: bool = False) -> list[Line]:
    """Return the lines that a recorder would have made of the run, with the header."""
    log = list(records)
    first = make_header(header, prompts=prompts, complete=not begins_at_keyframe(log))
    return [first, *lines_of_log(header, log, prompts=prompts)]


def numbered(told: Iterable[AnyLine], file: str = "") -> Iterator[TraceLine]:
    """Return the lines as a reader gives them."""
    for number, line in enumerate(told, 1):
        yield TraceLine(line, number, file)
