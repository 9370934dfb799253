"""Reads trace files line by line, compressed or not. A bad line is an error, or is skipped and counted if lenient."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from quire.protocol.errors import ConfigError
from quire.replay.formats.options import LoadOptions
from quire.replay.recorded.decompress import DECOMPRESSION_ERRORS, open_decompressed
from quire.replay.workload.workload import Call, Workload

MAX_TOKENS = 2**31 - 1
MAX_LINE_BYTES = 2**28
_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".log", ".txt")
PromptLength = Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
AnswerLength = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
T = TypeVar("T")


class Faults:
    """Bad lines of one load: the first one raises, or, if lenient, all are skipped and counted.

    Attributes:
        count: bad lines.
        empty: prompts and answers without a token.
        num_earlier: lines out of order.
    """

    def __init__(self, lenient: bool) -> None:
        self.lenient = lenient
        self.count = self.num_earlier = 0
        self.empty: Counter[str] = Counter()
        self._first = ""

    def add(self, path: Path, line: int, what: str) -> None:
        """Count a bad line. Raises ConfigError unless lenient."""
        text = f"{path}:{line}: {what}"
        if not self.lenient:
            raise ConfigError(text)
        self.count += 1
        self._first = self._first or text

    def add_earlier(self, path: Path, line: int, what: str) -> None:
        """Count a line that is earlier than the previous one; it is used. Raises ConfigError unless lenient."""
        self.num_earlier += 1
        if not self.lenient:
            self.add(path, line, what)

    def at_least_one_token(self, num_tokens: int, what: str = "answer") -> int:
        """Return at least one token and count empty prompts and answers, which cannot be run."""
        self.empty[what] += not num_tokens
        return num_tokens or 1

    def notes(self) -> list[str]:
        notes = []
        if self.count:
            lines = "1 bad line was" if self.count == 1 else f"{self.count} bad lines were"
            notes.append(f"{lines} skipped; the first: {self._first}")
        for what, count in self.empty.items():
            if count:
                notes.append(f"{count} empty {what}{'s are' if count > 1 else ' is'} counted as one token")
        if self.num_earlier:
            lines = f"{self.num_earlier} line{'s are' if self.num_earlier > 1 else ' is'}"
            notes.append(f"{lines} earlier than the previous one: all were sorted by time")
        return notes


def read_lines(path: Path, faults: Faults) -> Iterator[tuple[int, bytes]]:
    """Yield the number, from 1, and the bytes of each line that is not blank.

    A file whose first line is a single brace is one JSON object over several lines and is yielded as one line.

    Raises:
        ConfigError: see ``_physical_lines``.
    """
    lines = _physical_lines(path, faults)
    first = next(lines, None)
    if first is None:
        return
    if first[1].strip() == b"{":
        yield first[0], b"\n".join([first[1], *(line for _, line in lines)])
        return
    yield first
    yield from lines


def _physical_lines(path: Path, faults: Faults) -> Iterator[tuple[int, bytes]]:
    """Yield the number, from 1, and the bytes of each line that is not blank.

    Raises:
        ConfigError: the file cannot be opened or decompressed (lenient: the lines before the damage are used), or a
            line is longer than ``MAX_LINE_BYTES``.
    """
    number = 1
    try:
        with open_decompressed(path) as file:
            while line := file.readline(MAX_LINE_BYTES + 1):
                if len(line) > MAX_LINE_BYTES:
                    raise ConfigError(f"{path}:{number}: the line is longer than {MAX_LINE_BYTES} bytes")
                if not line.isspace():
                    yield number, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                number += 1
    except DECOMPRESSION_ERRORS as error:
        faults.add(path, number, f"the compressed file is cut short or damaged here ({error})")


def records(path: Path, type_: type[T], faults: Faults) -> Iterator[tuple[int, T]]:
    """Yield the line number and value of each valid line of a JSON lines file; others are added to ``faults``."""
    decoder = msgspec.json.Decoder(type_)
    for number, line in read_lines(path, faults):
        try:
            value = decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            faults.add(path, number, _readable(str(error)))
        else:
            yield number, value


def _readable(error: str) -> str:
    return error.replace(" - at `$.", " - in `").replace("`$`", "the line")


def files_of(path: Path) -> list[Path]:
    """Return the file itself, or the files of a folder that may be traces by their names, sorted by name.

    Raises:
        ConfigError: path not found, or no such file in the folder.
    """
    if path.is_dir():
        files = sorted(entry for entry in path.iterdir() if entry.is_file() and _may_be_trace(entry.name))
        if not files:
            folders = ", ".join(sorted(entry.name for entry in path.iterdir() if entry.is_dir()))
            hint = f"; name one of its folders: {folders}" if folders else ""
            raise ConfigError(f"{path}: the folder contains no trace file ({', '.join(_SUFFIXES)}){hint}")
        return files
    if not path.is_file():
        raise ConfigError(f"{path}: file or folder not found")
    return [path]


def _may_be_trace(name: str) -> bool:
    for end in (".gz", ".xz", ".zst"):
        name = name.removesuffix(end)
    return name.endswith(_SUFFIXES) and not name.startswith(".")


def shift_times(calls: list[Call], rate: float) -> None:
    """Divide the start times of conversations and independent calls by ``rate``; gaps inside conversations stay."""
    if rate == 1:
        return
    starts: dict[str, float] = {}
    for call in calls:
        start = starts.setdefault(call.conversation, call.arrival) if call.conversation else call.arrival
        call.arrival = start / rate + (call.arrival - start)


def finish(workload: Workload, options: LoadOptions, faults: Faults) -> Workload:
    """Apply the window, the limit and the rate; sort the calls stably by arrival and renumber them.

    Before that, ``call.number`` and ``call.after`` may be any numbers that are unique among the calls.

    Raises:
        ConfigError: no call is left.
    """
    total = len(workload.calls)
    calls = sorted(workload.calls, key=lambda call: call.arrival)
    end = float("inf") if options.duration is None else options.start + options.duration
    if options.start > 0 or end < float("inf"):
        calls = [call for call in calls if options.start <= call.arrival < end]
        for call in calls:
            call.arrival -= options.start
    shift_times(calls, options.rate)
    calls.sort(key=lambda call: call.arrival)
    del calls[options.limit or len(calls) :]
    workload.notes += faults.notes()
    if not calls:
        why = f"none of its {total} requests is in the window" if total else "contains no request"
        raise ConfigError("; ".join([f"{workload.source}: {why}", *workload.notes]))
    if len(calls) < total:
        workload.notes.append(f"{len(calls)} of {total} requests are used")
    numbers = {call.number: new for new, call in enumerate(calls)}
    for call in calls:
        call.number = numbers[call.number]
        call.after = None if call.after is None else numbers.get(call.after)
    if options.rate != 1:
        workload.notes.append(f"arrivals are {options.rate:g} times as fast; pauses inside conversations are unchanged")
    workload.calls = calls
    return workload
