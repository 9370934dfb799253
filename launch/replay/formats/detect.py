"""Which format a trace has, by what it holds and not by its name; and the one way to load any."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from quire.launch.replay.formats import (
    agent_text,
    agentic,
    azure,
    mooncake,
    quire,
    sched_trace,
    synthetic,
)
from quire.launch.replay.formats.options import LoadOptions
from quire.launch.replay.formats.read import Faults, files_of, read_lines
from quire.launch.replay.formats.table import fields_of
from quire.launch.replay.workload.workload import Workload
from quire.protocol.errors import ConfigError, did_you_mean

Loader = Callable[[Path, LoadOptions], Workload]
_LOADERS: Mapping[str, Loader] = {
    "quire": quire.load,
    "sched-trace": sched_trace.load,
    "mooncake": mooncake.load,
    "agentic": agentic.load,
    "agent-text": agent_text.load,
    "azure": azure.load,
}
FORMATS = (*_LOADERS, "synthetic")
"""What ``--format`` takes, besides auto."""

_MARKS = {
    "mooncake": ("timestamp", "input_length", "hash_ids"),
    "agentic": ("block_size", "requests"),
    "agent-text": ("session_id", "input", "output"),
}
_LOOK_AHEAD = 20


def load_workload(path: Path, format: str, options: LoadOptions) -> Workload:
    """The calls of a trace, in order of arrival.

    Args:
        path: a file, a folder, or a ``synthetic:`` spec.
        format: one of ``FORMATS``, or auto.

    Raises:
        ConfigError: the format is unknown, or the trace cannot be used; says where and why.
    """
    if format == "auto":
        format = detect_format(path)
    if format == "synthetic":
        return synthetic.load(path, options, lambda other: load_workload(other, "auto", LoadOptions(seed=options.seed)))
    if format not in _LOADERS:
        raise ConfigError(f"unknown format {format!r}{did_you_mean(format, FORMATS)}; known are: {_known()}")
    if not path.exists():
        raise ConfigError(f"{path}: no such file or folder")
    return _LOADERS[format](path, options)


def detect_format(path: Path) -> str:
    """Raises: ConfigError: nothing is there, or it is none of the formats."""
    if str(path).startswith(synthetic.PREFIX):
        return "synthetic"
    if path.is_dir():
        return _of_folder(path)
    if not path.is_file():
        raise ConfigError(f"{path}: no such file or folder")
    found = _of_file(path)
    if found is None:
        raise ConfigError(f"{path}: this is none of the formats that are known: {_known()}")
    return found


def _known() -> str:
    return ", ".join(FORMATS)


def _of_folder(folder: Path) -> str:
    found = {file.name: _of_file(file) or "unknown" for file in files_of(folder)}
    formats = set(found.values())
    if formats == {"unknown"}:
        raise ConfigError(f"{folder}: no file in it has a format that is known: {_known()}")
    if len(formats) > 1:
        listed = ", ".join(f"{name}: {format}" for name, format in found.items())
        raise ConfigError(f"{folder}: its files have different formats; name one of them ({listed})")
    return formats.pop()


def _of_file(file: Path) -> str | None:
    """By its first line. Raises: ConfigError: it is empty, or cannot be read."""
    lines = read_lines(file, Faults(False))
    first = next(lines, None)
    if first is None:
        raise ConfigError(f"{file}: the file is empty")
    number, line = first
    if line.lstrip().startswith(b"{"):
        found = _of_record(file, number, line)
        # A scheduler's trace may begin with records of other kinds.
        rest = islice(lines, _LOOK_AHEAD if found is None else 0)
        return next((kind for kind in (found, *(_of_record(file, *each) for each in rest)) if kind), None)
    return "azure" if set(azure.COLUMNS) <= set(fields_of(line)) else None


def _of_record(file: Path, number: int, line: bytes) -> str | None:
    try:
        record = msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{file}:{number}: this begins like JSON lines, but: {error}") from None
    if record.get("kind") == "header":
        return "quire"
    for name, keys in _MARKS.items():
        if all(key in record for key in keys):
            return name
    return "sched-trace" if sched_trace.kind_of(record) else None
