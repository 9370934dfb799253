"""Detects the format of a trace by its content, not by its name, and loads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from quire.protocol.errors import ConfigError, did_you_mean
from quire.replay.formats import (
    agent_text,
    agentic,
    azure,
    measured,
    mooncake,
    quire,
    sched_trace,
    synthetic,
)
from quire.replay.formats.options import LoadOptions
from quire.replay.formats.read import Faults, files_of, read_lines
from quire.replay.formats.table import fields_of
from quire.replay.workload.workload import Workload

Loader = Callable[[Path, LoadOptions], Workload]
_LOADERS: Mapping[str, Loader] = {
    "quire": quire.load,
    "sched-trace": sched_trace.load,
    "mooncake": mooncake.load,
    "agentic": agentic.load,
    "agent-text": agent_text.load,
    "azure": azure.load,
    "measured": measured.load,
}
FORMATS = (*_LOADERS, "synthetic")
"""The values of ``--format`` except auto."""

_MARKS = {
    "mooncake": ("timestamp", "input_length", "hash_ids"),
    "agentic": ("block_size", "requests"),
    "agent-text": ("session_id", "input", "output"),
}
ROUTER_HEADER = "router-header"
"""Kind of the first line of a router's trace, which is not a workload: it is only replayed as recorded."""
_LOOK_AHEAD = 20


def load_workload(path: Path, format: str, options: LoadOptions) -> Workload:
    """Load a trace of any format.

    Args:
        path: a file, a folder, or a ``synthetic:`` spec.
        format: one of ``FORMATS``, or auto.

    Raises:
        ConfigError: an unknown format or an unusable trace; names the file and the line if there is one.
    """
    if format == "auto":
        format = detect_format(path)
    if format == "synthetic":
        return synthetic.load(path, options, lambda other: load_workload(other, "auto", LoadOptions(seed=options.seed)))
    if format == "router":
        raise ConfigError(f"{path}: a router's trace can only be replayed as recorded, without other flags")
    if format not in _LOADERS:
        raise ConfigError(f"unknown format {format!r}{did_you_mean(format, FORMATS)}; known: {_known()}")
    if not path.exists():
        raise ConfigError(f"{path}: file or folder not found")
    return _LOADERS[format](path, options)


def detect_format(path: Path) -> str:
    """Return the format of a trace. Raises ConfigError if the path does not exist or has no known format."""
    if str(path).startswith(synthetic.PREFIX):
        return "synthetic"
    if path.is_dir():
        return _detect_folder(path)
    if not path.is_file():
        raise ConfigError(f"{path}: file or folder not found")
    found = _detect_file(path)
    if found is None:
        raise ConfigError(f"{path}: unknown trace format; known: {_known()}")
    return found


def _known() -> str:
    return ", ".join(FORMATS)


def _detect_folder(folder: Path) -> str:
    if measured.is_measured(folder):
        return "measured"
    found = {file.name: _detect_file(file) or "unknown" for file in files_of(folder)}
    formats = set(found.values())
    if formats == {"unknown"}:
        raise ConfigError(f"{folder}: contains no file of a known format: {_known()}")
    if len(formats) > 1:
        listed = ", ".join(f"{name}: {format}" for name, format in found.items())
        raise ConfigError(f"{folder}: its files have different formats: name one file ({listed})")
    return formats.pop()


def _detect_file(file: Path) -> str | None:
    """Detect the format by the first lines. Raises ConfigError if the file is empty or unreadable."""
    lines = read_lines(file, Faults(False))
    first = next(lines, None)
    if first is None:
        raise ConfigError(f"{file}: the file is empty")
    number, line = first
    if line.lstrip().startswith(b"{"):
        found = _detect_record(file, number, line)
        # A scheduler's trace may begin with records of other kinds.
        rest = islice(lines, _LOOK_AHEAD if found is None else 0)
        return next((kind for kind in (found, *(_detect_record(file, *each) for each in rest)) if kind), None)
    return "azure" if set(azure.COLUMNS) <= set(fields_of(line)) else None


def _detect_record(file: Path, number: int, line: bytes) -> str | None:
    try:
        record = msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{file}:{number}: invalid JSON: {error}") from None
    if record.get("kind") in ("header", ROUTER_HEADER):
        return "quire" if record["kind"] == "header" else "router"
    for name, keys in _MARKS.items():
        if all(key in record for key in keys):
            return name
    return "sched-trace" if sched_trace.kind_of(record) else None
