"""Reads tables of measured times, plain or compressed, and says the line that is wrong."""

import csv
import gzip
import lzma
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from quire.protocol.errors import ConfigError

_OPENERS = {"": open, ".gz": gzip.open, ".xz": lzma.open}


def find_file(folder: Path, name: str) -> Path | None:
    """``name`` in ``folder``, plain or compressed; None where there is neither."""
    for suffix in _OPENERS:
        path = folder / (name + suffix)
        if path.is_file():
            return path
    return None


def open_text(path: Path) -> IO[str]:
    """For reading, by its suffix. Raises OSError."""
    opener = _OPENERS.get(path.suffix, open)
    return opener(path, "rt", encoding="utf-8", newline="")  # type: ignore[operator, no-any-return]


def read_text(path: Path) -> str:
    """All of a file, by its suffix.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        with open_text(path) as file:
            return file.read()
    except (OSError, EOFError, UnicodeDecodeError, lzma.LZMAError, zlib.error) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None


def read_table(path: Path, keys: Sequence[str], value: str) -> Iterator[tuple[list[str], float]]:
    """Each row's ``keys`` columns as they stand, and its ``value``, a positive number.

    Raises:
        ConfigError: names the file, and the line where there is one.
    """
    rows = csv.reader(read_text(path).splitlines())
    header = next(rows, [])
    missing = [name for name in (*keys, value) if name not in header]
    if missing:
        raise ConfigError(f"{path}:1: no column {', '.join(missing)}; it has {', '.join(header) or 'none'}")
    places, at = [header.index(name) for name in keys], header.index(value)
    for row in rows:
        if not row:
            continue
        where = f"{path}:{rows.line_num}"
        if len(row) != len(header):
            raise ConfigError(f"{where}: {len(row)} columns; the header has {len(header)}")
        yield [row[place] for place in places], positive(row[at], f"{where}: {value}")


def read_points(path: Path, keys: Sequence[str], value: str) -> dict[tuple[int, ...], float]:
    """By whole-numbered ``keys``, the ``value``; of points that occur more than once, the mean.

    Raises:
        ConfigError: names the file, and the line where there is one; or there is no row at all.
    """
    sums: dict[tuple[int, ...], tuple[float, int]] = {}
    for line, (texts, number) in enumerate(read_table(path, keys, value), 2):
        try:
            point = tuple(map(int, texts))
        except ValueError:
            raise ConfigError(f"{path}:{line}: {', '.join(keys)} must be whole numbers, not {texts}") from None
        if min(point) < 0:
            raise ConfigError(f"{path}:{line}: {', '.join(keys)} must not be negative: {texts}")
        total, count = sums.get(point, (0.0, 0))
        sums[point] = total + number, count + 1
    if not sums:
        raise ConfigError(f"{path}: no rows")
    return {point: total / count for point, (total, count) in sums.items()}


def positive(text: str, where: str) -> float:
    """Raises ConfigError unless it is a number above 0 and below infinity."""
    try:
        number = float(text)
    except ValueError:
        raise ConfigError(f"{where} must be a number, not {text!r}") from None
    if not 0 < number < float("inf"):
        raise ConfigError(f"{where} must be above 0, not {text}")
    return number
