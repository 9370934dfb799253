"""CSV files with a header, as traces have them: no quotes, either kind of line end."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from quire.launch.replay.formats.read import MAX_TOKENS, Faults, read_lines
from quire.protocol.errors import ConfigError


def fields_of(line: bytes) -> list[str]:
    return [field.strip() for field in line.decode("utf-8", "backslashreplace").split(",")]


def read_table(path: Path, columns: Sequence[str], faults: Faults) -> Iterator[tuple[int, list[str]]]:
    """Line number and the fields of ``columns``, in this order whatever the file's.

    Raises:
        ConfigError: the header lacks one of them; a line has more or fewer fields than the header (unless lenient).
    """
    header: list[str] = []
    for number, line in read_lines(path, faults):
        fields = fields_of(line)
        if not header:
            header = fields
            missing = [column for column in columns if column not in header]
            if missing:
                raise ConfigError(f"{path}:{number}: the header lacks {', '.join(missing)}")
            places = [header.index(column) for column in columns]
        elif len(fields) != len(header):
            faults.add(path, number, f"{len(fields)} fields; the header has {len(header)}")
        else:
            yield number, [fields[place] for place in places]


def token_count(text: str, column: str, least: int = 0) -> int:
    """Raises: ValueError: it is no whole number from ``least`` to what a request can be."""
    if not (text.isascii() and text.isdigit() and len(text) < 20 and least <= int(text) <= MAX_TOKENS):
        raise ValueError(f"`{column}` must be a whole number from {least} to {MAX_TOKENS}, not {text[:40]!r}")
    return int(text)
