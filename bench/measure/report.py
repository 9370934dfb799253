"""Output of all benchmarks: short tables, then one line of JSON as the last line of stdout."""

import json
import math
import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO

import psutil

from quire.protocol.errors import ConfigError
from quire.protocol.process.host_limits import cpu_model, usable_cpus
from quire.protocol.process.log import one_line
from quire.version import __version__

PERCENTILES = (50, 90, 99)
STDOUT = Path("-")


@dataclass(frozen=True, slots=True)
class Table:
    """A text table. ``rows`` are (label, cells); ``columns`` are the headers of the cells."""

    title: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[float | str | None]]]

    def text(self) -> str:
        rows = [[self.title, *self.columns], *([label, *map(format_value, values)] for label, values in self.rows)]
        cells = [[one_line(cell) for cell in row] for row in rows]
        widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
        lines = (
            "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
            for row in cells
        )
        return "\n".join(line.rstrip() for line in lines)


@dataclass(slots=True)
class RunReport:
    """The results of one run of a benchmark.

    Attributes:
        settings: everything needed to repeat the run.
        results: figures by name, for the JSON line.
        notes: lines below the tables, such as reasons to doubt a figure.
    """

    benchmark: str
    settings: Mapping[str, Any]
    results: dict[str, Any] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def publish(self, json_path: Path | None, stream: TextIO | None = None) -> None:
        """Print the tables and the JSON line; also write the JSON to ``json_path``, if given. STDOUT: print it alone.

        Raises:
            ConfigError: the file cannot be written (after everything is printed).
        """
        out = sys.stdout if stream is None else stream
        if json_path != STDOUT:
            for table in self.tables:
                print(table.text(), end="\n\n", file=out)
            for note in self.notes:
                print(one_line(note), file=out)
        line = json.dumps(self.as_dict(), allow_nan=False)
        print(line, file=out, flush=True)
        if json_path not in (None, STDOUT):
            try:
                json_path.write_text(line + "\n", encoding="utf-8")
            except OSError as error:
                raise ConfigError(f"--json {json_path}: {error.strerror or error}") from None

    def as_dict(self) -> dict[str, Any]:
        return {
            "benchmark": self.benchmark,
            "settings": dict(self.settings),
            "results": self.results,
            "notes": self.notes,
            "machine": machine_facts(),
        }


def distribution(values: Iterable[float]) -> dict[str, float]:
    """Return mean, nearest-rank percentiles and maximum; empty if there are no values."""
    ordered = sorted(values)
    if not ordered:
        return {}
    ranks = {f"p{q}": ordered[max(0, math.ceil(q / 100 * len(ordered)) - 1)] for q in PERCENTILES}
    return {"mean": math.fsum(ordered) / len(ordered), **ranks, "max": ordered[-1]}


DISTRIBUTION_COLUMNS = ("mean", *(f"p{q}" for q in PERCENTILES), "max")


def distribution_row(label: str, found: Mapping[str, float], scale: float = 1.0) -> tuple[str, list[float | None]]:
    """Return the table row of a ``distribution``."""
    return label, [found[name] * scale if found else None for name in DISTRIBUTION_COLUMNS]


def format_value(value: float | str | None) -> str:
    """Format a figure with about three significant digits."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    digits = 1 if abs(value) >= 100 else 2 if abs(value) >= 1 else 3
    return f"{value:.{digits}f}"


def rounded(value: Any, digits: int = 6) -> Any:
    """Return ``value`` with all floats in it, at any depth, rounded to ``digits`` decimals."""
    if isinstance(value, float):
        return round(value, digits)
    if isinstance(value, Mapping):
        return {key: rounded(item, digits) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item, digits) for item in value]
    return value


def flat(tree: Mapping[str, Any], separator: str = ".", above: str = "") -> dict[str, Any]:
    """Return the leaves of a nested dict by path, ``key.key.key``."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        nested = isinstance(value, Mapping)
        found |= flat(value, separator, f"{above}{key}{separator}") if nested else {above + key: value}
    return found


def machine_facts() -> dict[str, Any]:
    """Return facts about the machine and its packages. No paths and no host name, because reports are shared."""
    return {
        "cpu": cpu_model(),
        "cores": usable_cpus(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {"quire": __version__} | {name: _version(name) for name in ("torch", "numpy")},
        "load1": round(os.getloadavg()[0], 2),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
