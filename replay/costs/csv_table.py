"""Reads CSV tables of measured times, compressed or not. Errors name the line."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from quire.protocol.errors import ConfigError
from quire.replay.formats.arrivals import positive
from quire.replay.formats.read import Faults
from quire.replay.formats.table import read_table
from quire.replay.recorded.decompress import DECOMPRESSION_ERRORS, open_decompressed


def read_text(path: Path) -> str:
    """Read a whole file, decompressed. Raises ConfigError if it cannot be read."""
    try:
        with open_decompressed(path) as file:
            return file.read().decode()
    except (*DECOMPRESSION_ERRORS, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None


def read_measured(path: Path, keys: Sequence[str], value: str) -> Iterator[tuple[int, list[str], float]]:
    """Yield each row's line number, the texts of its ``keys`` columns, and its ``value``, a positive number.

    Raises:
        ConfigError: a bad line; names the file and the line.
    """
    for line, (*texts, number) in read_table(path, (*keys, value), Faults(False)):
        yield line, texts, positive(number, f"{path}:{line}: {value}")


def read_points(path: Path, keys: Sequence[str], value: str) -> dict[tuple[int, ...], float]:
    """Read ``value`` by the integers in the columns ``keys``; repeated points are averaged.

    Raises:
        ConfigError: a bad line or a table without rows; names the file, and the line if there is one.
    """
    sums: dict[tuple[int, ...], tuple[float, int]] = {}
    for line, texts, number in read_measured(path, keys, value):
        try:
            point = tuple(map(int, texts))
        except ValueError:
            raise ConfigError(f"{path}:{line}: {', '.join(keys)} must be whole numbers (got {texts})") from None
        if min(point) < 0:
            raise ConfigError(f"{path}:{line}: {', '.join(keys)} must not be negative (got {texts})")
        total, count = sums.get(point, (0.0, 0))
        sums[point] = total + number, count + 1
    if not sums:
        raise ConfigError(f"{path}: the table has no rows")
    return {point: total / count for point, (total, count) in sums.items()}
