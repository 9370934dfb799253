"""Files of traces, line by line: compressed or not, good or bad; a bad line is one clear error, or is counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from quire.launch.replay.formats.options import LoadOptions
from quire.launch.replay.recorded.decompress import DECOMPRESSION_ERRORS, open_decompressed
from quire.launch.replay.workload.workload import Call, Workload
from quire.protocol.errors import ConfigError

MAX_TOKENS = 2**31 - 1
MAX_LINE_BYTES = 2**28
_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".log", ".txt")
PromptLength = Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
AnswerLength = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
T = TypeVar("T")


class Faults:
    """Bad lines of one load: the first is raised, or each is left out and counted where the user is lenient.

    Attributes:
        empty: how many prompts or answers had no token. ``num_earlier``: lines that were out of order.
    """

    def __init__(self, lenient: bool) -> None:
        self.lenient = lenient
        self.count = self.num_earlier = 0
        self.empty: Counter[str] = Counter()
        self._first = ""

    def add(self, path: Path, line: int, what: str) -> None:
        """Raises: ConfigError: unless lenient."""
        said = f"{path}:{line}: {what}"
        if not self.lenient:
            raise ConfigError(said)
        self.count += 1
        self._first = self._first or said

    def add_earlier(self, path: Path, line: int, what: str) -> None:
        """A line's time is less than in the line before: lenient, it is counted, and is no bad line.

        Raises:
            ConfigError: unless lenient.
        """
        self.num_earlier += 1
        if not self.lenient:
            self.add(path, line, what)

    def at_least_one_token(self, num_tokens: int, what: str = "answer") -> int:
        """A prompt or an answer of no tokens cannot be run: it is counted, and has one."""
        self.empty[what] += not num_tokens
        return num_tokens or 1

    def notes(self) -> list[str]:
        notes = []
        if self.count:
            lines = "1 bad line was" if self.count == 1 else f"{self.count} bad lines were"
            notes.append(f"{lines} left out; the first: {self._first}")
        for what, count in self.empty.items():
            if count:
                notes.append(f"{count} empty {what}{'s are' if count > 1 else ' is'} taken as one token")
        if self.num_earlier:
            lines = f"{self.num_earlier} line{'s are' if self.num_earlier > 1 else ' is'}"
            notes.append(f"{lines} earlier than the one before: all were sorted by time")
        return notes


def read_lines(path: Path, faults: Faults) -> Iterator[tuple[int, bytes]]:
    """Number, from 1, and bytes of each line that is not blank. A file that begins with a brace alone on its line is
    one JSON object over many lines, and given as one.

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
    """Number, from 1, and bytes of each line that is not blank.

    Raises:
        ConfigError: the file cannot be opened or decompressed (lenient: what came before the break is given), or one
            line is absurdly long.
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
    """Line number and value of every good line of a file of JSON lines; others are counted as bad."""
    decoder = msgspec.json.Decoder(type_)
    for number, line in read_lines(path, faults):
        try:
            value = decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            faults.add(path, number, _plain(str(error)))
        else:
            yield number, value


def _plain(error: str) -> str:
    return error.replace(" - at `$.", " - in `").replace("`$`", "the line")


def files_of(path: Path) -> list[Path]:
    """The file itself, or in order of name those of a folder that by their names may hold a trace.

    Raises:
        ConfigError: nothing is there.
    """
    if path.is_dir():
        files = sorted(entry for entry in path.iterdir() if entry.is_file() and _may_be_trace(entry.name))
        if not files:
            folders = ", ".join(sorted(entry.name for entry in path.iterdir() if entry.is_dir()))
            hint = f"; name one of its folders: {folders}" if folders else ""
            raise ConfigError(f"{path}: the folder holds no file of a trace ({', '.join(_SUFFIXES)}){hint}")
        return files
    if not path.is_file():
        raise ConfigError(f"{path}: no such file or folder")
    return [path]


def _may_be_trace(name: str) -> bool:
    for end in (".gz", ".xz", ".zst"):
        name = name.removesuffix(end)
    return name.endswith(_SUFFIXES) and not name.startswith(".")


def shift_times(calls: list[Call], rate: float) -> None:
    """Let conversations, and calls of none, start ``rate`` times as fast; what is inside one keeps its distances."""
    if rate == 1:
        return
    starts: dict[str, float] = {}
    for call in calls:
        start = starts.setdefault(call.conversation, call.arrival) if call.conversation else call.arrival
        call.arrival = start / rate + (call.arrival - start)


def finish(workload: Workload, options: LoadOptions, faults: Faults) -> Workload:
    """Cut to the window and the limit, scale, put in order of arrival (equal times as they stand) and number.

    ``call.number`` and ``call.after`` may be any numbers that are unique among the calls.

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
        why = f"none of its {total} requests is in the window" if total else "it holds no request"
        raise ConfigError("; ".join([f"{workload.source}: {why}", *workload.notes]))
    if len(calls) < total:
        workload.notes.append(f"{len(calls)} of {total} requests are taken")
    numbers = {call.number: new for new, call in enumerate(calls)}
    for call in calls:
        call.number = numbers[call.number]
        call.after = None if call.after is None else numbers.get(call.after)
    if options.rate != 1:
        workload.notes.append(f"starts come {options.rate:g} times as fast; pauses inside a conversation are unchanged")
    workload.calls = calls
    return workload
