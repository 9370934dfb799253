"""Reads the lines of a trace: whole, rotated, packed or cut short. What is wrong is said with file and line."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import msgspec

from quire.launch.replay.recorded import version_1
from quire.launch.replay.recorded.decompress import DECOMPRESSION_ERRORS, open_decompressed
from quire.protocol.errors import ConfigError, QuireError
from quire.scheduler_proc.trace import lines
from quire.scheduler_proc.trace.lines import AnyLine, End, Header, Lost

_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, QuireError)
"""QuireError: sampling parameters that cannot be."""
_LONGEST_HEADER = 2**24
LONGEST_LINE = 2**26
"""Bytes. A state of a large engine has some millions; a line without end would take all memory."""
_CRC = b',"crc":'


class TraceLine(NamedTuple):
    """``number``: from 1 within ``file``. ``is_intact``: the line has the checksum that it says."""

    line: AnyLine
    number: int
    file: str
    is_intact: bool = True


class _First(msgspec.Struct):
    """As much of a first line as every version will have."""

    kind: str = ""
    format: str = ""
    version: int = -1


class TraceReader:
    """The lines of one trace, in order, of all its files. Owns no file while nobody iterates.

    With ``lenient`` what is damaged is replaced by a ``Lost`` line each, and counted.

    Attributes:
        files: of the trace, in order, as far as they were found.
        header: of the first file.
        num_left_out: damaged lines so far.
        notes: what a reader of the result should know, once the iteration is over.
    """

    def __init__(self, path: Path, *, lenient: bool = False, keep_altered: bool = False) -> None:
        """
        Args:
            path: a file, whose further parts are found beside it, or a folder that holds one trace.
            keep_altered: lines whose checksum does not match are given as they are, with ``is_intact`` false.

        Raises:
            ConfigError: there is no trace, it is of another version, or begins in the middle.
        """
        self._lenient = lenient
        self._keep_altered = keep_altered
        self.num_left_out = 0
        self.notes: list[str] = []
        self.files = _find_files(path)
        self.header = read_header(self.files[0])
        self._is_version_1 = _first_line(self.files[0])[1].version == version_1.VERSION
        if self.header.part:
            self._complain(f"{self.files[0]} is part {self.header.part} of a trace; the parts before it are missing")

    def __iter__(self) -> Iterator[TraceLine]:
        """Raises ConfigError at what is damaged, or missing, unless the reader is lenient."""
        for at, file in enumerate(self.files):
            if at and read_header(file).part != self.header.part + at:
                self._complain(f"{file} is part {read_header(file).part}, not {self.header.part + at} of the trace")
                return
            end = None
            for told in self._read(file):
                yield told
                if isinstance(told.line, End):
                    end = told.line
            if end is None or not end.next_part:
                self._note_end(end, at)
                return
        self._complain(f"{self.files[-1]} says that the trace goes on in another file, which is missing")

    def _note_end(self, end: End | None, at: int) -> None:
        if end is None:
            self.notes.append(f"{self.files[at]} has no end: it was cut short, or is still being written")
        if self.files[at + 1 :]:
            self.notes.append(f"{self.files[at]} is the last part; {self.files[at + 1]} is of another trace")

    def _read(self, file: Path) -> Iterator[TraceLine]:
        name, number = file.name, 0
        try:
            with open_decompressed(file) as stream:
                while raw := stream.readline(LONGEST_LINE + 1):
                    number += 1
                    if len(raw) > LONGEST_LINE:
                        yield self._damaged(
                            f"{file}:{number}: the line is longer than {LONGEST_LINE} bytes", number, name
                        )
                        return
                    yield self._decode(raw, number, name, file)
        except DECOMPRESSION_ERRORS as error:
            yield self._damaged(f"{file}:{number + 1}: {_say(error)}", number + 1, name)

    def _decode(self, raw: bytes, number: int, name: str, file: Path) -> TraceLine:
        if self._is_version_1:
            raw = version_1.upgrade(raw)
        try:
            line = lines.decode_line(raw)
        except _UNREADABLE as error:
            what = "is cut short" if not raw.endswith(b"\n") else f"is damaged: {error}"
            return self._damaged(f"{file}:{number}: the line {what}", number, name)
        body, _, crc = raw.rpartition(_CRC)
        if crc32(b"}", crc32(body)) == line.crc and crc.rstrip() == b"%d}" % line.crc:  # as it was written
            return TraceLine(line, number, name)
        if lines.is_intact(line):  # written again by somebody, with other spaces
            return TraceLine(line, number, name)
        if self._keep_altered:
            return TraceLine(line, number, name, False)
        return self._damaged(f"{file}:{number}: the line was altered: its checksum does not match", number, name)

    def _damaged(self, text: str, number: int, name: str) -> TraceLine:
        if not self.num_left_out:
            self._complain(text)
        self.num_left_out += 1
        return TraceLine(Lost(lines=1), number, name)

    def _complain(self, text: str) -> None:
        if not self._lenient:
            raise ConfigError(f"{text} (--lenient keeps what is good)")
        self.notes.append(text)


def read_header(file: Path) -> Header:
    """Return the header of ``file``, in the current version of the format.

    Raises:
        ConfigError: ``file`` is not a Quire trace, or its version is not supported.
    """
    raw, first = _first_line(file)
    if first.kind != "header" or first.format != lines.FORMAT:
        kind = f"format {first.format[:40]!r}" if first.format else "no header of one"
        raise ConfigError(f"{file}:1: the line is not the header of a Quire trace ({kind})")
    if first.version not in (version_1.VERSION, lines.VERSION):
        raise ConfigError(
            f"{file} has version {first.version} of the trace format; this Quire reads versions 1 to {lines.VERSION}"
        )
    try:
        header = lines.decode_line(version_1.upgrade(raw) if first.version == version_1.VERSION else raw)
    except _UNREADABLE as error:
        raise ConfigError(f"{file}:1: the line is damaged: {error}") from None
    assert isinstance(header, Header)  # it says so
    return header


def _first_line(file: Path) -> tuple[bytes, _First]:
    try:
        with open_decompressed(file) as stream:
            raw = stream.readline(_LONGEST_HEADER)
    except DECOMPRESSION_ERRORS as error:
        raise ConfigError(f"{file}: {_say(error)}") from None
    if not raw:
        raise ConfigError(f"{file} is empty")
    try:
        return raw, msgspec.json.decode(raw, type=_First)
    except _UNREADABLE:
        return raw, _First()


def is_trace(file: Path) -> bool:
    """Whether it begins as one of ours, of whatever version."""
    try:
        with open_decompressed(file) as stream:
            return msgspec.json.decode(stream.readline(_LONGEST_HEADER), type=_First).format == lines.FORMAT
    except (*DECOMPRESSION_ERRORS, *_UNREADABLE):
        return False


def _find_files(path: Path) -> list[Path]:
    """The files of one trace, in order."""
    if path.is_dir():
        return _of_folder(path)
    if not path.exists():
        raise ConfigError(f"{path}: no such file")
    parts: list[tuple[int, Path]] = []
    for sibling in path.parent.iterdir() if path.name else ():
        found = re.fullmatch(re.escape(path.name) + r"\.(\d+)", sibling.name)
        if found and sibling.is_file():
            parts.append((int(found[1]), sibling))
    return [path, *(sibling for _, sibling in sorted(parts))]


def _of_folder(folder: Path) -> list[Path]:
    files = [file for file in sorted(folder.iterdir()) if file.is_file() and is_trace(file)]
    headers = {file: read_header(file) for file in files}
    if not files:
        raise ConfigError(f"{folder} holds no Quire trace")
    firsts = [file for file in files if headers[file].part == 0]
    if len(firsts) > 1:
        raise ConfigError(f"{folder} holds {len(firsts)} traces, of which {firsts[0].name} is one: name it")
    return sorted(files, key=lambda file: headers[file].part)


def _say(error: Exception) -> str:
    return f"the packed data is damaged or cut short ({error})"
