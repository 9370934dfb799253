"""CSV files of traces: a header, no quotes, either kind of line ending."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from quire.protocol.errors import ConfigError
from quire.replay.formats.read import MAX_TOKENS, Faults, read_lines


def fields_of(line: bytes) -> list[str]:
    return [field.strip() for field in line.decode("utf-8", "backslashreplace").split(",")]


def read_table(path: Path, columns: Sequence[str], faults: Faults) -> Iterator[tuple[int, list[str]]]:
    """Yield each line's number and its fields of ``columns``, in this order.

    Raises:
        ConfigError: the header lacks a column, or, unless lenient, a line has more or fewer fields than the header.
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
    """Parse a number of tokens. Raises ValueError unless it is a whole number from ``least`` to ``MAX_TOKENS``."""
    if not (text.isascii() and text.isdigit() and len(text) < 20 and least <= int(text) <= MAX_TOKENS):
        raise ValueError(f"`{column}` must be a whole number from {least} to {MAX_TOKENS} (got {text[:40]!r})")
    return int(text)
