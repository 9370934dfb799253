"""Reads tables of measured times, plain or compressed, and says the line that is wrong."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from quire.launch.replay.formats.arrivals import positive
from quire.launch.replay.formats.read import Faults
from quire.launch.replay.formats.table import read_table
from quire.launch.replay.recorded.decompress import DECOMPRESSION_ERRORS, open_decompressed
from quire.protocol.errors import ConfigError


def find_file(folder: Path, name: str) -> Path | None:
    """``name`` in ``folder``, plain or compressed; None where there is neither."""
    return next((path for end in ("", ".gz", ".xz", ".zst") if (path := folder / (name + end)).is_file()), None)


def read_text(path: Path) -> str:
    """All of a file, unpacked.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        with open_decompressed(path) as file:
            return file.read().decode()
    except (*DECOMPRESSION_ERRORS, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None


def read_measured(path: Path, keys: Sequence[str], value: str) -> Iterator[tuple[int, list[str], float]]:
    """Each row's line, its ``keys`` columns as they stand, and its ``value``, a positive number.

    Raises:
        ConfigError: names the file, and the line where there is one.
    """
    for line, (*texts, number) in read_table(path, (*keys, value), Faults(False)):
        yield line, texts, positive(number, f"{path}:{line}: {value}")


def read_points(path: Path, keys: Sequence[str], value: str) -> dict[tuple[int, ...], float]:
    """By whole-numbered ``keys``, the ``value``; of points that occur more than once, the mean.

    Raises:
        ConfigError: names the file, and the line where there is one; or there is no row at all.
    """
    sums: dict[tuple[int, ...], tuple[float, int]] = {}
    for line, texts, number in read_measured(path, keys, value):
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
