"""Reads the lines of a trace: whole, rotated, compressed or cut short. Errors name the file and the line."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import msgspec

from quire.protocol.errors import ConfigError, QuireError
from quire.replay.recorded import older_versions
from quire.replay.recorded.decompress import DECOMPRESSION_ERRORS, open_decompressed
from quire.scheduler_proc.trace import lines
from quire.scheduler_proc.trace.lines import AnyLine, End, Header, Keyframe, Lost

_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, QuireError)
"""Errors of decoding a line; QuireError: invalid sampling parameters."""
_LONGEST_HEADER = 2**24
LONGEST_LINE = 2**26
"""Bytes. The keyframe of a large engine has a few million; a line without an end would fill the memory."""
_CRC = b',"crc":'
_LONGEST_HASH = 64
_LATEST = 1e12


class TraceLine(NamedTuple):
    """A line with its position. ``number`` counts from 1 within ``file``; ``is_intact``: its checksum is right."""

    line: AnyLine
    number: int
    file: str
    is_intact: bool = True


class _First(msgspec.Struct):
    """The fields of a first line that every format version has."""

    kind: str = ""
    format: str = ""
    version: int = -1
    config: Any = None


class TraceReader:
    """Iterates over the lines of all files of a trace, in order. Files are open only during an iteration.

    With ``lenient``, each damaged line is replaced by a ``Lost`` line and counted.

    Attributes:
        files: the files of the trace that were found, in order.
        header: header of the first file.
        num_left_out: damaged lines so far.
        notes: problems to show to the user, complete after the iteration.
    """

    def __init__(self, path: Path, *, lenient: bool = False, keep_altered: bool = False) -> None:
        """
        Args:
            path: the first file of a trace, with the other parts beside it, or a folder with one trace.
            keep_altered: yield lines with a wrong checksum, with ``is_intact`` false.

        Raises:
            ConfigError: no trace, an unsupported version, or a missing first part.
        """
        self._lenient = lenient
        self._keep_altered = keep_altered
        self.num_left_out = 0
        self.notes: list[str] = []
        self.files = _find_files(path)
        self.header = read_header(self.files[0])
        if self.header.part:
            self._report(f"{self.files[0]} is part {self.header.part} of a trace; the parts before it are missing")

    def __iter__(self) -> Iterator[TraceLine]:
        """Yield every line. Raises ConfigError at damaged or missing data unless the reader is lenient."""
        for at, file in enumerate(self.files):
            if at and read_header(file).part != self.header.part + at:
                self._report(f"{file} is part {read_header(file).part}, not {self.header.part + at} of the trace")
                return
            # Before the file is read: the last line of a scheduler that died may be cut, which is then no damage.
            restarts = self._restarts_after(at)
            end = None
            for each in self._read(file, may_be_cut=restarts):
                yield each
                if isinstance(each.line, End):
                    end = each.line
            if restarts:
                self.notes.append(f"the scheduler died at the end of {file}; a new one begins in {self.files[at + 1]}")
            elif end is None or not end.next_part:
                self._note_end(end, at)
                return
        self._report(f"{self.files[-1]} is not the last part of the trace; the next part is missing")

    def _restarts_after(self, at: int) -> bool:
        """Whether the file after file ``at`` begins with the scheduler that replaced a dead one."""
        if at + 1 >= len(self.files):
            return False
        try:
            header = read_header(self.files[at + 1])
        except ConfigError:
            return False
        is_next = header.trace_id == self.header.trace_id and header.part == self.header.part + at + 1
        return header.restarted and is_next

    def _note_end(self, end: End | None, at: int) -> None:
        if end is None:
            self.notes.append(f"{self.files[at]} has no end line: it was cut short or is still being written")
        if self.files[at + 1 :]:
            self.notes.append(f"{self.files[at]} is the last part; {self.files[at + 1]} belongs to another trace")

    def _read(self, file: Path, *, may_be_cut: bool) -> Iterator[TraceLine]:
        """Yield the lines of one file. ``may_be_cut``: omit a last line that its scheduler did not finish."""
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
                    if may_be_cut and not raw.endswith(b"\n"):
                        return
                    yield self._decode(raw, number, name, file)
        except DECOMPRESSION_ERRORS as error:
            if may_be_cut and isinstance(error, EOFError):
                return
            yield self._damaged(f"{file}:{number + 1}: {_describe(error)}", number + 1, name)

    def _decode(self, raw: bytes, number: int, name: str, file: Path) -> TraceLine:
        if self.header.version < lines.VERSION:
            raw = older_versions.upgrade(raw, self.header.version)
        try:
            line = lines.decode_line(raw)
        except _UNREADABLE as error:
            what = "is cut short" if not raw.endswith(b"\n") else f"is damaged: {error}"
            return self._damaged(f"{file}:{number}: the line {what}", number, name)
        if isinstance(line, Keyframe) and line.snapshot is None:
            raise ConfigError(
                f"{file}:{number}: the trace begins at a keyframe of a Quire from before 2026-11-28, whose form is not "
                "read any more: only such a Quire replays it"
            )
        body, _, crc = raw.rpartition(_CRC)
        if crc32(b"}", crc32(body)) == line.crc and crc.rstrip() == b"%d}" % line.crc:  # the bytes are unchanged
            return TraceLine(line, number, name)
        if lines.is_intact(line):  # rewritten with other spaces
            return TraceLine(line, number, name)
        if self._keep_altered:
            return TraceLine(line, number, name, False)
        return self._damaged(f"{file}:{number}: the line was altered: its checksum does not match", number, name)

    def _damaged(self, text: str, number: int, name: str) -> TraceLine:
        if not self.num_left_out:
            self._report(text)
        self.num_left_out += 1
        return TraceLine(Lost(lines=1), number, name)

    def _report(self, text: str) -> None:
        if not self._lenient:
            raise ConfigError(f"{text} (--lenient skips damaged lines)")
        self.notes.append(text)


def read_header(file: Path) -> Header:
    """Return the header of ``file``.

    Raises:
        ConfigError: ``file`` is not a Quire trace, or its version or its engine's eviction policy is not supported.
    """
    raw, first = _first_line(file)
    if first.kind != "header" or first.format != lines.FORMAT:
        kind = f"format {first.format[:40]!r}" if first.format else "no format"
        raise ConfigError(f"{file}:1: not the header of a Quire trace ({kind})")
    if not older_versions.OLDEST <= first.version <= lines.VERSION:
        raise ConfigError(
            f"{file} has version {first.version} of the trace format; this Quire reads versions 1 to {lines.VERSION}"
        )
    if isinstance(first.config, dict) and first.config.get("eviction_policy") == "value":
        raise ConfigError(
            f"{file} was recorded with --eviction-policy value, which was removed on 2026-11-28: "
            "only a Quire from before that day replays it (docs/log/2026-11-27.md)"
        )
    try:
        header = lines.decode_line(raw)
    except _UNREADABLE as error:
        raise ConfigError(f"{file}:1: the line is damaged: {error}") from None
    assert isinstance(header, Header)  # by its kind
    check_header(file, header)
    return header


def check_header(file: Path, header: Header) -> None:
    """Raise ConfigError for a number with which arithmetic on the lines would fail. Other numbers cannot do harm."""
    sizes = [("config.block_size", header.config.block_size)]
    sizes += [
        (f"kv_layout.groups[{i}].block_size", group.block_size) for i, group in enumerate(header.kv_layout.groups)
    ]
    for name, value, most in [("hash_bytes", header.hash_bytes, _LONGEST_HASH), *((*size, 2**20) for size in sizes)]:
        if not 1 <= value <= most:
            raise ConfigError(f"{file}:1: {name} must be between 1 and {most} (got {value}): the header is damaged")
    if not abs(header.now) < _LATEST:
        raise ConfigError(f"{file}:1: now must be a number of seconds below 1e12 (got {header.now})")


def _first_line(file: Path) -> tuple[bytes, _First]:
    try:
        with open_decompressed(file) as stream:
            raw = stream.readline(_LONGEST_HEADER)
    except DECOMPRESSION_ERRORS as error:
        raise ConfigError(f"{file}: {_describe(error)}") from None
    if not raw:
        raise ConfigError(f"{file} is empty")
    try:
        return raw, msgspec.json.decode(raw, type=_First)
    except _UNREADABLE:
        return raw, _First()


def is_trace(file: Path) -> bool:
    """Whether the file begins with the header of a Quire trace of any version."""
    try:
        with open_decompressed(file) as stream:
            return msgspec.json.decode(stream.readline(_LONGEST_HEADER), type=_First).format == lines.FORMAT
    except (*DECOMPRESSION_ERRORS, *_UNREADABLE):
        return False


def _find_files(path: Path) -> list[Path]:
    """Return the files of one trace, in order."""
    if path.is_dir():
        return _find_in_folder(path)
    if not path.exists():
        raise ConfigError(f"{path}: file not found")
    parts: list[tuple[int, Path]] = []
    for sibling in path.parent.iterdir() if path.name else ():
        found = re.fullmatch(re.escape(path.name) + r"\.(\d+)", sibling.name)
        if found and sibling.is_file():
            parts.append((int(found[1]), sibling))
    return [path, *(sibling for _, sibling in sorted(parts))]


def _find_in_folder(folder: Path) -> list[Path]:
    files = [file for file in sorted(folder.iterdir()) if file.is_file() and is_trace(file)]
    headers = {file: read_header(file) for file in files}
    if not files:
        raise ConfigError(f"{folder} contains no Quire trace")
    firsts = [file for file in files if headers[file].part == 0]
    if len(firsts) > 1:
        raise ConfigError(f"{folder} contains {len(firsts)} traces: name one of them, such as {firsts[0].name}")
    return sorted(files, key=lambda file: headers[file].part)


def _describe(error: Exception) -> str:
    return f"the compressed data is damaged or cut short ({error})"
